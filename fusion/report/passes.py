"""Passes through the blocks, found in the ledger's timeline: the last whole one, and the usual
seconds of a layer.

The first pass brings everything and measures kernels. It says little about later passes, and is
left out if there are others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from ...memory.ledger import Entry
from .data import Stretch


def cut(entries: Sequence[Entry], order: Mapping[str, int]) -> list[tuple[float, float]]:
    """Beginning and end of each pass, by the uses: a pass begins where the order starts anew.
    Passes that lack layers (an interrupt, the end of the ring) are left out. A part of a block may
    be used twice running: for a norm, and for what follows it."""
    uses = sorted((e for e in entries if e.kind == "use" and e.layer in order), key=lambda e: e.start)
    groups: list[list[Entry]] = []
    for use in uses:
        if not groups or order[use.layer] < order[groups[-1][-1].layer] + (len(order) == 1):
            groups.append([])
        groups[-1].append(use)
    whole = max((len(group) for group in groups), default=0)
    return [(group[0].start, group[-1].end) for group in groups if len(group) == whole]


def begins(passes: Sequence[tuple[float, float]], number: int) -> float:
    """The time from which a pass counts. It includes the wait for its first layer, which is before
    the use, and is bounded by the pass before and by the pass's own length."""
    start, end = passes[number]
    before = passes[number - 1][1] if number else start - (end - start)
    return max(before, start - (end - start))


def last_pass(
    entries: Sequence[Entry],
    order: Mapping[str, int],
    passes: Sequence[tuple[float, float]],
    chosen: Sequence[int] | None = None,
) -> tuple[Stretch, ...]:
    """The timeline of the last pass, or of the last of the `chosen` numbers, in seconds from its
    start."""
    numbers = range(len(passes)) if chosen is None else chosen
    if not numbers:
        return ()
    last = numbers[-1]
    low, high = begins(passes, last), passes[last][1]
    waits = [e.start for e in entries if e.kind == "stall" and low <= e.start and e.end <= high]
    low = min([passes[last][0], *waits])
    return tuple(
        Stretch(e.kind, order[e.layer], max(e.start, low) - low, min(e.end, high) - low, e.nbytes)
        for e in entries
        if e.layer in order and e.end > low and e.start < high
    )


def typical(
    entries: Sequence[Entry],
    passes: Sequence[tuple[float, float]],
    chosen: Sequence[int] | None = None,
    most: int = 16,
) -> dict[tuple[str, str], float]:
    """(kind, layer) -> seconds of it in a pass: the median over the last passes, or over the last
    of the `chosen` numbers. The first is left out if there are more."""
    numbers = range(len(passes)) if chosen is None else chosen
    if not numbers:
        return {}
    numbers = numbers[max(1 if len(numbers) > 1 else 0, len(numbers) - most) :]
    edges = [begins(passes, number) for number in numbers]
    ends = [passes[number][1] for number in numbers]
    sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(edges))
    for entry in entries:
        for number, (low, high) in enumerate(zip(edges, ends, strict=True)):
            if low <= entry.start < high:
                sums[entry.kind, entry.layer][number] += entry.end - entry.start
    return {key: median(values) for key, values in sums.items()}
