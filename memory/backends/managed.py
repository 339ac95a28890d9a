"""Managed memory: a layer keeps one address for ever, and its pages come to the device and leave
it.

One pool holds a model's layers; each begins at a whole 2 MiB page. The pool's home is RAM, where a
layer is filled in at its first use, and converted there, once, if the device wants another type or
order. To bring a layer is a prefetch on the copy stream. Because the pages are advised as mostly
read, the prefetch makes a second copy beside the one in RAM, and evicting drops that copy: nothing
is copied back. Because both are explicit, no kernel meets a page that is not there, and a pool may
be larger than the card.

A place of the pager is here a claim on so many bytes of the device, at any address. The pages of a
claim's last layer leave before the next layer's come. Leaving is in no stream's order, so the
copying thread waits until the last use is over.

On a card that others share, more managed memory than the card has free can hang the GPU. The guard
refuses such pools; it is on in every test and benchmark.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from ..device import Device
from ..file import Extent
from ..host.ram import RamBudget
from ..layer import (
    Layer,
    Weight,
    as_stored,
    view,
)
from ..ledger import Ledger, now
from ..open_file import OpenFile
from ..plan import OverBudget
from ..runs import Run, runs_of
from .backend import Convert, Copy, Weights
from .copying import CopyingBackend, Mark

PAGE = 2 << 20  # the unit that the driver moves and maps
READ_BYTES = 16 << 20
READERS = 8
GIB = 2**30


class ManagedMemory(Protocol):
    """A device's managed memory. Addresses and sizes are whole pages."""

    def allocate(self, nbytes: int) -> int:
        """Allocate memory whose home is RAM and which may be copied to the device."""

    def free(self, address: int) -> None: ...

    def free_bytes(self) -> int:
        """Free bytes of the device."""

    def filled(self, address: int, nbytes: int) -> None:
        """Advise that these pages are read from now on, not written."""

    def bring(self, address: int, nbytes: int) -> None:
        """Bring pages to the device, in the copies' order."""

    def evict(self, address: int, nbytes: int) -> None:
        """Drop the device's copy of these pages now."""

    def on_host(self, address: int, nbytes: int) -> memoryview: ...

    def on_device(self, address: int, nbytes: int) -> torch.Tensor:
        """The memory as a tensor of the device, uint8 [nbytes]. It must outlive the tensor."""


class Source(Protocol):
    def home(self, extent: Extent) -> OpenFile: ...


@dataclass(eq=False)
class Claim:
    """A right to so many bytes of the device, and the layer that uses it."""

    nbytes: int
    layer: int | None = None


def pages(nbytes: int) -> int:
    """Bytes of the whole pages that `nbytes` fill."""
    return -(-nbytes // PAGE) * PAGE


class ManagedBackend(CopyingBackend):
    """Backend in which every layer has its own address for ever."""

    is_writable = False  # a write to a layer would stay in it for ever

    def __init__(
        self,
        device: Device,
        memory: ManagedMemory,
        source: Source,
        layers: Sequence[Layer],
        ram: RamBudget,
        ledger: Ledger,
        convert: Convert | None = None,
        guard: bool = False,
    ) -> None:
        super().__init__(device, ledger, convert)
        self._memory = memory
        self._ram = ram
        self._layers = tuple(layers)
        self._number = {id(layer): i for i, layer in enumerate(self._layers)}
        self._runs = [runs_of(layer, source.home) for layer in self._layers]
        sizes = [pages(layer.nbytes) for layer in self._layers]
        self._begins = list(accumulate(sizes, initial=0))
        self._nbytes = self._begins[-1] + PAGE  # the allocation may begin within a page
        if guard and self._nbytes > memory.free_bytes():
            raise OverBudget(
                f"A managed pool of {self._nbytes / GIB:.2f} GiB is more than the {memory.free_bytes() / GIB:.2f} GiB that "
                f"{device.name} has free, and the guard against that is on. Use the slots backend."
            )
        ram.take(self._nbytes, "The managed pool")
        try:
            self._base = memory.allocate(self._nbytes)
        except BaseException:
            ram.give_back(self._nbytes)
            raise
        ledger.hold("managed RAM", self._nbytes)
        self._address = -(-self._base // PAGE) * PAGE
        self._room = memory.on_device(self._address, self._begins[-1])
        self._weights: dict[int, Weights] = {}  # a layer's address never changes
        self._filled: set[int] = set()
        self._claims: dict[int, Claim] = {}  # layers that are on the device
        self._readers = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "fusestream-reader")
        self._thread.start()

    @staticmethod
    def room_bytes(nbytes: int) -> int:
        return pages(nbytes)

    def take(self, nbytes: int) -> Claim:
        return Claim(nbytes)

    def give_back(self, room: object) -> None:
        assert isinstance(room, Claim)
        if not self._closed:
            self._evict(room)

    def weights(self, copy: Copy) -> Weights:
        assert copy.layer is not None
        number = self._number[id(copy.layer)]
        if number not in self._weights:
            room = self._room[self._begins[number] : self._begins[number + 1]]
            self._weights[number] = Weights(copy.layer.views(room))
        return self._weights[number]

    def _order_after(self, after: Sequence[Mark]) -> None:
        for ticket in after:
            ticket.event.synchronize()

    def _bring(self, copy: Copy) -> Sequence[OpenFile]:
        assert copy.layer is not None
        number, claim = self._number[id(copy.layer)], copy.room
        before = self._claims.get(number)
        # left by a copy that the pager forgot: it has the pages, but not the right to them
        if before is not None and before is not claim:
            self._evict(before)
        if claim.layer != number:
            self._evict(claim)
        self._fill(number)
        address, nbytes = self._place(number)
        claim.layer, self._claims[number] = number, claim
        start = self._device.copy_event()
        if nbytes:
            self._memory.bring(address, nbytes)
            self._timeline.add("copy", copy.layer.name, start, self._device.copy_event(), copy.layer.nbytes, "managed")
        return ()

    def _place(self, number: int) -> tuple[int, int]:
        begin, end = self._begins[number : number + 2]
        return self._address + begin, end - begin

    def _evict(self, claim: Claim) -> None:
        if claim.layer is None:
            return
        address, nbytes = self._place(claim.layer)
        start = now()
        if nbytes:
            self._memory.evict(address, nbytes)
        self._ledger.add("evict", self._layers[claim.layer].name, start, now())
        del self._claims[claim.layer]
        claim.layer = None

    def _fill(self, number: int) -> None:
        """Read a layer into its pages in RAM, if that was not done yet."""
        address, nbytes = self._place(number)
        if number in self._filled or not nbytes:
            return
        start = now()
        room = self._memory.on_host(address, nbytes)
        reads = [
            self._readers.submit(run.file.read_into, room[run.at + at : run.at + at + count], run.begin + at)
            for run in self._runs[number]
            if run.weight is None
            for at in range(0, run.nbytes, READ_BYTES)
            for count in [min(READ_BYTES, run.nbytes - at)]
        ]
        try:
            for run in self._runs[number]:
                if run.weight is not None:
                    self._convert_into(room, run, run.weight)
        finally:
            errors = [read.exception() for read in reads]
        for error in errors:
            if error is not None:
                raise error
        self._memory.filled(address, nbytes)
        self._filled.add(number)
        layer = self._layers[number]
        self._ledger.add("fill", layer.name, start, now(), layer.stored_bytes, "page cache or disk")

    def _convert_into(self, room: memoryview, run: Run, weight: Weight) -> None:
        stored = torch.empty(run.nbytes, dtype=torch.uint8)
        run.file.read_into(stored.numpy().data, run.begin)
        out = view(torch.frombuffer(room, dtype=torch.uint8), run.at, weight)
        self._convert(as_stored(stored, weight), out, weight.extent.encoding)

    def _free(self) -> None:
        self._readers.shutdown()
        for claim in list(self._claims.values()):
            self._evict(claim)
        self._weights = {}
        self._room = torch.empty(0, dtype=torch.uint8)
        self._memory.free(self._base)
        self._ram.give_back(self._nbytes)
        self._ledger.hold("managed RAM", -self._nbytes)
