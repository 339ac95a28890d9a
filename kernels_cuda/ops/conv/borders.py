"""A picture with a border of its own pixels around it, in the format that the convolution reads: one pass over the picture.

torch's reflection pad on a card wants, and gives, the other format.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .conv_operands import Padding

Border = Literal["reflect", "replicate", "circular"]


def with_border(x: Tensor, padding: Padding, mode: Border) -> Tensor:
    """x [b, c, h, w] of any format, padding (left, right, top, bottom) -> channels-last, as torch's `pad` with this mode has it."""
    left, right, top, bottom = padding
    b, c, h, w = x.shape
    shape = b, c, h + top + bottom, w + left + right
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows = out.narrow(2, top, h)
    rows.narrow(3, left, w).copy_(x)
    _fill(rows, 3, left, right, mode)
    _fill(out, 2, top, bottom, mode)
    return out


def border_obstacle(x: Tensor, padding: Padding, mode: Border) -> str | None:
    """A border that has more pixels than there are to repeat: torch has an error of its own for it."""
    left, right, top, bottom = padding
    least = 1 if mode == "reflect" else 0
    if mode != "replicate" and (max(left, right) + least > x.shape[3] or max(top, bottom) + least > x.shape[2]):
        return f"an image {list(x.shape)} is too small for a border of {padding}, {mode}"
    return None


def _fill(out: Tensor, dim: int, before: int, after: int, mode: Border) -> None:
    """The places before and behind what is there along a dimension."""
    size = out.shape[dim] - before - after
    for count, place, is_first in ((before, 0, True), (after, before + size, False)):
        if not count:
            continue
        if mode == "reflect":
            inner = out.narrow(dim, before + 1 if is_first else before + size - 1 - count, count).flip(dim)
        elif mode == "replicate":
            inner = out.narrow(dim, before if is_first else before + size - 1, 1)
        else:
            inner = out.narrow(dim, before + size - count if is_first else before, count)
        out.narrow(dim, place, count).copy_(inner)
