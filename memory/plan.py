"""Plans which layers stay on the GPU and which pass through it, within a budget. Pure arithmetic.

Layers are used one after the other, over and over: a cyclic scan. Keeping the layer used last is
then the worst choice, because it is needed latest. The best is a fixed set of residents, and a ring
of slots through which all others pass:

    resident   has its own place, is copied once
    streamed   is copied in every pass into the next slot of the ring, as soon as the layer that
               had the slot is done
    rare       is needed by few passes, and then takes a slot as a streamed one does

A resident byte is one byte less to copy in every pass, whichever layer it belongs to. So as many
bytes as fit are resident. They are spread over the order, so that the bus has an even load. The
ring has at least two slots, for the layer in use and the next; it has more where the simulation
says that it pays, for instance because layers differ in size.

`simulate` predicts what a plan will do at given rates, pass by pass and stall by stall. The pager's
ledger is compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

LEAST_SLOTS = 2  # the layer in use and the next one
MOST_SLOTS = 6
ALIGNMENT = 512  # bytes: a layer's place begins at a multiple, as device allocators give it


class OverBudget(MemoryError):
    """Not even the smallest window fits. The message says what is needed, what there is, and what
    to change."""

    __module__ = "fusestream"


@dataclass(frozen=True)
class Rates:
    """The machine's rates, measured or guessed: bus in bytes per second, compute in seconds of each
    layer."""

    bus: float
    compute: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """sizes: bytes of each layer, in order of use. slot_bytes: room of one slot. rare: layers that
    few passes need."""

    sizes: tuple[int, ...]
    resident: frozenset[int]
    slots: int
    slot_bytes: int
    rare: frozenset[int] = frozenset()

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that pass through the ring in every pass, in order."""
        return tuple(i for i in range(len(self.sizes)) if i not in self.resident and i not in self.rare)

    @property
    def resident_bytes(self) -> int:
        return sum(aligned(self.sizes[i]) for i in self.resident)

    @property
    def window_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def footprint(self) -> int:
        """Device bytes at every instant, because places and slots are taken once and kept."""
        return self.resident_bytes + self.window_bytes

    @property
    def bytes_per_pass(self) -> int:
        """Bytes over the bus in a pass, once the residents are there."""
        return sum(self.sizes[i] for i in self.streamed)


@dataclass(frozen=True)
class Prediction:
    """
    first      seconds of the pass that starts with nothing on the GPU
    steady     seconds of every later pass
    stalls     seconds that each layer's compute waits for its bytes in a steady pass
    bus_share  share of a steady pass in which the bus is busy
    """

    first: float
    steady: float
    stalls: tuple[float, ...]
    bus_share: float


def aligned(nbytes: int) -> int:
    """Bytes that a layer takes on the device."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def make_plan(
    sizes: Sequence[int], budget: int, rates: Rates | None = None, rare: frozenset[int] = frozenset()
) -> Plan:
    """The best plan for these layers in `budget` bytes: the fastest by simulation or, without
    rates, the one that copies least. rare: layers that few passes need.

    Raises OverBudget if two slots do not fit beside the layers that must then be resident.
    """
    return _made(tuple(sizes), budget, rates, rare)


@lru_cache(maxsize=16)  # a model asks for its plan at each prompt
def _made(sizes: tuple[int, ...], budget: int, rates: Rates | None, rare: frozenset[int]) -> Plan:
    often = [i for i in range(len(sizes)) if i not in rare]
    rooms = [aligned(sizes[i]) for i in often]
    narrow = max((aligned(sizes[i]) for i in rare), default=0)
    if not narrow and sum(rooms) <= budget:
        return Plan(sizes, frozenset(often), 0, 0, rare)
    found = []
    for slot in _slots(rooms, narrow):  # layers larger than a slot are resident
        for slots in range(LEAST_SLOTS, MOST_SLOTS + 1):
            left = budget - slots * slot - sum(room for room in rooms if room > slot)
            if left < 0:
                break
            # Layers without bytes are always there.
            fixed = {i for i, room in enumerate(rooms) if room > slot or room == 0}
            resident = frozenset(often[i] for i in fixed | spread(rooms, fixed, left))
            found.append(Plan(sizes, resident, slots, slot, rare))
    if not found:
        raise OverBudget(_need(least_budget(sizes, rare), budget))
    return min(found, key=lambda plan: _cost(plan, rates))


def _slots(rooms: Sequence[int], narrow: int) -> list[int]:
    """Sizes to try for a slot: one for each of these rooms, and at least `narrow`, the largest rare
    layer's room."""
    return sorted({narrow, *(room for room in rooms if room > narrow)} - {0})


def _cost(plan: Plan, rates: Rates | None) -> tuple[float, ...]:
    """Sort key of a plan: steady time if rates are known, then bytes copied, then the ring's
    memory."""
    steady = simulate(plan, rates).steady if rates is not None else 0.0
    return float(f"{steady:.6g}"), plan.bytes_per_pass, plan.slots, plan.slot_bytes


def spread(rooms: Sequence[int], fixed: set[int], left: int) -> set[int]:
    """Layers to keep in addition to the fixed ones: as many bytes as fit into `left`, evenly over
    the order."""
    rest = [i for i in range(len(rooms)) if i not in fixed]

    def share(part: float) -> list[int]:
        """Keep this part of the bytes: a layer whenever enough has added up."""
        kept, owed = [], 0.0
        for i in rest:
            owed += part * rooms[i]
            if owed >= rooms[i] * (1 - 1e-9):
                kept.append(i)
                owed -= rooms[i]
        return kept

    def total(part: float) -> int:
        return sum(rooms[i] for i in share(part))

    most = _bisect(lambda part: total(part) > left, 0.0, 1.0)
    # Many shares keep as much; the least of them is even around the cycle.
    least = most - _bisect(lambda less: total(most - less) < total(most), 0.0, most)
    chosen = set(share(least if total(least) == total(most) else most))
    # The remaining bytes go to layers where the run of streamed ones is longest.
    left -= sum(rooms[i] for i in chosen)
    while True:
        fitting = [i for i in rest if i not in chosen and rooms[i] <= left]
        if not fitting:
            return chosen
        best = max(fitting, key=lambda i: (_distance(i, chosen | fixed, len(rooms)), rooms[i], -i))
        chosen.add(best)
        left -= rooms[best]


def _bisect(too_far: Callable[[float], bool], low: float, high: float) -> float:
    """The largest number between `low` and `high` that is not too far."""
    if not too_far(high):
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if too_far(middle) else (middle, high)
    return low


def _distance(i: int, others: Iterable[int], count: int) -> int:
    """Steps to the nearest of these layers, around the cycle."""
    return min((min((i - other) % count, (other - i) % count) for other in others), default=count)


def least_budget(sizes: Sequence[int], rare: frozenset[int] = frozenset()) -> int:
    """The smallest budget for which a plan can be made."""
    rooms = [aligned(size) for i, size in enumerate(sizes) if i not in rare]
    narrow = max((aligned(sizes[i]) for i in rare), default=0)
    passing = [LEAST_SLOTS * slot + sum(room for room in rooms if room > slot) for slot in _slots(rooms, narrow)]
    return min(passing) if narrow else min([sum(rooms), *passing])


def most_budget(sizes: Sequence[int], rare: frozenset[int] = frozenset()) -> int:
    """The smallest budget in which only rare layers pass through."""
    return sum(aligned(size) for i, size in enumerate(sizes) if i not in rare) + LEAST_SLOTS * max(
        (aligned(sizes[i]) for i in rare), default=0
    )


def _need(least: int, budget: int) -> str:
    gib = 2**30
    return (
        f"The weights need at least {least / gib:.2f} GiB of VRAM to pass through ({LEAST_SLOTS} of the largest layers at a "
        f"time), and the budget is {budget / gib:.2f} GiB. Raise the VRAM budget, or close what else uses the card."
    )


def simulate(plan: Plan, rates: Rates, passes: int = 4) -> Prediction:
    """Predict what a plan does at these rates.

    The bus copies one layer at a time, in order of use. A copy into a slot starts when the slot's
    last layer is done. A layer computes when the one before is done and its own bytes are there.
    The simulated passes do without rare layers.
    """
    count = len(plan.sizes)
    if len(rates.compute) != count:
        raise ValueError(f"{len(rates.compute)} compute times for {count} layers")
    bus_free = now = 0.0
    done: list[float] = []  # when each streamed layer's compute ended, all passes in one row
    ends, stalls, busy = [0.0], [0.0] * count, 0.0
    for number in range(passes):
        busy = 0.0
        for i, size in enumerate(plan.sizes):
            if i in plan.rare:
                continue
            there = 0.0
            if i not in plan.resident:
                slot_free = done[-plan.slots] if len(done) >= plan.slots else 0.0
                bus_free = max(bus_free, slot_free) + size / rates.bus
                there, busy = bus_free, busy + size / rates.bus
            elif number == 0:
                bus_free += size / rates.bus
                there, busy = bus_free, busy + size / rates.bus
            stalls[i] = max(0.0, there - now)
            now = max(now, there) + rates.compute[i]
            if i not in plan.resident:
                done.append(now)
        ends.append(now)
    steady = ends[-1] - ends[-2]
    share = busy / steady if steady > 0 else 0.0
    return Prediction(ends[1], steady, tuple(stalls), min(share, 1.0) if math.isfinite(share) else 0.0)
