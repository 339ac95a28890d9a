"""Layers of weights on a device, in time, within a budget.

    pager = Pager(layers, budget, device_budget, ...)
    with pager.use(i) as weights:      # name -> tensor; waits on the device, not on the host
        ...

The plan says which layers stay. The others pass through a ring of slots: using a layer asks for the next ones, as many
as the ring holds, and each copy waits, on the device, for the use of what its slot held before. Layers are expected in
order, over and over, but any order is right: what is not there is fetched, into the slot whose layer is needed latest.

A weight that is in use stays until it is released. After an interrupt nobody may know any more what is in use:
`abandon` says that nothing is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .backend import Backend, Copy, Ticket
from .budget import DeviceBudget
from .layer import Layer
from .ledger import Ledger, now
from .plan import Plan, Rates, aligned, make_plan

Weights = Mapping[str, torch.Tensor]


class PagerError(RuntimeError):
    """The pager was asked for what it cannot do."""

    __module__ = "fusestream"


@dataclass(eq=False)
class Place:
    """Room for a layer: its own, or a slot of the ring."""

    room: torch.Tensor
    layer: int | None = None
    copy: Copy | None = None
    users: int = 0
    released: tuple[Ticket, ...] = ()  # the last use's end, which the next copy into this room waits for


class Pager:
    """One model's layers. Calls may come from any thread, one at a time takes its turn."""

    def __init__(
        self,
        layers: Sequence[Layer],
        budget: int,
        device: DeviceBudget,
        backend: Backend,
        ledger: Ledger,
        rates: Rates | None = None,
    ) -> None:
        """budget: bytes for these layers, taken from the device's. Raises OverBudget where they cannot pass through."""
        self.layers = tuple(layers)
        self.ledger = ledger
        self._device = device
        self._backend = backend
        self._rates = rates
        self._lock = threading.RLock()
        self._closed = False
        self._position = 0  # the layer used last
        self._places: dict[int, Place] = {}  # of residents
        self._ring: list[Place] = []
        self._settle(make_plan([layer.nbytes for layer in self.layers], budget, rates))

    # ------------------------------------------------------------------------------------------------------ in use

    @contextlib.contextmanager
    def use(self, i: int) -> Iterator[Weights]:
        """Layer i's weights, for the time of the block."""
        weights = self.acquire(i)
        try:
            yield weights
        finally:
            self.release(i)

    def acquire(self, i: int) -> Weights:
        """Layer i's weights. They stay until `release(i)`, called as often as this. Raises what reading them raised."""
        with self._lock:
            self._check_open()
            start = now()
            place = self._there(i)
            waited = now()
            self.ledger.add("stall", self.layers[i].name, start, waited)
            weights = self.layers[i].views(place.room)
            place.users += 1
            self._look_ahead(i)
            return weights

    def release(self, i: int) -> None:
        """What was asked of the device with layer i's weights is all there is: their room may be used again after it."""
        with self._lock:
            place = self._find(i)
            if place is None or not place.users:
                raise PagerError(f"{self.layers[i].name} is released more often than it was acquired")
            place.users -= 1
            if place in self._ring:
                place.released = (self._backend.mark(),)

    def prefetch(self, i: int) -> bool:
        """Start bringing layer i, if there is room that nothing needed sooner has. Whether it is there or on its way."""
        with self._lock:
            self._check_open()
            return (self._find(i) or self._fetch(i, needed=False)) is not None

    def abandon(self) -> None:
        """Nothing is in use any more, whatever was acquired: after an interrupt or an error in the caller's work."""
        with self._lock:
            for place in (*self._ring, *self._places.values()):
                if place.users:
                    place.users = 0
                    place.released = (self._backend.mark(),)

    # ------------------------------------------------------------------------------------------------------ memory

    def resize(self, budget: int) -> None:
        """Another budget, between uses. What stays resident is kept; the rest makes room first."""
        with self._lock:
            self._check_open()
            plan = make_plan(self.plan.sizes, budget, self._rates)
            if any(place.users for place in (*self._ring, *self._places.values())):
                raise PagerError("the VRAM budget of a model cannot change while one of its layers is in use")
            self._settle(plan)

    @property
    def held_bytes(self) -> int:
        """Device bytes taken now."""
        with self._lock:
            return sum(place.room.numel() for place in (*self._ring, *self._places.values()))

    def close(self) -> None:
        """Give everything back. May be called twice, and in the middle of anything."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._backend.close()
            self._drop(self._ring, list(self._places.values()))
            self._ring, self._places = [], {}

    def _settle(self, plan: Plan) -> None:
        """Take the memory of a plan, after giving back what it no longer has."""
        self._backend.drain()
        leaving = [i for i in self._places if i not in plan.resident]
        self._drop(self._ring, [self._places.pop(i) for i in leaving])
        self._ring = []
        self.plan = plan
        for i in sorted(plan.resident - self._places.keys()):
            self._places[i] = self._place(aligned(plan.sizes[i]))
        for _ in range(plan.slots):
            self._ring.append(self._place(plan.slot_bytes))

    def _place(self, nbytes: int) -> Place:
        self._device.take(nbytes)
        try:
            room = self._backend.take(nbytes)
        except BaseException:
            self._device.give_back(nbytes)
            raise
        self.ledger.hold("VRAM", nbytes)
        return Place(room)

    def _drop(self, *groups: Sequence[Place]) -> None:
        for group in groups:
            for place in group:
                self._device.give_back(place.room.numel())
                self.ledger.hold("VRAM", -place.room.numel())

    # ---------------------------------------------------------------------------------------------------- movement

    def _find(self, i: int) -> Place | None:
        """The room that has layer i, or is getting it."""
        place = self._places.get(i)
        if place is not None:
            return place if place.copy is not None else None
        return next((slot for slot in self._ring if slot.layer == i), None)

    def _there(self, i: int) -> Place:
        """The room that has layer i, which compute now waits for. What failed when it was fetched ahead is tried again: a
        disk or a network may be back."""
        place = self._find(i)
        ahead = place is not None
        while True:
            place = place or self._fetch(i, needed=True)
            assert place is not None and place.copy is not None
            try:
                self._backend.wait(place.copy)
                return place
            except BaseException:
                if place.copy.error is None:
                    raise  # an interrupt: the bytes are still on their way
                place.layer, place.copy = None, None  # what is in the room is nothing
                if not ahead:
                    raise
            place, ahead = None, False

    def _fetch(self, i: int, *, needed: bool) -> Place | None:
        """Ask for layer i. needed: it is used now, so that any idle slot will do; else only what is needed later."""
        place = self._places.get(i) or self._slot_for(i, needed=needed)
        if place is None:
            if needed:
                raise PagerError(
                    f"{self.layers[i].name} finds all {len(self._ring)} slots of the window in use: more layers are held at "
                    "once than the VRAM budget has room for. Raise the VRAM budget."
                )
            return None
        # In this order: interrupted anywhere, the slot is empty or has what it says. Copies run in the order they were
        # submitted, so one that nobody remembers does no harm.
        place.layer, place.copy = None, None
        copy = Copy(self.layers[i], place.room, place.released)
        self._backend.submit(copy)
        place.released = ()
        place.copy = copy
        place.layer = i
        return place

    def _slot_for(self, i: int, *, needed: bool) -> Place | None:
        """An empty slot, or the idle one whose layer is needed latest after layer i."""
        idle = [slot for slot in self._ring if not slot.users]
        empty = next((slot for slot in idle if slot.layer is None), None)
        if empty is not None or not idle:
            return empty
        here = i if needed else self._position
        latest = max(idle, key=lambda slot: self._steps(here, slot.layer))
        return latest if needed or self._steps(here, latest.layer) > self._steps(here, i) else None

    def _steps(self, start: int, layer: int | None) -> int:
        """How far on in the order a layer is from `start`, around the cycle; `start` itself is a whole cycle away."""
        assert layer is not None
        return (layer - start - 1) % len(self.layers) + 1

    def _look_ahead(self, i: int) -> None:
        """Layer i is in use: bring the next ones, as far as idle slots go, and residents that were never there."""
        self._position = i
        wanted = len(self._ring)
        for step in range(1, len(self.layers)):
            j = (i + step) % len(self.layers)
            if j in self._places:
                if self._places[j].copy is None:
                    self._fetch(j, needed=False)
                continue
            wanted -= 1
            if wanted <= 0 or (self._find(j) is None and self._fetch(j, needed=False) is None):
                return

    def _check_open(self) -> None:
        if self._closed:
            raise PagerError("the model's weights were unloaded; load the model again")
