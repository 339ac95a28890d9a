"""Blocks, loops and the path of one iteration: which instructions a warp issues, in which order.

Branches depend on data that no disassembler knows. One iteration is therefore a walk under stated rules: an inner loop
runs as often as it is told to, a branch over code is not taken unless that code matches a pattern the caller wants left
out (masks, bias, dropout).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .machine import PRODUCTS
from .sass import Instruction

_ENDS = ("BRA", "BRX", "JMP", "EXIT", "RET", "KILL", "SYNC")


@dataclass(frozen=True)
class Block:
    """Instructions [start, end) without a branch inside; successors are block numbers, the fall-through first."""

    start: int
    end: int
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop: the header's block, and every block that can come back to it."""

    header: int
    blocks: frozenset[int]
    latches: frozenset[int]


@dataclass(frozen=True)
class Rules:
    """How the walk decides. `trips` by header address; `default_trips` for inner loops with work.

    work   the instructions that the kernel is for, products if nothing else is said; code with at least `least` of them is
           work. Where the cores multiply, an epilogue has some too
    """

    trips: dict[int, int] = field(default_factory=dict)
    default_trips: int = 1
    skip: tuple[str, ...] = ()
    work: tuple[str, ...] = PRODUCTS
    least: int = 1

    def are_work(self, count: int) -> bool:
        """Whether code with so many of them is work."""
        return count >= self.least


def split(code: list[Instruction]) -> list[Block]:
    index = {instruction.address: at for at, instruction in enumerate(code)}
    starts = {0}
    for at, instruction in enumerate(code):
        if instruction.base in _ENDS:
            starts.add(at + 1)
            if instruction.target is not None:
                starts.add(index[instruction.target])
    order = sorted(start for start in starts if start < len(code))
    number = {start: at for at, start in enumerate(order)}
    blocks = []
    for start, end in zip(order, [*order[1:], len(code)], strict=True):
        last = code[end - 1]
        after: list[int] = []
        if (last.base not in _ENDS or last.conditional) and end < len(code):
            after.append(number[end])
        if last.base in _ENDS and last.target is not None:
            after.append(number[index[last.target]])
        blocks.append(Block(start, end, tuple(after)))
    return blocks


def _dominators(blocks: list[Block]) -> list[set[int]]:
    everything = set(range(len(blocks)))
    before: list[set[int]] = [set() for _ in blocks]
    for number, block in enumerate(blocks):
        for after in block.successors:
            before[after].add(number)
    found = [{0}, *(set(everything) for _ in blocks[1:])]
    changed = True
    while changed:
        changed = False
        for number in range(1, len(blocks)):
            common = set.intersection(*(found[b] for b in before[number])) if before[number] else set()
            if common | {number} != found[number]:
                found[number] = common | {number}
                changed = True
    return found


def find_loops(blocks: list[Block]) -> list[Loop]:
    """Natural loops, innermost first."""
    dominators = _dominators(blocks)
    before: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for after in block.successors:
            before.setdefault(after, set()).add(number)
    latches: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for after in block.successors:
            if after in dominators[number]:
                latches.setdefault(after, set()).add(number)
    loops = []
    for header, backs in latches.items():
        members, waiting = {header}, list(backs)
        while waiting:
            number = waiting.pop()
            if number not in members:
                members.add(number)
                waiting += before.get(number, ())
        loops.append(Loop(header, frozenset(members), frozenset(backs)))
    return sorted(loops, key=lambda loop: len(loop.blocks))


def loop_around(blocks: list[Block], start: int) -> Loop | None:
    """The blocks that can be reached from a block and come back to it, whatever else enters there. None: nothing comes back.

    A loop with several heads is no natural loop, but it is found so.
    """
    before: list[list[int]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for after in block.successors:
            before[after].append(number)
    forward, back = (_reached(start, edges) for edges in ([list(block.successors) for block in blocks], before))
    return Loop(start, frozenset(forward & back), frozenset()) if start in forward & back else None


def _reached(start: int, edges: list[list[int]]) -> set[int]:
    """In one step or more."""
    found: set[int] = set()
    waiting = [start]
    while waiting:
        for number in edges[waiting.pop()]:
            if number not in found:
                found.add(number)
                waiting.append(number)
    return found


def weigh(code: list[Instruction], blocks: list[Block], loop: Loop, bases: tuple[str, ...]) -> int:
    """How many instructions of these kinds a loop holds."""
    return sum(i.base in bases for n in loop.blocks for i in code[blocks[n].start : blocks[n].end])


def main_loop(
    code: list[Instruction], blocks: list[Block], loops: list[Loop], work: tuple[str, ...] = PRODUCTS
) -> Loop | None:
    """The loop with most work, the innermost of equals; else with most global loads and stores; else the longest.

    None: the work is in straight code.
    """
    for bases in (work, ("LDG", "STG")):
        weights = [weigh(code, blocks, loop, bases) for loop in loops]
        if any(weights):
            return loops[weights.index(max(weights))]
        if any(instruction.base in bases for instruction in code):
            return None
    return loops[-1] if loops else None


def _matches(rules: Rules, region: list[Instruction]) -> bool:
    """Each pattern is OPCODES or OPCODES:COUNT: a region with at least COUNT of them is left out.

    Never one with work: that is what the loop is for.
    """
    if rules.are_work(sum(instruction.base in rules.work for instruction in region)):
        return False
    for pattern in rules.skip:
        opcodes, _, least = pattern.partition(":")
        hits = sum(re.fullmatch(opcodes, instruction.base) is not None for instruction in region)
        if hits >= int(least or 1):
            return True
    return False


def walk(
    code: list[Instruction],
    blocks: list[Block],
    loops: list[Loop],
    main: Loop | None,
    rules: Rules,
    limit: int = 200_000,
) -> list[Instruction]:
    """The instructions of one iteration of `main`, or of the whole kernel if that is None."""
    inner = [loop for loop in loops if main is None or (loop.blocks < main.blocks and loop.header != main.header)]
    trips = {
        loop.header: rules.trips.get(
            code[blocks[loop.header].start].address,
            rules.default_trips if rules.are_work(weigh(code, blocks, loop, rules.work)) else 1,
        )
        for loop in inner
    }
    entered = dict.fromkeys(trips, 0)
    path: list[Instruction] = []
    at = main.header if main else 0
    while True:
        block = blocks[at]
        if at in entered:
            entered[at] += 1
        path += code[block.start : block.end]
        if len(path) > limit:
            raise ValueError("the walk does not come back to the head of the loop: give --trips or --loop")
        options = block.successors
        if main and len(options) > 1:
            options = tuple(after for after in options if after in main.blocks) or options
        if not options:
            return path
        chosen = _choose(code, blocks, inner, trips, entered, at, options, rules)
        if main and chosen == main.header:
            return path
        for loop in inner:  # left: the next visit counts anew
            if at in loop.blocks and chosen not in loop.blocks:
                entered[loop.header] = 0
        at = chosen


def _choose(
    code: list[Instruction],
    blocks: list[Block],
    inner: list[Loop],
    trips: dict[int, int],
    entered: dict[int, int],
    at: int,
    options: tuple[int, ...],
    rules: Rules,
) -> int:
    if len(options) == 1:
        return options[0]
    through, taken = options
    loop = next((loop for loop in inner if at in loop.blocks), None)
    if loop:
        more = entered[loop.header] < trips[loop.header]
        if at == loop.header and at not in loop.latches:  # tested at the top: this visit is not a trip yet
            more = entered[loop.header] <= trips[loop.header]
        outside = [after for after in options if after not in loop.blocks]
        if len(outside) == 1 and (at in loop.latches or at == loop.header):
            return next(after for after in options if after in loop.blocks) if more else outside[0]
        if not outside and blocks[taken].start < blocks[at].start:  # a rotated loop's jump back to its tail
            return taken if more else through
    if blocks[taken].start > blocks[at].start and _matches(rules, code[blocks[through].start : blocks[taken].start]):
        return taken
    return through
