"""What fp16 holds, and results that are to stay within it; operands in the type of a computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LARGEST = 65504.0


def in_type(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Each of these in one type; None stays."""
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def saturated(value: Tensor) -> Tensor:
    """What is beyond fp16's numbers, infinities too, as the nearest of them. NaN stays."""
    return value.clamp(-LARGEST, LARGEST)


def kept(value: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """A result on its way to a type: saturated where that is asked for and the type is fp16."""
    return saturated(value) if saturate and dtype is torch.float16 else value
