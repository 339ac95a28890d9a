"""A weight as a matrix of halves or of 8-bit numbers, and the product that takes either.

What is multiplied with it, and what is done to the result, is the same; so is whoever has a weight and does not want to know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..policy import STANDARD, KernelPolicy
from .linear import Activation, linear, linear_
from .linear_int8 import linear_int8, linear_int8_
from .rows_to_int8 import Int8Rows


class Int8Matrix(NamedTuple):
    """A weight's rows, rounded to 8 bits."""

    numbers: Tensor  # [n, k] int8
    scales: Tensor  # fp32: one element, or one for each row
    rotation: int  # the group in which the rows were turned before, 0 if they were not

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape


Matrix = Tensor | Int8Matrix  # [n, k]


def multiply(
    x: Tensor | Int8Rows,
    weight: Matrix,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float = 1.0,
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
    policy: KernelPolicy = STANDARD,
) -> None:
    """`multiply`, written to `out` as `linear_` does. The residual may be `out` itself."""
    options: Any = {"activation": activation, "residual": residual, "gate": gate, "scale": scale, "policy": policy}
    if isinstance(weight, Int8Matrix):
        linear_int8_(out, x, weight.numbers, weight.scales, bias, rotation=_left_to_turn(x, weight), **options)
    else:
        linear_(out, _halves(x), weight, bias, **options)


def _left_to_turn(x: Tensor | Int8Rows, weight: Int8Matrix) -> int:
    return 0 if isinstance(x, Int8Rows) else weight.rotation


def _halves(x: Tensor | Int8Rows) -> Tensor:
    if isinstance(x, Int8Rows):
        raise TypeError("a weight of halves cannot be multiplied with rows of 8-bit numbers")
    return x
