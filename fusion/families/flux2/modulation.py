"""Shift, scale and gate, and the tokens that they are for.

Flux.2 makes them once a step for all blocks, Flux.1 in each block, Chroma in a network of its own.
When a block computes they are stock's `ModulationOut`, [batch, 1, dim] each. With references at
timestep zero there are two rows, and segments of tokens (first, last, row) assign them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

Segments = Sequence[Sequence[int]]


class Run(NamedTuple):
    """Tokens that share shift, scale and gate, [1 or batch, 1 or tokens, dim] each: views, which
    the ops read in place."""

    tokens: slice
    shift: Tensor
    scale: Tensor
    gate: Tensor


def runs(mod: Any, segments: Segments | None, tokens: int) -> list[Run]:
    """The runs of all tokens, in any order. mod: stock's ModulationOut."""
    if segments is None:
        return [Run(slice(0, tokens), mod.shift, mod.scale, mod.gate)]
    parts = (mod.shift, mod.scale, mod.gate)
    return [
        Run(slice(first, last), *(part[:, row : row + 1] for part in parts))
        for first, last, row in segments
        if last > first
    ]


def unserved(x: Tensor, mods: Sequence[Any], segments: Segments | None) -> str | None:
    """Why stock must apply these to x [batch, tokens, dim], in words a user understands; None: we
    can."""
    batch, tokens = x.shape[:2]
    if segments is not None and not _cover(segments, tokens):
        return "modulation is given for some of the tokens only"
    for mod in mods:
        for part in (mod.shift, mod.scale, mod.gate):
            if part.ndim != 3 or part.shape[0] not in (1, batch):
                return "modulation is given for another batch"
            rows = part.shape[1]
            if rows not in (1, tokens) if segments is None else any(row >= rows for *_, row in segments):
                return "modulation is given for another number of tokens"
    return None


def _cover(segments: Segments, tokens: int) -> bool:
    """Whether each token is in exactly one segment."""
    at = 0
    for first, last, _ in sorted(map(tuple, segments)):
        if first != at or last < first:
            return False
        at = last
    return at == tokens
