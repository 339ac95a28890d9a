"""A weight as a matrix of halves or of integers, and the product that takes either.

What is multiplied with it, and what is done to the result, is the same; so is whoever has a weight and does not want to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...policy import STANDARD, KernelPolicy
from ..elementwise.activations import silu_mul
from .integer_linear import IntegerLinear, RoundedRows
from .linear import Activation, linear, linear_, linear_pair, linear_pair_
from .linear_int4 import INT4
from .linear_int8 import INT8

OPS: Mapping[int, IntegerLinear] = {8: INT8, 4: INT4}  # by bits


class IntegerMatrix(NamedTuple):
    """A weight's rows, rounded to 8 or 4 bits."""

    numbers: Tensor  # [n, k] int8, or of 4 bits [n, k / 2], two to a byte
    scales: Tensor  # fp32: one element, or one for each row
    rotation: int  # the group in which the rows were turned before, 0 if they were not
    bits: int = 8

    @property
    def shape(self) -> torch.Size:
        """[n, k], whatever a byte holds."""
        n, width = self.numbers.shape
        return torch.Size((n, width * 8 // self.bits))

    @property
    def ops(self) -> IntegerLinear:
        return OPS[self.bits]


Matrix = Tensor | IntegerMatrix  # [n, k]


def rows_for(x: Tensor, weight: IntegerMatrix, *, policy: KernelPolicy = STANDARD) -> RoundedRows:
    """x [..., k] fp16 rounded for a weight: turned as its rows are, to as many bits."""
    return weight.ops.round_rows(x, rotation=weight.rotation, policy=policy)


def rows_of(weight: Matrix, first: int, last: int) -> Matrix:
    """Rows first to last of a weight: a view, so that the product of each part can have a place and an epilogue of its own."""
    if isinstance(weight, IntegerMatrix):
        scales = weight.scales if weight.scales.numel() == 1 else weight.scales[first:last]
        return weight._replace(numbers=weight.numbers[first:last], scales=scales)
    return weight[first:last]


def part_of(x: Tensor | RoundedRows, part: tuple[slice, slice]) -> Tensor | RoundedRows:
    """Some rows of x [batch, tokens, k]: a view."""
    return x[part] if isinstance(x, Tensor) else x._replace(numbers=x.numbers[part], scales=x.scales[part])


def multiply(
    x: Tensor | RoundedRows,
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
    """`linear`, or `linear_int8` or `linear_int4` where the weight is of integers. x may be rows that were rounded for it, by
    `rows_for`."""
    options: Any = {
        "activation": activation,
        "residual": residual,
        "gate": gate,
        "scale": scale,
        "saturate": saturate,
        "out_dtype": out_dtype,
        "policy": policy,
    }
    if isinstance(weight, IntegerMatrix):
        return weight.ops.linear(x, weight.numbers, weight.scales, bias, rotation=_left_to_turn(x, weight), **options)
    return linear(_halves(x), weight, bias, **options)


def multiply_(
    out: Tensor,
    x: Tensor | RoundedRows,
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
    if isinstance(weight, IntegerMatrix):
        weight.ops.linear_(out, x, weight.numbers, weight.scales, bias, rotation=_left_to_turn(x, weight), **options)
    else:
        linear_(out, _halves(x), weight, bias, **options)


def multiply_pair(
    x: Tensor | RoundedRows,
    weight: Matrix,
    up: Matrix | None = None,
    *,
    activation: Activation = "silu",
    scale: float = 1.0,
    saturate: bool = False,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """activation(x @ weight^T) * (x @ up^T) * scale: `linear_pair`, or `linear_int8_pair` or `linear_int4_pair` for weights of
    integers. weight may be both, [2 n, k], the gate's rows first."""
    options: Any = {"activation": activation, "scale": scale, "saturate": saturate, "policy": policy}
    if (pair := _alike(weight, up)) is not None:
        first, second = pair
        return first.ops.pair(x, *first[:2], *second[:2], rotation=_left_to_turn(x, first), **options)
    if isinstance(weight, IntegerMatrix) or isinstance(up, IntegerMatrix):
        return silu_mul(*_unlike(x, weight, up, activation, scale, policy), saturate=saturate, policy=policy)
    return linear_pair(_halves(x), weight, up, **options)


def multiply_pair_(
    out: Tensor, x: Tensor | RoundedRows, weight: Matrix, *, saturate: bool = False, policy: KernelPolicy = STANDARD
) -> None:
    """`multiply_pair` with SiLU of one weight, [2 n, k], written to `out`, [batch, ..., n] with rows anywhere."""
    if (pair := _alike(weight)) is not None:
        first, second = pair
        turn = _left_to_turn(x, first)
        first.ops.pair_(out, x, *first[:2], *second[:2], rotation=turn, saturate=saturate, policy=policy)
    else:
        assert isinstance(weight, Tensor)  # the halves of one weight of integers are alike
        linear_pair_(out, _halves(x), weight, saturate=saturate, policy=policy)


def multiplied_together(weight: Matrix, up: Matrix) -> bool:
    """Whether one kernel multiplies both weights of a pair as integers: then x may be rounded before."""
    return _alike(weight, up) is not None


def _alike(weight: Matrix, up: Matrix | None = None) -> tuple[IntegerMatrix, IntegerMatrix] | None:
    """Both weights of a pair, if one kernel multiplies them as integers: those that one rounding of x serves."""
    if up is None:
        half = weight.shape[0] // 2
        first, second = rows_of(weight, 0, half), rows_of(weight, half, 2 * half)
    else:
        first, second = weight, up
    if not (isinstance(first, IntegerMatrix) and isinstance(second, IntegerMatrix)):
        return None
    turned_alike = (first.rotation, first.bits) == (second.rotation, second.bits)
    return (first, second) if turned_alike and first.scales.numel() == second.scales.numel() else None


def _unlike(
    x: Tensor | RoundedRows, weight: Matrix, up: Matrix | None, activation: str, scale: float, policy: KernelPolicy
) -> list[Tensor]:
    """Two products of unlike numbers, rounded to fp16."""
    if activation != "silu" or scale != 1:
        raise ValueError(f"a pair of unlike numbers has activation silu and no scale, not {activation} and {scale}")
    return [multiply(x, one, policy=policy) for one in (weight, up) if one is not None]


def _left_to_turn(x: Tensor | RoundedRows, weight: IntegerMatrix) -> int:
    return weight.rotation if isinstance(x, Tensor) else 0


def _halves(x: Tensor | RoundedRows) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"a weight of halves cannot be multiplied with {type(x).__name__}")
    return x
