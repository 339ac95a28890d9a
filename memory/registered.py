"""Pages of weight files that the device reads where they lie in the page cache: no copy, no buffer.

A thread registers layers with the driver, ahead of use, in the order in which they will be needed, part by part, so that a
copy may begin with the first part. Which layers: as many as the RAM budget holds, spread over the order, and always the same.
Taking turns would be no use: the driver unregisters only when the device is idle, and keeps everybody waiting meanwhile
(measured). So pages are unregistered when the budget is asked for by another model, when the plan changes and at the end.

A layer has a mapping of its own: layers share pages at their ends, and the driver registers an address only once. Nobody
but the driver touches these addresses: where the file was cut meanwhile, it says so, while a thread would be ended by
SIGBUS. Registered pages are pinned, so that from then on a cut file gives old bytes, which `OpenFile.check` tells.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Literal

from .device import Device, Event
from .ledger import Ledger
from .page_cache import read_in
from .plan import spread
from .ram import GIB, RamBudget
from .runs import Run, Span, address_of

PART_BYTES = 64 << 20
READ_BYTES = 4 << 20
READERS = 12
LONGEST_PAUSE = 0.02  # seconds


class NotRegistered(RuntimeError):
    """These pages cannot be registered; the message says why. They can still be read."""


@dataclass(eq=False)
class Part:
    """Pages `[begin, end)` of a file at an address."""

    span: Span
    begin: int
    end: int
    address: int
    registered: bool = False


State = Literal["absent", "coming", "here", "leaving", "refused"]


@dataclass(eq=False)
class Entry:
    """One layer's pages."""

    spans: tuple[Span, ...]
    chosen: bool = False
    state: State = "absent"
    parts: list[Part] = field(default_factory=list)
    kept: list[mmap.mmap] = field(default_factory=list)  # a mapping lives as long as its pages are registered
    users: int = 0
    last: Event | None = None  # the copy that reads it
    why: str = ""

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    @property
    def idle(self) -> bool:
        return self.state == "here" and not self.users and (self.last is None or self.last.query())


class Registrar:
    """The layers of one model. `take` is called by the copying thread, in the order of the copies."""

    def __init__(self, device: Device, layers: Sequence[Sequence[Span]], ram: RamBudget, ledger: Ledger) -> None:
        self._device = device
        self._ram = ram
        self._ledger = ledger
        self._entries = [Entry(tuple(spans)) for spans in layers]
        self._position = 0  # the layer that is needed now
        self._wanted: tuple[Entry, Run, int] | None = None  # what the copying thread waits for
        self._sending = False  # whether it is asking the device for copies
        self._planning = False
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._readers = ThreadPoolExecutor(READERS, "fusestream-page-reader")
        ram.join(self)

    def expect(self, streamed: Collection[int]) -> None:
        """These layers will be copied in every pass, the others once. No copy is under way."""
        reach = self._ram.within_reach(self)
        leaving = []
        with self._changed:
            self._planning = True  # the thread finishes what it is at, and takes up nothing more
            self._changed.wait_for(lambda: all(e.state not in ("coming", "leaving") for e in self._entries))
            registered = sum(e.nbytes for e in self._entries if e.state == "here")
            chosen = choose_layers([e.nbytes for e in self._entries], streamed, reach + registered)
            for i, entry in enumerate(self._entries):
                entry.chosen = i in chosen
                if not entry.chosen and entry.state == "here":
                    entry.state = "leaving"
                    leaving.append(entry)
                elif entry.state == "refused":
                    entry.state = "absent"
        for entry in leaving:
            self._unregister(entry)
        with self._changed:
            self._planning = False
            self._changed.notify_all()

    def serves(self, i: int) -> bool:
        """Whether layer i is one that is registered, or will be."""
        with self._changed:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._work, name="fusestream-registering", daemon=True)
                self._thread.start()
            return self._entries[i].chosen and self._entries[i].state != "refused"

    def take(self, i: int, runs: Sequence[Run]) -> Iterator[tuple[Run, int, int, int]]:
        """Layer i's bytes as (run, offset in it, address, bytes), each when it is registered. When the next one is asked for,
        the copy of this one was. Raises NotRegistered, at the beginning or later, where they have to be read instead."""
        entry = self._entries[i]
        with self._changed:
            self._position = i
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing or self._is_settled(entry))
            self._check(entry)
            entry.users += 1
        try:
            for run in runs:
                offset = 0
                while offset < run.nbytes:
                    at = run.begin + offset
                    part = self._part_at(entry, run, at)
                    nbytes = min(part.end - at, run.nbytes - offset)
                    yield run, offset, part.address + (at - part.begin), nbytes
                    offset += nbytes
        finally:
            last = self._device.copy_event()
            with self._changed:
                self._sending = False
                entry.users -= 1
                entry.last = last
                self._changed.notify_all()

    def lendable(self) -> int:
        with self._changed:
            return sum(entry.nbytes for entry in self._entries if entry.idle)

    def relent(self, nbytes: int) -> None:
        """Another model needs RAM: give back what is idle here. It is read from now on."""
        freed = 0
        for entry in reversed(self._entries):
            with self._changed:
                if freed >= nbytes:
                    return
                if not entry.idle:
                    continue
                entry.state, entry.chosen = "leaving", False
            self._unregister(entry)
            freed += entry.nbytes

    def close(self) -> None:
        """Copies are over; nothing stays registered. May be called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._readers.shutdown()
        self._ram.leave(self)
        for entry in self._entries:
            if entry.state == "here":
                self._unregister(entry)

    @staticmethod
    def _is_settled(entry: Entry) -> bool:
        """Whether it is known if these pages are registered. What was chosen when the copy was announced may since have been
        given to another model."""
        return entry.state in ("coming", "here", "refused") or (entry.state == "absent" and not entry.chosen)

    def _check(self, entry: Entry) -> None:
        if self._closing:
            raise RuntimeError("the pager was closed while weights were on their way")
        if entry.state == "refused":
            raise NotRegistered(entry.why)
        if entry.state == "absent":
            raise NotRegistered("the RAM was given to another model")

    def _part_at(self, entry: Entry, run: Run, at: int) -> Part:
        """The part that has this byte of the run's file, once it is registered."""

        with self._changed:
            found = registered_part(entry, run, at)
            if found is None:
                self._sending, self._wanted = False, (entry, run, at)
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._closing or registered_part(entry, run, at) is not None or entry.state == "refused"
                )
                self._wanted = None
                self._check(entry)
                found = registered_part(entry, run, at)
            self._sending = True
        assert found is not None
        return found

    def _copies_are_behind(self) -> bool:
        """Whether there is something to ask a copy of, which was not done yet."""
        return self._sending or (self._wanted is not None and registered_part(*self._wanted) is not None)

    # --------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        self._device.enter_thread()
        while True:
            with self._changed:
                entry = None
                while entry is None:
                    if self._closing:
                        return
                    entry = None if self._planning else self._next()
                    if entry is None:
                        self._changed.wait()
                entry.state = "coming"
            if self._has_taken(entry.nbytes):
                self._register(entry)
                continue
            with self._changed:
                entry.why = f"{entry.nbytes / GIB:.2f} GiB more do not fit into the RAM budget of {self._ram.total / GIB:.2f} GiB"
                entry.state = "refused"
                self._changed.notify_all()

    def _has_taken(self, nbytes: int) -> bool:
        if self._ram.try_take(nbytes):
            return True
        self._ram.beg(nbytes, self)
        return self._ram.try_take(nbytes)

    def _next(self) -> Entry | None:
        """The chosen layer that is needed soonest and is not there."""
        count = len(self._entries)
        for step in range(count):
            entry = self._entries[(self._position + step) % count]
            if entry.chosen and entry.state == "absent":
                return entry
        return None

    def _register(self, entry: Entry) -> None:
        """Map and register a layer whose RAM is taken."""
        parts: list[Part] = []
        reads: list[list[Future[bool]]] = []
        try:
            for span in entry.spans:
                mapped = span.file.map_pages(span.begin, span.end)
                entry.kept.append(mapped)
                address = address_of(mapped)
                for begin in range(span.begin, span.end, PART_BYTES):
                    end = min(begin + PART_BYTES, span.end)
                    parts.append(Part(span, begin, end, address + begin - span.begin))
            with self._changed:
                entry.parts = parts
            reads = [self._read_in(part) for part in parts]
            for part, reading in zip(parts, reads, strict=True):
                for read in reading:
                    read.result()
                if self._closing:
                    raise NotRegistered("the pager was closed")
                self._device.register(part.address, part.end - part.begin)
                self._ledger.hold("registered RAM", part.end - part.begin)
                with self._changed:
                    part.registered = True
                    self._changed.notify_all()
                    # The driver does one thing at a time, and who has just had it gets it again: without this the copies,
                    # and the bus, would wait until everything is registered.
                    self._changed.wait_for(lambda: self._closing or not self._copies_are_behind(), LONGEST_PAUSE)
            with self._changed:
                entry.state = "here"
                self._changed.notify_all()
        except BaseException as error:
            for reading in reads:
                for read in reading:
                    read.cancel()
            wait([read for reading in reads for read in reading])  # they are at the mapping's addresses
            self._refuse(entry, error)

    def _read_in(self, part: Part) -> list[Future[bool]]:
        """From the disk into the page cache, by several threads. The driver, left to do it, would read page after page and
        keep everybody waiting."""
        end = part.address + part.end - part.begin
        return [
            self._readers.submit(read_in, at, min(READ_BYTES, end - at)) for at in range(part.address, end, READ_BYTES)
        ]

    def _refuse(self, entry: Entry, error: BaseException) -> None:
        """What the driver or the file has against it. A copy under way may have begun with the first parts."""
        with self._changed:
            entry.why = str(error)
            entry.state = "refused"
            self._changed.notify_all()
            self._changed.wait_for(lambda: not entry.users)
            last = entry.last
        if last is not None:
            last.synchronize()
        self._release(entry)
        if not self._closing:
            self._ledger.note("registering", f"given up for a layer: {error}")

    def _unregister(self, entry: Entry) -> None:
        """Of a layer that is leaving, or of any when closing."""
        self._release(entry)
        with self._changed:
            entry.state = "absent"
            self._changed.notify_all()

    def _release(self, entry: Entry) -> None:
        for part in entry.parts:
            if part.registered:
                self._device.unregister(part.address)
                part.registered = False
                self._ledger.hold("registered RAM", part.begin - part.end)
        with self._changed:
            entry.parts, entry.kept = [], []
        self._ram.give_back(entry.nbytes)


def registered_part(entry: Entry, run: Run, at: int) -> Part | None:
    """The part that has this byte of the run's file, if it is registered."""
    return next((p for p in entry.parts if p.registered and p.span.file is run.file and p.begin <= at < p.end), None)


def choose_layers(sizes: Sequence[int], streamed: Collection[int], budget: int) -> frozenset[int]:
    """All layers if they fit; else as many bytes of the streamed ones as do, spread over the order: while they are copied,
    the others are read."""
    if sum(sizes) <= budget:
        return frozenset(range(len(sizes)))
    never = set(range(len(sizes))) - set(streamed)
    return frozenset(spread(sizes, never, max(budget, 0)) - never)
