"""One multiprocessor, cycle by cycle, running the same path on every warp: how long does an iteration take?

Each quarter issues at most one instruction per cycle, from a warp whose stall count has run out, whose scoreboards are
clear and whose pipe is free. Memory instructions go through a short queue into the pipe that the quarters share.

Asynchronous copies (LDGSTS) take their place in that pipe when they are issued, for reading the address and for the write
into shared memory that comes later; LDGDEPBAR closes a group of them, DEPBAR.LE waits for all but the last n groups. On
Pascal, which has no such copies, it waits for all but the last n instructions that set a scoreboard.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from . import machine
from .dependence import tensor_results_read
from .machine import Card, Guesses
from .registers import bank_conflicts
from .sass import Instruction

SETTLE = 2  # iterations left out
MOST_COUNTED = 63  # that a scoreboard counts
MOST_COMMITS = 16  # that code could wait for: copies are committed in stages of a loop


@dataclass(frozen=True)
class Timing:
    """How many iterations are timed, and from which starts: how far blocks begin apart, as parts of an even spread."""

    iterations: int
    starts: tuple[float, ...]


# Small things decide how two warps of a quarter fall into step, the more so where the hardware holds back who reads a tensor
# result. There several starts are averaged; what was predicted for Turing is of one.
ONE_START = Timing(4, (1.0,))
SEVERAL_STARTS = Timing(12, (0.75, 1.0, 1.25))


@dataclass(frozen=True)
class Step:
    """An instruction, with everything the simulation asks of it."""

    pipe: str
    units: tuple[tuple[str, ...], ...]
    cost: float
    stall: int
    yields: bool
    waits: tuple[int, ...]
    write: int | None
    read: int | None
    latency: float
    bytes: int
    barrier: bool
    results: tuple[int, ...] = ()  # the steps whose tensor results it touches, where the hardware watches over them
    watched: bool = False  # its own result is such a one
    copies: bool = False  # an asynchronous copy, which sets no scoreboard
    commits: bool = False  # LDGDEPBAR: its scoreboard clears when all copies before it are there
    left: int | None = None  # DEPBAR.LE: goes on when no more than this many commits are under way
    counted: int | None = None  # or no more than so many of those that set this scoreboard
    held: int = 0  # cycles that it keeps others from being issued, because its operands share a bank
    together: bool = False  # the next instruction is issued in the same cycle


def _left(instruction: Instruction) -> int | None:
    """The n of `DEPBAR.LE SB0, n`."""
    if instruction.base != "DEPBAR" or "LE" not in instruction.modifiers or len(instruction.operands) < 2:
        return None
    return int(instruction.operands[1], 16)


def _counted(instruction: Instruction) -> int | None:
    """The scoreboard of `DEPBAR.LE SB5, n`."""
    return None if _left(instruction) is None else int(instruction.operands[0].removeprefix("SB"))


def prepare(
    path: list[Instruction], card: Card, accumulate: str | None, from_dram: bool, guesses: Guesses | None = None
) -> list[Step]:
    arch = card.architecture
    guesses = guesses or arch.guesses
    results = tensor_results_read(path) if arch.watches_tensor_results else [()] * len(path)
    steps = []
    waits = bank_conflicts(path, arch)
    for instruction, touched, held in zip(path, results, waits, strict=True):
        where, control = machine.pipe(instruction, arch), instruction.control
        moved = machine.global_bytes(instruction, arch)
        latency = arch.latency(where, guesses)
        if moved:
            latency = arch.latencies[machine.DRAM if from_dram else machine.L2]
        elif instruction.base == "HMMA" and (accumulate or machine.accumulates(instruction)) == "f32":
            latency += guesses.fp32_sum_extra
        steps.append(
            Step(
                where,
                machine.units(instruction, arch),
                machine.cost(instruction, card, accumulate, guesses),
                control.stall if arch.dual_issue else max(control.stall, 1),
                control.yields,
                control.waits,
                control.write_barrier,
                control.read_barrier,
                latency,
                moved,
                instruction.base == "BAR" and "SYNC" in instruction.modifiers,
                touched,
                arch.watches_tensor_results and instruction.base in machine.TENSOR_BASES,
                instruction.base == machine.ASYNC_COPY,
                instruction.base == "LDGDEPBAR",
                _left(instruction),
                _counted(instruction) if arch.counts_scoreboards else None,
                held,
                arch.dual_issue and control.stall == 0,
            )
        )
    return steps


@dataclass
class Warp:
    block: int
    ready: float
    at: int = 0
    finished: list[float] = field(default_factory=list)
    clear: list[float] = field(default_factory=lambda: [0.0] * 6)
    waiting: bool = False
    results: dict[int, float] = field(default_factory=dict)  # when a tensor step's last result can be read
    copied: float = 0.0  # when all asynchronous copies so far are there
    commits: list[float] = field(default_factory=list)
    counted: dict[int, list[float]] = field(default_factory=dict)  # by scoreboard, when those that set it are done


@dataclass
class Quarter:
    warps: list[Warp]
    next_issue: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    queue: list[float] = field(default_factory=list)
    last: Warp | None = None

    def free_at(self, units: tuple[str, ...]) -> float:
        """When all of these are free."""
        return max((self.free.get(unit, 0.0) for unit in units), default=0.0)


class Multiprocessor:
    """`blocks` resident blocks of `warps` warps, each started `spread` cycles after the one before."""

    def __init__(
        self, steps: list[Step], card: Card, blocks: int, warps: int, from_dram: bool, spread: float, guesses: Guesses
    ) -> None:
        self.steps, self.warps_per_block, self.guesses = steps, warps, guesses
        self.depth = max(1, round(guesses.memory_queue))
        # Bytes per cycle from beyond the multiprocessor.
        self.far = card.dram_bytes_per_cycle if from_dram else card.l2_bytes_per_cycle
        self.memory_free = self.far_free = 0.0
        self.arrived: dict[int, list[Warp]] = {}
        everyone = [Warp(block, block * spread) for block in range(blocks) for _ in range(warps)]
        self.quarters = [Quarter(everyone[q :: machine.QUARTERS]) for q in range(machine.QUARTERS)]
        self.everyone = everyone

    def _earliest(self, quarter: Quarter, warp: Warp) -> float:
        if warp.waiting:
            return float("inf")
        step = self.steps[warp.at]
        when = max(warp.ready, quarter.next_issue)
        for number in step.waits:
            when = max(when, warp.clear[number])
        for place in step.results:
            when = max(when, warp.results.get(place, 0.0))
        commits = warp.commits if step.counted is None else warp.counted.get(step.counted, [])
        if step.left is not None and len(commits) > step.left:
            when = max(when, commits[-1 - step.left])
        if step.pipe == machine.MEMORY:
            if len(quarter.queue) >= self.depth:
                when = max(when, quarter.queue[-self.depth])
        else:
            when = max(when, min(quarter.free_at(units) for units in step.units))
        return when

    def _issue(self, quarter: Quarter, warp: Warp, now: float) -> bool:
        """Issue a warp's next instruction; whether that freed warps of other quarters."""
        step = self.steps[warp.at]
        start = now
        if step.pipe == machine.MEMORY:
            start = max(now + 1, self.memory_free)
            self.memory_free = start + step.cost
            quarter.queue = [*quarter.queue[-self.depth :], start]
        elif step.pipe != machine.NONE:
            for unit in min(step.units, key=quarter.free_at):
                quarter.free[unit] = start + step.cost
        read_at = start + (step.cost if step.pipe == machine.MEMORY else 0) + self.guesses.read_latency
        done = start + (step.cost if step.pipe == machine.MEMORY else 0) + step.latency
        if step.bytes:
            begin = max(start, self.far_free)
            self.far_free = begin + step.bytes / self.far
            done = max(done, begin + step.bytes / self.far + step.latency)
        if step.watched:
            warp.results[warp.at] = done
        if step.copies:
            warp.copied = max(warp.copied, done)
        if step.commits:
            done = max(now, warp.copied)
            warp.commits = [*warp.commits[-MOST_COMMITS:], done]
        if step.write is not None:
            warp.clear[step.write] = max(warp.clear[step.write], done)
            warp.counted[step.write] = [*warp.counted.get(step.write, [])[-MOST_COUNTED:], warp.clear[step.write]]
        if step.read is not None:
            warp.clear[step.read] = max(warp.clear[step.read], read_at)
        warp.ready = now + step.stall + step.held
        quarter.next_issue = now + step.held + (0 if step.together else 1)
        quarter.last = None if step.yields and not step.together else warp
        warp.at += 1
        if warp.at == len(self.steps):
            warp.at = 0
            warp.finished.append(now)
        return step.barrier and self._arrive(warp, now)

    def _arrive(self, warp: Warp, now: float) -> bool:
        """A warp reaches BAR.SYNC; whether it was the last of its block."""
        there = self.arrived.setdefault(warp.block, [])
        there.append(warp)
        warp.waiting = True
        if len(there) < self.warps_per_block:
            return False
        for other in there:
            other.waiting = False
            other.ready = max(other.ready, now + self.guesses.barrier_latency)
        there.clear()
        return True

    def _next(self, quarter: Quarter) -> tuple[float, int]:
        """When this quarter issues next, and which of its warps.

        Of warps that could: the one it stayed with, else the oldest; but none that is iterations ahead of another, or a
        full pipe would belong to one warp for ever.
        """
        slowest = min((len(warp.finished) for warp in quarter.warps), default=0)
        found = [
            (self._earliest(quarter, warp), len(warp.finished) > slowest + 1, -1 if warp is quarter.last else age, age)
            for age, warp in enumerate(quarter.warps)
        ]
        when, _, _, age = min(found, default=(float("inf"), False, 0, 0))
        return when, age

    def run(self, iterations: int) -> float:
        """Cycles per iteration, averaged over the warps, when all of them are on their way."""
        upcoming = [self._next(quarter) for quarter in self.quarters]
        while any(len(warp.finished) < SETTLE + iterations for warp in self.everyone):
            number = min(range(len(upcoming)), key=lambda n: upcoming[n][0])
            when, age = upcoming[number]
            quarter = self.quarters[number]
            if self._issue(quarter, quarter.warps[age], when):
                upcoming = [self._next(other) for other in self.quarters]
            else:
                upcoming[number] = self._next(quarter)
        spans = [warp.finished[SETTLE + iterations - 1] - warp.finished[SETTLE - 1] for warp in self.everyone]
        return sum(spans) / len(spans) / iterations


def simulate(
    steps: list[Step], card: Card, blocks: int, warps: int, from_dram: bool, guesses: Guesses | None = None
) -> tuple[float, float]:
    """Cycles in which every warp of `blocks` resident blocks finishes one iteration; and those of one block alone.

    Blocks start apart, as they do on a card after their different prologues: in step they would all want the same pipe.
    """
    guesses = guesses or card.architecture.guesses
    timing = SEVERAL_STARTS if card.architecture.watches_tensor_results else ONE_START
    alone = Multiprocessor(steps, card, 1, warps, from_dram, 0.0, guesses).run(timing.iterations)
    if blocks == 1:
        return alone, alone
    found = [
        Multiprocessor(steps, card, blocks, warps, from_dram, alone / blocks * part, guesses).run(timing.iterations)
        for part in timing.starts
    ]
    return sum(found) / len(found), alone
