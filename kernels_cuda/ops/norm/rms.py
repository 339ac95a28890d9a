"""The root mean square that references divide by."""

from __future__ import annotations

import torch
from torch import Tensor


def by_its_rms(x: Tensor, eps: float, over: int | tuple[int, ...] = -1) -> Tensor:
    """x, in x's own type, with a mean square of one over these dimensions, but for eps."""
    return x * torch.rsqrt(x.square().mean(over, keepdim=True) + eps)
