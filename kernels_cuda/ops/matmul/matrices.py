"""A weight as a matrix of halves or of 8-bit numbers, and the product that takes either.

What is multiplied with it, and what is done to the result, is the same; so is whoever has a weight and does not want to know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...policy import STANDARD, KernelPolicy
from ..elementwise.activations import silu_mul
from ..quant.rows_to_int8 import Int8Rows
from .linear import Activation, linear, linear_, linear_pair, linear_pair_
from .linear_int8 import linear_int8, linear_int8_, linear_int8_pair, linear_int8_pair_


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
    x: Tensor | Int8Rows,
    weight: Matrix,
    up: Matrix | None = None,
    *,
    activation: Activation = "silu",
    scale: float = 1.0,
    saturate: bool = False,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """activation(x @ weight^T) * (x @ up^T) * scale: `linear_pair`, or `linear_int8_pair` for weights of 8-bit numbers. weight may
    be both, [2 n, k], the gate's rows first."""
    options: Any = {"activation": activation, "scale": scale, "saturate": saturate, "policy": policy}
    if (pair := _in_8_bits(weight, up)) is not None:
        first, second = pair
        return linear_int8_pair(x, *first[:2], *second[:2], rotation=_left_to_turn(x, first), **options)
    if isinstance(weight, Int8Matrix) or isinstance(up, Int8Matrix):
        return silu_mul(*_unlike(x, weight, up, activation, scale, policy), saturate=saturate, policy=policy)
    return linear_pair(_halves(x), weight, up, **options)


def multiply_pair_(
    out: Tensor, x: Tensor | Int8Rows, weight: Matrix, *, saturate: bool = False, policy: KernelPolicy = STANDARD
) -> None:
    """`multiply_pair` with SiLU of one weight, [2 n, k], written to `out`, [batch, ..., n] with rows anywhere."""
    if (pair := _in_8_bits(weight)) is not None:
        first, second = pair
        turn = _left_to_turn(x, first)
        linear_int8_pair_(out, x, *first[:2], *second[:2], rotation=turn, saturate=saturate, policy=policy)
    else:
        linear_pair_(out, _halves(x), weight, saturate=saturate, policy=policy)


def _in_8_bits(weight: Matrix, up: Matrix | None = None) -> tuple[Int8Matrix, Int8Matrix] | None:
    """Both weights of a pair, if one kernel multiplies them as 8-bit numbers: those that one rounding of x serves."""
    if up is None:
        half = weight.shape[0] // 2
        first, second = rows_of(weight, 0, half), rows_of(weight, half, 2 * half)
    else:
        first, second = weight, up
    if not (isinstance(first, Int8Matrix) and isinstance(second, Int8Matrix)):
        return None
    alike = first.rotation == second.rotation and first.scales.numel() == second.scales.numel()
    return (first, second) if alike else None


def _unlike(
    x: Tensor | Int8Rows, weight: Matrix, up: Matrix | None, activation: str, scale: float, policy: KernelPolicy
) -> list[Tensor]:
    """Two products of unlike numbers, rounded to fp16."""
    if activation != "silu" or scale != 1:
        raise ValueError(f"a pair of unlike numbers has activation silu and no scale, not {activation} and {scale}")
    return [multiply(x, one, policy=policy) for one in (weight, up) if one is not None]


def _left_to_turn(x: Tensor | Int8Rows, weight: Int8Matrix) -> int:
    return 0 if isinstance(x, Int8Rows) else weight.rotation


def _halves(x: Tensor | Int8Rows) -> Tensor:
    if isinstance(x, Int8Rows):
        raise TypeError("a weight of halves cannot be multiplied with rows of 8-bit numbers")
    return x
