"""What fp16 holds, and results that are to stay within it."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 65504.0


def saturated(value: Tensor) -> Tensor:
    """What is beyond fp16's numbers, infinities too, as the nearest of them. NaN stays."""
    return value.clamp(-LARGEST, LARGEST)


def kept(value: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """A result on its way to a type: saturated where that is asked for and the type is fp16."""
    return saturated(value) if saturate and dtype is torch.float16 else value
