"""Numbers in two parts: two fp16 numbers that add up to one of fp32, and what products of both leave. The twin of src/parts.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from .half_range import saturated

PARTS = 2


def split(x: Tensor) -> Tensor:
    """fp32 or fp64 numbers as [2, *x.shape] fp16: the value, which saturates, and what rounding took from it. NaN stays."""
    x = saturated(x)
    value = x.half()
    return torch.stack((value, (x - value).half()))


def check_sums(name: str, sums: Tensor | None) -> None:
    """A tensor that is not two parts of something: what a product of two parts makes."""
    if sums is not None and (sums.ndim == 0 or sums.shape[0] != PARTS):
        raise ValueError(f"{name}: {list(sums.shape)} is not [2, ...], sums in two parts")


def join(sums: Tensor) -> Tensor:
    """What two parts add up to, in fp32 or, of float64, in float64."""
    wide = torch.promote_types(sums.dtype, torch.float32)
    return sums[0].to(wide) + sums[1].to(wide)
