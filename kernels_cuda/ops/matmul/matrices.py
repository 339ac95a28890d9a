"""A weight as a matrix of halves or of 8-bit numbers, and the product that takes either.

What is multiplied with it, and what is done to the result, is the same; so is whoever has a weight and does not want to know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...policy import STANDARD, KernelPolicy
from ..elementwise.activations import silu_mul, silu_mul_
from ..quant.rows_to_int8 import Int8Rows
from .linear import Activation, linear, linear_, linear_pair, linear_pair_
from .linear_int8 import linear_int8, linear_int8_


class Int8Matrix(NamedTuple):
    """A weight's rows, rounded to 8 bits."""

    numbers: Tensor  # [n, k] int8
    scales: Tensor  # fp32: one element, or one for each row
    rotation: int  # the group in which the rows were turned before, 0 if they were not

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape


Matrix = Tensor | Int8Matrix  # [n, k]


def rows_of(weight: Matrix, first: int, last: int) -> Matrix:
    """Rows first to last of a weight: a view, so that the product of each part can have a place and an epilogue of its own."""
    if isinstance(weight, Int8Matrix):
        scales = weight.scales if weight.scales.numel() == 1 else weight.scales[first:last]
        return Int8Matrix(weight.numbers[first:last], scales, weight.rotation)
    return weight[first:last]


def multiply(
    x: Tensor | Int8Rows,
    weight: Matrix,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float = 1.0,
    saturate: bool = False,
    out_dtype: torch.dtype | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """`linear`, or `linear_int8` where the weight is of 8-bit numbers. x may be rows that were rounded for it: turned as the
    weight's are."""
    options: Any = {
        "activation": activation,
        "residual": residual,
        "gate": gate,
        "scale": scale,
        "saturate": saturate,
        "out_dtype": out_dtype,
        "policy": policy,
    }
    if isinstance(weight, Int8Matrix):
        return linear_int8(x, weight.numbers, weight.scales, bias, rotation=_left_to_turn(x, weight), **options)
    return linear(_halves(x), weight, bias, **options)


def multiply_(
    out: Tensor,
    x: Tensor | Int8Rows,
    weight: Matrix,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float = 1.0,
    saturate: bool = False,
    policy: KernelPolicy = STANDARD,
) -> None:
    """`multiply`, written to `out` as `linear_` does. The residual may be `out` itself."""
    options: Any = {
        "activation": activation,
        "residual": residual,
        "gate": gate,
        "scale": scale,
        "saturate": saturate,
        "policy": policy,
    }
    if isinstance(weight, Int8Matrix):
        linear_int8_(out, x, weight.numbers, weight.scales, bias, rotation=_left_to_turn(x, weight), **options)
    else:
        linear_(out, _halves(x), weight, bias, **options)


def multiply_pair(
    x: Tensor | Int8Rows, weight: Matrix, *, saturate: bool = False, policy: KernelPolicy = STANDARD
) -> Tensor:
    """`linear_pair` of one weight [2 n, k], the gate's rows first: silu(x @ gate^T) * (x @ up^T). Of 8-bit numbers both products
    are one, which is rounded to fp16, and what follows is a pass of its own."""
    if isinstance(weight, Int8Matrix):
        return silu_mul(multiply(x, weight, policy=policy), saturate=saturate, policy=policy)
    return linear_pair(_halves(x), weight, saturate=saturate, policy=policy)


def multiply_pair_(
    out: Tensor, x: Tensor | Int8Rows, weight: Matrix, *, saturate: bool = False, policy: KernelPolicy = STANDARD
) -> None:
    """`multiply_pair`, written to `out`, [batch, ..., n] with rows anywhere."""
    if isinstance(weight, Int8Matrix):
        silu_mul_(out, multiply(x, weight, policy=policy), saturate=saturate, policy=policy)
    else:
        linear_pair_(out, _halves(x), weight, saturate=saturate, policy=policy)


def _left_to_turn(x: Tensor | Int8Rows, weight: Int8Matrix) -> int:
    return 0 if isinstance(x, Int8Rows) else weight.rotation


def _halves(x: Tensor | Int8Rows) -> Tensor:
    if isinstance(x, Int8Rows):
        raise TypeError("a weight of halves cannot be multiplied with rows of 8-bit numbers")
    return x
