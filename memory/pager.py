"""Layers of weights on a device, in time, within a budget.

    pager = Pager(layers, budget, device_budget, ...)
    with pager.use(i) as weights:      # name -> tensor; waits on the device, not on the host
        ...

The plan says which layers stay. The others pass through a ring of slots: using a layer asks for the next ones, as many
as the ring holds, and each copy waits, on the device, for the use of what its slot held before. Layers are expected in
order, over and over, but any order is right: what is not there is fetched, into the slot whose layer is needed latest.
Rare layers are not expected, but in a pass that is known to need them (`needs_rare`).

A weight that is in use stays until it is released. After an interrupt nobody may know any more what is in use:
`abandon` says that nothing is.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .backends.backend import (
    Along,
    Backend,
    Copy,
    Ticket,
    Weights,
)
from .budget import DeviceBudget
from .layer import Layer, rare_of
from .ledger import Ledger
from .plan import Plan, Rates, aligned, make_plan


class PagerError(RuntimeError):
    """The pager was asked for what it cannot do."""

    __module__ = "fusestream"


@dataclass(eq=False)
class Place:
    """Room for a layer: its own, or a slot of the ring."""

    room: Any
    nbytes: int
    layer: int | None = None
    copy: Copy | None = None
    users: int = 0
    released: tuple[Ticket, ...] = ()  # the ends of its last uses, which the next copy into this room waits for
    begun: Ticket | None = None  # the use that is under way

    def is_released_at(self, point: Ticket) -> None:
        """Of the points of one order only the last matters."""
        self.released = (*(t for t in self.released if t.order != point.order), point)


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
        """budget: bytes for these layers, taken from the device's, what the backend holds for itself included. Raises
        OverBudget where they cannot pass through; the backend is then still the caller's to close."""
        self.layers = tuple(layers)
        self.ledger = ledger
        self.along: Callable[[int], Along | None] | None = None  # asked, for each copy, what else it is to bring
        self.needs_rare = False  # whether the pass under way needs layers that most do not
        self._rare = rare_of(self.layers)
        self._device = device
        self._backend = backend
        self._rates = rates
        self._lock = threading.RLock()
        self._closed = False
        self._position = 0  # the layer used last
        self._moves = 0  # how often something went, came, or is to be made anew
        self._stood = -1  # at which of them all layers were seen to stand
        self._all_came = -1  # at which of them all layers were there to stay, or on their way: nothing is ahead
        self._ran_apart: tuple[Ticket, ...] = ()  # ends of uses of all layers that nobody acquired them for
        self._places: dict[int, Place] = {}  # of residents
        self._ring: list[Place] = []
        plan = self._plan_for(budget)
        device.take(backend.overhead_bytes)
        ledger.hold("VRAM", backend.overhead_bytes)
        try:
            self._settle(plan)
        except BaseException:
            self._drop(self._ring, list(self._places.values()))
            self._give_back_overhead()
            raise
        _open.add(self)

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
            place = self._find(i)
            was_asked_for = place is not None
            place = place or self._fetch(i, needed=True)
            assert place is not None
            place.users += 1  # nothing else gets this room
            try:
                self._look_ahead(i)  # before the wait: the copies never run out of work
                begun = self._arrived(place, i, again=was_asked_for)
                assert place.copy is not None
                weights = self._backend.weights(place.copy)
            except BaseException:
                place.users -= 1
                raise
            if place.users == 1:
                place.begun = begun
            return weights

    def release(self, i: int) -> None:
        """What was asked of the device with layer i's weights is all there is: their room may be used again after it."""
        with self._lock:
            place = self._find(i)
            if place is None or not place.users:
                raise PagerError(f"{self.layers[i].name} is released more often than it was acquired")
            point = self._backend.mark()
            place.users -= 1
            place.is_released_at(point)
            if not place.users and place.copy is not None and place.begun is not None:
                self._backend.used(place.copy, place.begun, point)

    def arrival(self, i: int) -> Copy:
        """The copy that brought layer i, which is in use: another one whenever the layer came anew."""
        with self._lock:
            place = self._find(i)
            if place is None or place.copy is None or not place.users:
                raise PagerError(f"{self.layers[i].name} is not in use")
            return place.copy

    def made(self, i: int) -> Any:
        """What the user made of layer i as it is on the device now (`Copy.made`); None: nothing, or it is not there."""
        with self._lock:
            place = self._find(i)
            return None if place is None or place.copy is None else place.copy.made

    def forget_made(self, i: int) -> None:
        """What the user made of layer i is to be made anew, of the same weights."""
        with self._lock:
            self._moves += 1
            place = self._find(i)
            if place is not None and place.copy is not None:
                place.copy.made = None

    def renew(self, layers: Iterable[int]) -> None:
        """What was made of these layers in place shall not be used any more: each comes anew at its next use."""
        with self._lock:
            found = [(i, self._find(i)) for i in layers]
            for i, place in found:
                if place is not None and place.users:
                    raise PagerError(f"{self.layers[i].name} cannot come anew while it is in use")
            self._moves += bool(found)
            for _, place in found:
                if place is not None:
                    place.layer, place.copy = None, None

    def standing(self) -> int | None:
        """A number that is another one whenever a layer moved, came anew or is to be made anew; None: not all layers are there to
        stay, or one was not used since it came, so that compute has not waited for it."""
        with self._lock:
            if self._stood != self._moves:
                if self._closed or self.plan.streamed or self._rare or not self.is_writable:
                    return None
                if any(place.copy is None or not place.released for place in self._places.values()):
                    return None
                self._stood = self._moves
            return self._moves

    def weights(self, i: int) -> Weights:
        """Layer i's, while all layers are `standing`: nobody waits for anything, and nothing is marked."""
        with self._lock:
            place = self._find(i)
            if place is None or place.copy is None:
                raise PagerError(f"{self.layers[i].name} is not there")
            return self._backend.weights(place.copy)

    def ran_apart(self) -> None:
        """All layers, which are `standing`, were used up to here in compute's order without being acquired: a copy into any of
        their rooms waits for it."""
        with self._lock:
            point = self._backend.mark()
            self._ran_apart = (*(t for t in self._ran_apart if t.order != point.order), point)

    @property
    def is_writable(self) -> bool:
        """Whether a layer's weights may be written to while they are in use, until the layer comes anew."""
        return self._backend.is_writable

    def go_on(self, i: int) -> None:
        """Layer i, a rare one, was used within the use of another, and the next may come before that one ends."""
        with self._lock:
            self._check_open()
            self._look_ahead(i)

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
                    place.is_released_at(self._backend.mark())

    def check(self) -> None:
        """The host waits for what is under way. Raises FileChanged where a file changed while its pages were read: before a
        result leaves that was computed with them."""
        with self._lock:
            self._check_open()
            self._backend.drain()
            self._backend.check_arrived()

    # ------------------------------------------------------------------------------------------------------ memory

    def resize(self, budget: int, rates: Rates | None = None) -> None:
        """Another budget, or a plan for rates that were measured meanwhile, between uses. What stays resident is kept; the
        rest makes room first. Where the memory cannot be had the plan before is taken up again."""
        with self._lock:
            self._check_open()
            self._rates = rates or self._rates
            plan = self._plan_for(budget)
            if any(place.users for place in (*self._ring, *self._places.values())):
                raise PagerError("the VRAM budget of a model cannot change while one of its layers is in use")
            before = self.plan
            if plan == before:
                return  # the window's content is worth keeping
            try:
                self._settle(plan)
            except BaseException:
                self._settle_back(before)
                raise

    @property
    def held_bytes(self) -> int:
        """Device bytes taken now."""
        with self._lock:
            if self._closed:
                return 0
            return self._backend.overhead_bytes + sum(p.nbytes for p in (*self._ring, *self._places.values()))

    def close(self) -> None:
        """Give everything back. May be called twice, and in the middle of anything."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._moves += 1
            _open.discard(self)
            self._backend.close()
            self._drop(self._ring, list(self._places.values()))
            self._ring, self._places = [], {}
            self._give_back_overhead()
            self._backend.trim()

    def _plan_for(self, budget: int) -> Plan:
        sizes = [self._backend.room_bytes(layer.nbytes) for layer in self.layers]
        return make_plan(sizes, budget - self._backend.overhead_bytes, self._rates, self._rare)

    def _settle(self, plan: Plan) -> None:
        """Take the memory of a plan, after giving back what it no longer has."""
        self._moves += 1
        self._backend.drain()
        self._backend.check_arrived()
        leaving = [i for i in self._places if i not in plan.resident]
        self._drop(self._ring, [self._places.pop(i) for i in leaving])
        self._ring = []
        self._backend.trim()  # or what is taken now comes on top of it
        self.plan = plan
        self._backend.expect(plan)
        for i in sorted(plan.resident - self._places.keys()):
            self._places[i] = self._place(aligned(plan.sizes[i]))
        for _ in range(plan.slots):
            self._ring.append(self._place(plan.slot_bytes))

    def _settle_back(self, plan: Plan) -> None:
        """Another plan's memory could not be had: the one before, whose memory was just given back; or nothing."""
        try:
            self._settle(plan)
        except BaseException:
            self.close()

    def _place(self, nbytes: int) -> Place:
        self._device.take(nbytes)
        try:
            room = self._backend.take(nbytes)
        except BaseException:
            self._device.give_back(nbytes)
            raise
        self.ledger.hold("VRAM", nbytes)
        # The memory may have been another tensor's, whose last use is still to come in compute's order.
        return Place(room, nbytes, released=(self._backend.mark(),))

    def _drop(self, *groups: Sequence[Place]) -> None:
        for group in groups:
            for place in group:
                self._backend.give_back(place.room)
                place.room = place.copy = None
                self._device.give_back(place.nbytes)
                self.ledger.hold("VRAM", -place.nbytes)

    def _give_back_overhead(self) -> None:
        self._device.give_back(self._backend.overhead_bytes)
        self.ledger.hold("VRAM", -self._backend.overhead_bytes)

    # ---------------------------------------------------------------------------------------------------- movement

    def _find(self, i: int) -> Place | None:
        """The room that has layer i, or is getting it."""
        place = self._places.get(i)
        if place is not None:
            return place if place.copy is not None else None
        for slot in self._ring:
            if slot.layer == i:
                return slot
        return None

    def _arrived(self, place: Place, i: int, *, again: bool) -> Ticket:
        """The point in compute from which layer i is in its room. again: what failed when it was fetched ahead is tried once
        more, a disk or a network may be back."""
        while True:
            assert place.copy is not None
            try:
                return self._backend.wait(place.copy)
            except BaseException:
                if place.copy.error is None:
                    raise  # an interrupt: the bytes are still on their way
                self._moves += 1
                place.layer, place.copy = None, None  # what is in the room is nothing
                if not again:
                    raise
            again = False
            self._ask(place, i)

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
        self._ask(place, i)
        return place

    def _ask(self, place: Place, i: int) -> None:
        # In this order: interrupted anywhere, the slot is empty or has what it says. Copies run in the order they were
        # submitted, so one that nobody remembers does no harm.
        self._moves += 1
        place.layer, place.copy = None, None
        copy = Copy(self.layers[i], place.room, (*place.released, *self._ran_apart))
        copy.along = self.along(i) if self.along is not None else None
        self._backend.submit(copy)
        place.released = ()
        place.copy = copy
        place.layer = i

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
        """How far on in the order a layer is from `start`, around the cycle; `start` itself is a whole cycle away, and what is not
        expected farther."""
        assert layer is not None
        if layer in self._rare and not self.needs_rare:
            return len(self.layers) + 1
        return (layer - start - 1) % len(self.layers) + 1

    def _look_ahead(self, i: int) -> None:
        """Layer i is in use: bring the next ones, as far as idle slots go, and residents that were never there."""
        self._position = i
        if self._all_came == self._moves:
            return
        wanted = len(self._ring) + (i in self._places)  # a resident leaves all slots to those behind it
        for step in range(1, len(self.layers)):
            j = (i + step) % len(self.layers)
            if j in self._rare and not self.needs_rare:
                continue
            if j in self._places:
                if self._places[j].copy is None:
                    self._fetch(j, needed=False)
                continue
            wanted -= 1
            if wanted <= 0 or (self._find(j) is None and self._fetch(j, needed=False) is None):
                return
        if not self._ring and all(place.copy is not None for place in self._places.values()):
            self._all_came = self._moves

    def _check_open(self) -> None:
        if self._closed:
            raise PagerError("the model's weights were unloaded; load the model again")


_open: set[Pager] = set()


@atexit.register
def _close_all() -> None:
    """Whoever opened them died, or forgot. Python ends without waiting for threads such as those that copy. One that comes back
    from torch's code after that is unwound through it, which C++ answers by ending the process: "terminate called without an
    active exception", in place of what went wrong."""
    for pager in list(_open):
        with contextlib.suppress(Exception):  # a device that has failed: the threads have ended all the same
            pager.close()
