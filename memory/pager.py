"""Brings layers of weights to a device in time, within a budget.

    pager = Pager(layers, budget, device_budget, ...)
    with pager.use(i) as weights:      # name -> tensor; waits on the device, not on the host
        ...

The plan says which layers stay. The others pass through a ring of slots: using a layer asks for the
next ones, as many as the ring holds, and each copy waits, on the device, for the last use of what
its slot held before. Layers are expected in order, over and over, but any order is right: a layer
that is not there is fetched into the slot whose layer is needed latest. Rare layers are expected
only in a pass that is known to need them (`needs_rare`).

A weight in use stays until it is released. After an interrupt the caller may no longer know what is
in use; `abandon` says that nothing is.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from .place import Place
from .plan import Plan, Rates, aligned, make_plan


class PagerError(RuntimeError):
    """The pager was asked for something that it cannot do."""

    __module__ = "fusestream"


class Pager:
    """One model's layers. Calls may come from any thread; a lock makes them take turns."""

    def __init__(
        self,
        layers: Sequence[Layer],
        budget: int,
        device: DeviceBudget,
        backend: Backend,
        ledger: Ledger,
        rates: Rates | None = None,
    ) -> None:
        """budget: bytes for these layers, taken from the device's; it includes what the backend
        holds for itself. Raises OverBudget if they cannot pass through; the caller must then close
        the backend."""
        self.layers = tuple(layers)
        self.ledger = ledger
        # asked, at each copy, what else to bring
        self.along: Callable[[int], Along | None] | None = None
        self.needs_rare = False  # whether the pass under way needs layers that most do not
        self._rare = rare_of(self.layers)
        self._device = device
        self._backend = backend
        self._rates = rates
        self._lock = threading.RLock()
        self._closed = False
        self._position = 0  # the layer used last
        self._moves = 0  # counts layers that went, came or are to be made anew
        self._stood = -1  # the count at which all layers were found to stand
        # the count at which all layers were resident or on their way: nothing to look ahead for
        self._all_came = -1
        self._ran_apart: tuple[Ticket, ...] = ()  # ends of uses of all layers without `acquire`
        self._places: dict[int, Place] = {}  # of residents, by layer
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
        """Layer i's weights. They stay until `release(i)`, which must be called as often as this.
        Raises what reading them raised."""
        with self._lock:
            self._check_open()
            place = self._find(i)
            was_asked_for = place is not None
            place = place or self._fetch(i, needed=True)
            assert place is not None
            place.users += 1  # no other layer gets this room
            try:
                self._look_ahead(i)  # before the wait, so that the copies never run out of work
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
        """End a use: the caller has asked the device for everything that reads layer i's weights,
        and their room may be used again after it."""
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
        """The copy that brought layer i, which must be in use: a new object whenever the layer came
        anew."""
        with self._lock:
            place = self._find(i)
            if place is None or place.copy is None or not place.users:
                raise PagerError(f"{self.layers[i].name} is not in use")
            return place.copy

    def made(self, i: int) -> Any:
        """User data made of layer i as it is on the device now (`Copy.made`); None: nothing, or the
        layer is not there."""
        with self._lock:
            place = self._find(i)
            return None if place is None or place.copy is None else place.copy.made

    def forget_made(self, i: int) -> None:
        """Drop what the user made of layer i, so that it is made anew of the same weights."""
        with self._lock:
            self._moves += 1
            place = self._find(i)
            if place is not None and place.copy is not None:
                place.copy.made = None

    def renew(self, layers: Iterable[int]) -> None:
        """Drop these layers, whose weights were changed in place: each comes anew at its next use.
        They must not be in use."""
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
        """A number that changes whenever a layer moved, came anew or is to be made anew. None: not
        all layers are resident, or one was not used since it came, so that compute has not waited
        for it."""
        with self._lock:
            if self._stood != self._moves:
                if self._closed or self.plan.streamed or self._rare or not self.is_writable:
                    return None
                if any(place.copy is None or not place.released for place in self._places.values()):
                    return None
                self._stood = self._moves
            return self._moves

    def weights(self, i: int) -> Weights:
        """Layer i's weights while all layers are `standing`. Waits for nothing and marks
        nothing."""
        with self._lock:
            place = self._find(i)
            if place is None or place.copy is None:
                raise PagerError(f"{self.layers[i].name} is not there")
            return self._backend.weights(place.copy)

    def ran_apart(self) -> None:
        """Mark a use of all layers, which are `standing`, up to here in compute's order and without
        `acquire`. A copy into any of their rooms waits for it."""
        with self._lock:
            point = self._backend.mark()
            self._ran_apart = (*(t for t in self._ran_apart if t.order != point.order), point)

    @property
    def is_writable(self) -> bool:
        """Whether a layer's weights may be written to while they are in use, until the layer comes
        anew."""
        return self._backend.is_writable

    def go_on(self, i: int) -> None:
        """Look ahead from layer i, a rare one, because it was used within the use of another, and
        the next may come before that use ends."""
        with self._lock:
            self._check_open()
            self._look_ahead(i)

    def prefetch(self, i: int) -> bool:
        """Start bringing layer i, if there is a room whose content is not needed sooner. Whether
        the layer is there or on its way."""
        with self._lock:
            self._check_open()
            return (self._find(i) or self._fetch(i, needed=False)) is not None

    def abandon(self) -> None:
        """End all uses, after an interrupt or an error in the caller's work."""
        with self._lock:
            for place in (*self._ring, *self._places.values()):
                if place.users:
                    place.users = 0
                    place.is_released_at(self._backend.mark())

    def check(self) -> None:
        """Make the host wait for what is under way, before a result leaves that was computed with
        it. Raises FileChanged if a file changed while its pages were read."""
        with self._lock:
            self._check_open()
            self._backend.drain()
            self._backend.check_arrived()

    # ------------------------------------------------------------------------------------------------------ memory

    def resize(self, budget: int, rates: Rates | None = None) -> None:
        """Plan anew between uses, for another budget or for rates measured meanwhile. Layers that
        stay resident are kept; the others make room first. If the memory cannot be had the old plan
        is taken up again."""
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
        """Take the memory of a plan, after giving back what the plan no longer has."""
        self._moves += 1
        self._backend.drain()
        self._backend.check_arrived()
        leaving = [i for i in self._places if i not in plan.resident]
        self._drop(self._ring, [self._places.pop(i) for i in leaving])
        self._ring = []
        self._backend.trim()  # otherwise the new memory would come on top of it
        self.plan = plan
        self._backend.expect(plan)
        for i in sorted(plan.resident - self._places.keys()):
            self._places[i] = self._place(aligned(plan.sizes[i]))
        for _ in range(plan.slots):
            self._ring.append(self._place(plan.slot_bytes))

    def _settle_back(self, plan: Plan) -> None:
        """Return to this plan, whose memory was just given back, because another plan's could not
        be had. Closes the pager if that fails too."""
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
        # The memory may have been another tensor's, whose last use comes later in compute's order.
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
        """Wait for layer i; return the point in compute from which it is in its room.

        again: if the layer was fetched ahead and that failed, try once more, because a disk or
        network may be back.
        """
        while True:
            assert place.copy is not None
            try:
                return self._backend.wait(place.copy)
            except BaseException:
                if place.copy.error is None:
                    raise  # an interrupt: the bytes are still on their way
                self._moves += 1
                place.layer, place.copy = None, None  # the room holds nothing useful
                if not again:
                    raise
            again = False
            self._ask(place, i)

    def _fetch(self, i: int, *, needed: bool) -> Place | None:
        """Ask for layer i. needed: it is used now, so any idle slot will do; else only a slot whose
        layer is needed later."""
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
        # The order matters: interrupted anywhere, the slot is empty or holds what it says. A
        # forgotten copy does no harm, because copies run in the order they were submitted.
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
        """Steps from `start` to a layer in the order, around the cycle: a whole cycle to `start`
        itself, and one more to a layer that is not expected."""
        assert layer is not None
        if layer in self._rare and not self.needs_rare:
            return len(self.layers) + 1
        return (layer - start - 1) % len(self.layers) + 1

    def _look_ahead(self, i: int) -> None:
        """Layer i is in use: fetch the next ones, as far as idle slots go, and residents that have
        not come yet."""
        self._position = i
        if self._all_came == self._moves:
            return
        # if i is a resident, all slots are for the layers behind it
        wanted = len(self._ring) + (i in self._places)
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
    """Close pagers that were left open. Python ends without waiting for daemon threads such as
    those that copy, and one that comes back from torch's code after that is unwound through it, for
    which C++ ends the process ("terminate called without an active exception") and hides what went
    wrong."""
    for pager in list(_open):
        # a device that has failed; the threads have ended all the same
        with contextlib.suppress(Exception):
            pager.close()
