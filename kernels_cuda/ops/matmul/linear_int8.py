"""linear_int8, linear_int8_pair and their twins: `linear` with both matrices in 8 bits, a scale for each row of either.

The maths and the layout stand at the head of src/linear_int8.cu; what is launched and what else can compute it in
integer_product.py and integer_operands.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...policy import STANDARD, IsaClass, KernelPolicy
from ..quant.rows_to_int8 import Int8Rows
from .integer_operands import KitchenLinear
from .integer_product import IntegerProduct
from .linear import Activation, Cut

CUTS: dict[Cut, dict[IsaClass, float]] = {
    Cut(128, 128): {"sm_80": 0.96, "sm_75": 0.97},
    Cut(192, 128, 96): {"sm_80": 1.0, "sm_75": 0.55},
    Cut(128, 256): {"sm_80": 0.96, "sm_75": 1.0},
    Cut(64, 128): {"sm_80": 0.9, "sm_75": 0.73},
}


def linear_int8(
    x: Tensor | Int8Rows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    rotation: int = 0,
    activation: Activation = "none",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float = 1.0,
    saturate: bool = False,
    out_dtype: torch.dtype | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """residual + gate * activation(scale * (x8 @ weight^T) * x_scale * weight_scale + bias), each part optional.

    x             [batch, ..., k] fp16, rounded to x8 with a scale for each row; or what `rows_to_int8` made of it, if several
                  products have the same input
    weight        [n, k] int8, rows may be apart
    weight_scale  fp32: one element, or one for each row of the weight ([n] or [n, 1])
    rotation      the group in which the weight's rows were turned before they were rounded, 0 if they were not: x is turned
                  alike. Rows that are rounded already were turned then
    The rest is as `linear` has it. The sums are exact; all that follows is fp32, and rounded once.
    """
    numbers, scales = x if isinstance(x, Int8Rows) else (x, None)
    tensors = (numbers, scales, weight, weight_scale, bias, residual, gate)
    out: Tensor = LINEAR_INT8(tensors, (activation, scale, saturate, rotation, out_dtype), policy)
    return out


def linear_int8_(
    out: Tensor,
    x: Tensor | Int8Rows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    rotation: int = 0,
    activation: Activation = "none",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float = 1.0,
    saturate: bool = False,
    policy: KernelPolicy = STANDARD,
) -> None:
    """`linear_int8`, written to `out`, [batch, ..., n] fp16 or fp32 with rows anywhere. The residual may be `out` itself."""
    numbers, scales = x if isinstance(x, Int8Rows) else (x, None)
    tensors = (out, numbers, scales, weight, weight_scale, bias, residual, gate)
    LINEAR_INT8_(tensors, (activation, scale, saturate, rotation), policy)


def linear_int8_pair(
    x: Tensor | Int8Rows,
    weight: Tensor,
    weight_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    *,
    rotation: int = 0,
    activation: Activation = "silu",
    scale: float = 1.0,
    saturate: bool = False,
    out_dtype: torch.dtype | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """activation(x @ weight^T) * (x @ up^T) * scale, as `linear_pair` has it: neither product is ever rounded to fp16.

    weight, up              [n, k] int8 each, with equal strides: of one tensor, or of two
    weight_scale, up_scale  fp32, as many of each: one element, or one for each row
    The rest is as `linear_int8` has it.
    """
    numbers, scales = x if isinstance(x, Int8Rows) else (x, None)
    tensors = (numbers, scales, weight, weight_scale, up, up_scale)
    out: Tensor = LINEAR_INT8_PAIR(tensors, (activation, scale, saturate, rotation, out_dtype), policy)
    return out


def linear_int8_pair_(
    out: Tensor,
    x: Tensor | Int8Rows,
    weight: Tensor,
    weight_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    *,
    rotation: int = 0,
    activation: Activation = "silu",
    scale: float = 1.0,
    saturate: bool = False,
    policy: KernelPolicy = STANDARD,
) -> None:
    """`linear_int8_pair`, written to `out`, [batch, ..., n] fp16 or fp32 with rows anywhere."""
    numbers, scales = x if isinstance(x, Int8Rows) else (x, None)
    tensors = (out, numbers, scales, weight, weight_scale, up, up_scale)
    LINEAR_INT8_PAIR_(tensors, (activation, scale, saturate, rotation), policy)


PRODUCT = IntegerProduct("linear_int8", CUTS)
LINEAR_INT8 = PRODUCT.op(KitchenLinear())
LINEAR_INT8_ = LINEAR_INT8.into("linear_int8_")
LINEAR_INT8_PAIR = PRODUCT.pair()
LINEAR_INT8_PAIR_ = LINEAR_INT8_PAIR.into("linear_int8_pair_")
