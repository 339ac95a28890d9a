"""Small tensors, held by the host, that must be on the device when their layer is.

Copied one by one out of ordinary RAM they would cost more than the layer: the bus takes copies in
turns, so each waits for the whole layer that is just being copied, and compute waits for each. So a
layer's tensors lie one behind the other in pinned RAM, and the copy that brings the layer brings
them too, behind it in the same order.

    parcels.pack(i, tensors)        once
    parcels.along(i)                for the pager, when it asks for layer i's copy
    parcels.take(i)                 the tensors on the device; compute waits, the host does not
    parcels.done(i)                 compute has been asked for everything that reads them

A parcel that no copy has brought, because its layer stayed while its tensors changed or because all
rooms were taken, is copied on a stream of its own when it is taken, or a little before (`ask`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..gpu import CudaError
from .backends.backend import Along
from .device import CudaDevice, Device, Event, Pinned
from .host.ram import RamBudget
from .ledger import Ledger
from .plan import OverBudget

ALIGNMENT = 256  # of a tensor in its parcel, because matrix products like it
LEAST_ROOMS = 4  # a window of three layers, and the one in use
# more than LEAST_ROOMS rooms are made up to these bytes, because a fully resident model comes at
# once
ROOMS_BYTES = 64 << 20
POOL = "pinned RAM"


@dataclass
class Parcel:
    """A layer's tensors in pinned RAM."""

    pinned: Pinned
    offsets: tuple[int, ...]
    kinds: tuple[tuple[torch.dtype, torch.Size], ...]

    def on_host(self) -> list[torch.Tensor]:
        """The tensors in pinned RAM."""
        return self.views(torch.frombuffer(self.pinned.view, dtype=torch.uint8))

    def views(self, room: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a room, uint8 [as many bytes or more]."""
        out = []
        # Made in inference mode, a view of another type would stay an inference tensor.
        with torch.inference_mode(False):
            for at, (dtype, shape) in zip(self.offsets, self.kinds, strict=True):
                out.append(room[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape))
        return out


@dataclass(eq=False)
class Room:
    """Device memory for one parcel at a time."""

    memory: torch.Tensor
    free: Event  # reached when compute no longer reads what is in it
    layer: int | None = None
    along: Along | None = None  # the side copy that brings the parcel, until it is taken
    there: Event | None = None  # reached when the parcel is in it
    waits: bool = False  # whether the parcel is still to be taken
    in_use: bool = False
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def empty(self) -> None:
        self.layer, self.along, self.there, self.waits, self.in_use = None, None, None, False, False

    @property
    def is_lost(self) -> bool:
        """Whether the copy that should have brought the parcel failed."""
        return self.along is not None and self.along.done.is_set() and self.along.there is None


class Parcels:
    """Side copies for one model's layers on one device. Calls come from one thread at a time."""

    def __init__(self, device: Device, ram: RamBudget, ledger: Ledger) -> None:
        """device: its order of copies is used by nothing else."""
        self._device = device
        self._ram = ram
        self._ledger = ledger
        self._parcels: dict[int, Parcel] = {}
        self._rooms: list[Room] = []  # in the order of their claims, the latest last

    def __contains__(self, i: int) -> bool:
        return i in self._parcels

    @property
    def held_bytes(self) -> int:
        """Device bytes taken now."""
        return sum(room.memory.nbytes for room in self._rooms)

    def pack(self, i: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Pack layer i's tensors into pinned RAM. False, and nothing is packed, if no more RAM can
        be pinned."""
        assert i not in self._parcels, "packed twice"
        offsets, nbytes = [], 0
        for tensor in tensors:
            offsets.append(nbytes)
            nbytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        pinned = self._pinned(nbytes)
        if pinned is None:
            return False
        parcel = Parcel(pinned, tuple(offsets), tuple((tensor.dtype, tensor.shape) for tensor in tensors))
        for target, tensor in zip(parcel.on_host(), tensors, strict=True):
            target.copy_(tensor)
        self._parcels[i] = parcel
        return True

    def _pinned(self, nbytes: int) -> Pinned | None:
        if not nbytes:
            return None
        if not self._ram.try_take(nbytes):
            self._ram.beg(nbytes)
            if not self._ram.try_take(nbytes):
                return None
        try:
            pinned = self._device.pin(nbytes)
        except BaseException as error:
            self._ram.give_back(nbytes)
            if isinstance(error, CudaError):
                return None
            raise
        self._ledger.hold(POOL, nbytes)
        return pinned

    def along(self, i: int) -> Along | None:
        """The side copy that layer i's next copy has to make; None: nothing, or the parcel is there
        already."""
        if i not in self._parcels:
            return None
        found = self._find(i)
        if found is not None:
            found.waits = not found.in_use
            return None
        room = self._claim(i, needed=False)
        if room is None:
            return None
        pinned = self._parcels[i].pinned
        room.along = Along(room.memory.data_ptr(), pinned.address, pinned.nbytes, (room.free,))
        room.layer, room.waits = i, True
        return room.along

    def ask(self, i: int) -> None:
        """Start to copy layer i's tensors, which are needed next, unless a copy brings them
        already."""
        if self._find(i) is None:
            self._fetch(i, needed=False)

    def take(self, i: int) -> list[torch.Tensor]:
        """Layer i's tensors on the device, until `done`; in pinned RAM if the device has no memory
        for them."""
        room = self._find(i)
        along = None if room is None else room.along
        if room is not None and along is not None:
            along.done.wait()
            room.there, room.along = along.there, None
            if room.there is None:  # the copy failed
                room.empty()
                room = None
        room = room or self._fetch(i, needed=True)
        if room is None:
            return self._parcels[i].on_host()
        assert room.there is not None
        self._device.compute_waits(room.there)
        room.in_use, room.waits = True, False
        if i not in room.views:
            room.views[i] = self._parcels[i].views(room.memory)
        return room.views[i]

    def done(self, i: int) -> None:
        """Mark that compute has been asked for everything that reads layer i's tensors."""
        room = self._find(i)
        if room is not None and room.in_use:
            room.in_use = False
            room.free = self._device.compute_event()

    def drop(self, layers: Iterable[int]) -> None:
        """Drop the tensors of these layers. The host waits for the device."""
        leaving = [i for i in layers if i in self._parcels]
        if not leaving:
            return
        for room in self._rooms:
            if room.along is not None:
                room.along.done.wait()
        self._device.synchronize()
        for room in self._rooms:
            for i in leaving:
                room.views.pop(i, None)
            if room.layer in leaving:
                room.empty()
        for i in leaving:
            pinned = self._parcels.pop(i).pinned
            self._device.unpin(pinned)
            self._ram.give_back(pinned.nbytes)
            self._ledger.hold(POOL, -pinned.nbytes)
        if not self._parcels:
            self._rooms = []

    def close(self) -> None:
        """Give everything back. More may be packed afterwards."""
        self.drop(list(self._parcels))

    def _find(self, i: int) -> Room | None:
        """The room that has layer i's parcel, or will have it."""
        return next((room for room in self._rooms if room.layer == i and not room.is_lost), None)

    def _fetch(self, i: int, *, needed: bool) -> Room | None:
        room = self._claim(i, needed=needed)
        if room is None:
            return None
        pinned = self._parcels[i].pinned
        self._device.copies_wait(room.free)
        self._device.copy_in(room.memory.data_ptr(), pinned.address, pinned.nbytes)
        room.there = self._device.copy_event()
        room.layer, room.waits = i, True
        return room

    def _claim(self, i: int, *, needed: bool) -> Room | None:
        """An empty room large enough for layer i's parcel, or None. needed: a parcel that waits to
        be taken may lose its room."""
        nbytes = self._parcels[i].pinned.nbytes
        idle = [room for room in self._rooms if not room.in_use and (not room.waits or room.is_lost)]
        if idle:
            room = idle[0]
        elif len(self._rooms) < LEAST_ROOMS or self.held_bytes + nbytes <= ROOMS_BYTES:
            room = Room(torch.empty(0, dtype=torch.uint8), self._device.compute_event())
            self._rooms.append(room)
        else:
            waiting = [room for room in self._rooms if not room.in_use]
            if not needed or not waiting:
                return None
            room = waiting[0]
            self._arrived(room)
        room.empty()
        self._rooms.append(self._rooms.pop(self._rooms.index(room)))
        if room.memory.nbytes < nbytes:
            room.memory, room.views = torch.empty(0, dtype=torch.uint8), {}
            try:
                room.memory = self._device.room(nbytes)
            except OverBudget:
                return None
            # The memory may have been another tensor's, whose last use comes later in compute's
            # order.
            room.free = self._device.compute_event()
        return room

    def _arrived(self, room: Room) -> None:
        """Order the next write to this room behind the parcel that is on its way into it and will
        not be taken. Compute waits for it."""
        if room.along is not None:
            room.along.done.wait()
            room.there = room.along.there
        if room.there is not None:
            self._device.compute_waits(room.there)
            room.free = self._device.compute_event()


def open_parcels(device: torch.device, ram: RamBudget, ledger: Ledger) -> Parcels:
    """Side copies for layers on this NVIDIA GPU."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return Parcels(CudaDevice(index), ram, ledger)
