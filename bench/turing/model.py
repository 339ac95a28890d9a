"""The prediction: counts of one iteration, the bound of each pipe, the simulated time, and what they say together."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from . import machine
from .flow import Rules, find_loops, loop_around, main_loop, split, walk
from .machine import Card, Guesses
from .registers import bank_conflicts
from .sass import Instruction
from .simulate import prepare, simulate


@dataclass(frozen=True)
class Launch:
    """The facts that the machine code lacks: how the kernel is launched, and how much of its work is of use."""

    threads: int
    registers: int
    shared: int
    useful_flops: float | None = None  # per block and iteration; None: all tensor work counts


@dataclass
class Count:
    """One warp, one iteration."""

    instructions: int = 0
    opcodes: dict[str, int] = field(default_factory=dict)
    pipes: dict[str, float] = field(default_factory=dict)
    flops: int = 0
    accumulate: str | None = None
    shared_bytes: int = 0
    global_bytes: int = 0
    bank_conflicts: int = 0  # cycles, where they are counted


@dataclass
class Prediction:
    """`share` is of the peak for the sums used: of what the card would do if it did this code's products and nothing else."""

    card: str
    accumulate: str | None
    as_compiled: bool
    blocks: int
    warps: int
    cycles: float
    bounds: dict[str, float]
    alone: float
    tflops: float
    share: float
    bytes_per_second: float
    verdict: str


def trace(code: list[Instruction], rules: Rules, loop_at: int | None = None) -> list[Instruction]:
    """The path of one iteration of the main loop, or of the loop at `loop_at`: of its head, or, where it has several, of the block
    from which the walk begins and to which it comes back."""
    blocks = split(code)
    loops = find_loops(blocks)
    main = main_loop(code, blocks, loops)
    if loop_at is not None:
        main = next((loop for loop in loops if code[blocks[loop.header].start].address == loop_at), None)
        start = next((at for at, block in enumerate(blocks) if code[block.start].address == loop_at), None)
        if main is None and start is not None:
            main = loop_around(blocks, start)
        if main is None:
            heads = ", ".join(hex(code[blocks[loop.header].start].address) for loop in loops)
            raise ValueError(f"no loop starts at {loop_at:#x}; loops start at {heads or 'no address'}")
    return walk(code, blocks, loops, main, rules)


def count(path: list[Instruction], card: Card) -> Count:
    total = Count(instructions=len(path), opcodes=dict(Counter(i.base for i in path).most_common()))
    products = [i for i in path if machine.is_product(i, card.architecture)]
    modes = {machine.accumulates(i) for i in products}
    total.bank_conflicts = sum(bank_conflicts(path, card.architecture))
    total.flops = sum(map(machine.flops, products))
    total.accumulate = "mixed" if len(modes) > 1 else next(iter(modes), None)
    for instruction in path:
        where = machine.pipe(instruction, card.architecture)
        if where != machine.NONE:
            total.pipes[where] = total.pipes.get(where, 0.0) + machine.load(instruction, card)
        total.shared_bytes += machine.shared_bytes(instruction)
        total.global_bytes += machine.global_bytes(instruction, card.architecture)
    return total


def bounds(
    path: list[Instruction],
    card: Card,
    warps: int,
    accumulate: str | None,
    from_dram: bool,
    guesses: Guesses | None = None,
) -> dict[str, float]:
    """Cycles each pipe needs for one iteration of `warps` resident warps: no schedule can be faster than the largest."""
    per_quarter = warps / machine.QUARTERS
    pairs = sum(i.control.stall == 0 for i in path) if card.architecture.dual_issue else 0
    waits = sum(bank_conflicts(path, card.architecture))
    need: dict[str, float] = {"issue": (len(path) - pairs + waits) * per_quarter}
    for instruction in path:
        where = machine.pipe(instruction, card.architecture)
        if where != machine.NONE:
            many = warps if where in machine.SHARED_PIPES else per_quarter
            need[where] = need.get(where, 0.0) + machine.load(instruction, card, accumulate, guesses) * many
            heavy = card.architecture.two_fma_pipes and where == machine.FMA
            if heavy and all(machine.HEAVY in units for units in machine.units(instruction, card.architecture)):
                alone = machine.cost(instruction, card, accumulate, guesses) * per_quarter
                need[machine.HEAVY] = need.get(machine.HEAVY, 0.0) + alone
    moved = sum(machine.global_bytes(instruction, card.architecture) for instruction in path) * warps
    if moved:
        need[machine.L2] = moved / card.l2_bytes_per_cycle
        if from_dram:
            need[machine.DRAM] = moved / card.dram_bytes_per_cycle
    return dict(sorted(need.items(), key=lambda item: -item[1]))


def verdict(cycles: float, need: dict[str, float], alone: float, blocks: int) -> str:
    """The bound of the kernel, in a sentence."""
    (first, most), *others = need.items()
    second = f", then {others[0][0]} {others[0][1] / cycles:.0%}" if others else ""
    busy = f"{first} is busy {most / cycles:.0%} of the time{second}"
    if most / cycles > 0.85:
        return f"bound by {first}: {busy}"
    if blocks == 1:
        return f"between latency and {first}: one block per multiprocessor; {busy}"
    if alone / cycles > 0.85:
        return f"bound by latency: a block alone takes {alone / cycles:.0%} of the time of {blocks}; {busy}"
    return f"between latency and {first}: {busy}; a block alone takes {alone / cycles:.0%} of the time of {blocks}"


def predict(
    path: list[Instruction],
    launch: Launch,
    card: Card,
    accumulate: str | None = None,
    from_dram: bool | None = None,
    guesses: Guesses | None = None,
) -> Prediction:
    """The time of one iteration on `card`, and what it means.

    `accumulate` counts the same code as if all its HMMA summed in that type; None takes each as it is. Tensor kernels
    read their tiles from L2, others from DRAM, unless `from_dram` says otherwise.
    """
    counted = count(path, card)
    products = [i for i in path if machine.is_product(i, card.architecture)]
    tensor = sum(machine.cost(i, card, accumulate) for i in products)
    far = from_dram if from_dram is not None else not counted.flops
    blocks = machine.resident_blocks(card.architecture, launch.registers, launch.shared, launch.threads)
    if not blocks:
        raise ValueError(f"no room for a block: {launch}")
    warps = -(-launch.threads // machine.LANES)
    steps = prepare(path, card, accumulate, far, guesses)
    cycles, alone = simulate(steps, card, blocks, warps, far, guesses)
    need = bounds(path, card, warps * blocks, accumulate, far, guesses)
    cycles = max(cycles, next(iter(need.values())))
    seconds = cycles / card.clock
    useful = (launch.useful_flops or counted.flops * warps) * blocks * card.multiprocessors / seconds
    peak = counted.flops / tensor * machine.QUARTERS * card.multiprocessors * card.clock if tensor else 0.0
    return Prediction(
        card=card.name,
        accumulate=(accumulate or counted.accumulate) if tensor else None,
        as_compiled=accumulate in (None, counted.accumulate),
        blocks=blocks,
        warps=warps,
        cycles=cycles,
        bounds=need,
        alone=alone,
        tflops=useful / 1e12,
        share=useful / peak if peak else 0.0,
        bytes_per_second=counted.global_bytes * warps * blocks * card.multiprocessors / seconds,
        verdict=verdict(cycles, need, alone, blocks),
    )


def as_json(value: Count | Prediction) -> dict[str, Any]:
    """Numbers with four digits: the model knows no more."""

    def rounded(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: rounded(inner) for key, inner in item.items()}
        return float(f"{item:.4g}") if isinstance(item, float) else item

    found: dict[str, Any] = rounded(asdict(value))
    return found
