"""Weights of 8-bit numbers as stock's files have them, `int8_tensorwise` with or without ConvRot: what our ops take as it lies."""

from __future__ import annotations

from typing import Any

from ...kernels_cuda import Int8Matrix
from ...kernels_cuda.ops.quant.rotation import GROUPS
from .storage import INT8, layout_of


def matrix_of(quantised: Any) -> Int8Matrix | None:
    """The weight [n, k], not copied; None: it is stored otherwise, or in a way that only stock knows."""
    if layout_of(quantised) != INT8:
        return None
    numbers, params = quantised._qdata, quantised._params
    if numbers.ndim != 2 or getattr(params, "transposed", False):
        return None
    n, k = numbers.shape
    rotation = params.convrot_groupsize if params.convrot else 0
    turns = rotation == 0 or (rotation in GROUPS and k % rotation == 0)
    if not turns or params.scale.numel() not in (1, n):
        return None
    return Int8Matrix(numbers, params.scale.reshape(-1).float(), rotation)
