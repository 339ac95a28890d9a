"""A model's layers on their way from file to bus, as bytes that the device can fetch by itself.

    registered   pages of the page cache, fetched where they lie. Nothing is copied in RAM.
    pinned       a ring of buffers that reader threads fill: if pages cannot be registered, for
                 layers that do not fit into the RAM budget, and past the page cache if the file
                 is larger than RAM.

(The third way, managed memory, brings its own: see managed.py.) The way is found by trying, and the
reason is noted in the ledger. Pinned and registered bytes are taken from the RAM budget first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from ..checkpoint import Checkpoint
from ..device import Device
from ..layer import Layer
from ..ledger import Ledger
from ..open_file import OpenFile
from ..runs import (
    Run,
    Span,
    address_of,
    runs_of,
    spans_of,
)
from .direct import DirectReads
from .kept_pages import KeptPages
from .ram import RamBudget, measure_ram
from .registered import NotRegistered, Registrar
from .registered_pages import Places
from .ring import PinnedRing, PlainReads, Reading, Reads, RingSize
from .unbuffered import SUPPORTED

Way = Literal["auto", "registered", "pinned", "direct"]
READERS = 12
TRIED_BYTES = 1 << 20  # registered to see whether it can be done
# The ring's share of the RAM budget while pages are registered too: one part in so many, at most.
RING_SHARE = 8


class Bytes(NamedTuple):
    """Bytes `[offset, offset + nbytes)` of a run, at an address that the device can read."""

    run: Run
    offset: int
    nbytes: int
    address: int
    route: str


class Host:
    """The layers of one model. Call `ask` as soon as a layer will be copied and `take` when it is
    copied, both in the same order."""

    def __init__(
        self,
        device: Device,
        source: Checkpoint,
        layers: Sequence[Layer],
        ram: RamBudget,
        ledger: Ledger,
        way: Way = "auto",
        kept: KeptPages | None = None,
    ) -> None:
        self._device = device
        self._ram = ram
        self._ledger = ledger
        self.runs = [runs_of(layer, source.home) for layer in layers]
        self._readings: dict[int, list[Reading | None]] = {}  # None: registered
        self._registrar: Registrar | None = None
        files = list(dict.fromkeys(run.file for runs in self.runs for run in runs))
        spans = [spans_of(runs) for runs in self.runs]
        self.way, why = choose(device, spans, sum(file.header.size for file in files), way)
        ledger.note("host", why)
        reads = _reads(self.way, files, ledger)
        share = ram.total // RING_SHARE if self.way == "registered" else ram.total
        self._ring = PinnedRing(device, RingSize.within(share), reads, min(READERS, os.cpu_count() or 1))
        try:
            ram.take(self._ring.size.nbytes, "Reading weights")
        except BaseException:
            reads.close()
            raise
        self._ring_taken = self._ring.size.nbytes
        if self.way == "registered":
            self._registrar = Registrar(device, spans, ram, ledger, kept)
            self._ring.relent = self._registrar.relent

    @property
    def files(self) -> list[OpenFile]:
        return list(dict.fromkeys(run.file for runs in self.runs for run in runs))

    def expect(self, streamed: Sequence[int]) -> None:
        """Announce the layers that will be copied in every pass; the others are copied once."""
        if self._registrar is not None:
            self._registrar.expect(streamed)

    def ask(self, i: int) -> None:
        """Announce a copy of layer i, after all copies announced before."""
        is_registered = self._registrar is not None and self._registrar.serves(i)
        self._readings.setdefault(i, []).append(None if is_registered else self._ask_ring(self.runs[i]))

    def take(self, i: int) -> Iterator[Bytes]:
        """Yield layer i's bytes, each part when it is there. By the time the caller asks for the
        next part it has asked for the copy of this one. May begin anew in the middle, and then
        yields the whole layer again."""
        reading = self._readings[i].pop(0)
        if reading is None:
            assert self._registrar is not None
            try:
                for run, offset, address, nbytes in self._registrar.take(i, self.runs[i]):
                    yield Bytes(run, offset, nbytes, address, "registered")
                return
            except NotRegistered:
                reading = self._ask_ring(self.runs[i], first=True)
        for piece in self._ring.take(reading):
            yield Bytes(piece.run, piece.offset, piece.nbytes, piece.address, self._ring.reads.name)

    @contextlib.contextmanager
    def at_once(self, i: int) -> Iterator[Places | None]:
        """Layer i's bytes, if all of them are there and go as they are; the caller asks for their
        copies within the block. None: call `take`."""
        if self._registrar is None or self._readings[i][0] is not None:
            yield None
            return
        with self._registrar.at_once(i) as places:
            if places is not None:
                self._readings[i].pop(0)
            yield places

    def forget(self, i: int) -> None:
        """Drop the announced copy of layer i, which will not be made."""
        reading = self._readings[i].pop(0)
        if reading is not None:
            self._ring.cancel(reading)

    def close(self) -> None:
        """Release everything when copies are over: nothing stays pinned; registered pages are kept
        for the next pager, if it wants them. May be called twice."""
        if self._registrar is not None:
            self._registrar.close()
        self._ring.close()
        if self._ring_held:
            self._ledger.hold("pinned RAM", -self._ring_held)
            self._ring_held = 0
        self._ram.give_back(self._ring_taken)
        self._ring_taken = 0

    _ring_held = 0

    def _ask_ring(self, runs: Sequence[Run], *, first: bool = False) -> Reading:
        if not self._ring_held:
            self._ring_held = self._ring.size.nbytes
            self._ledger.hold("pinned RAM", self._ring_held)
        return self._ring.ask(runs, first=first)


def choose(device: Device, spans: Sequence[Sequence[Span]], file_bytes: int, way: Way) -> tuple[Way, str]:
    """The way to read, and why."""
    if way != "auto":
        return way, f"{way}: asked for"
    total = measure_ram().total
    if file_bytes > total and SUPPORTED:
        gib = 2**30
        return "direct", f"direct: the weights ({file_bytes / gib:.1f} GiB) are larger than RAM ({total / gib:.1f} GiB)"
    span = next((span for each in spans for span in each), None)
    if span is None:
        return "pinned", "pinned: there are no bytes to read"
    refusal = try_registering(device, span)
    if refusal is None:
        return "registered", "registered: the driver reads the file's pages where they lie"
    return "pinned", f"pinned: the driver does not read the file's pages where they lie ({refusal})"


def try_registering(device: Device, span: Span) -> str | None:
    """Register the beginning of a span and undo it. Returns the driver's reason if it cannot be
    done."""
    end = min(span.end, span.begin + TRIED_BYTES)
    mapped = span.file.map_pages(span.begin, end)
    address = address_of(mapped)
    try:
        device.register(address, end - span.begin)
    except Exception as error:
        return str(error)
    device.unregister(address)
    return None


def _reads(way: Way, files: Sequence[OpenFile], ledger: Ledger) -> Reads:
    if way == "direct":
        try:
            return DirectReads(files)
        except OSError as error:
            ledger.note("direct reads", f"not on this file system ({error}); through the page cache instead")
    return PlainReads()
