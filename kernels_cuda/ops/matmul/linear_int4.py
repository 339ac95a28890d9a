"""linear_int4, linear_int4_pair and their twins: `linear` with both matrices in 4 bits, a scale for each row of either.

The maths and the layout stand at the head of src/linear_int4.cu; what is launched and what else can compute it in
integer_product.py and integer_operands.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...policy import STANDARD, IsaClass, KernelPolicy
from ..quant.rows_to_int4 import Int4Rows
from .integer_product import IntegerProduct
from .linear import Activation, Cut

CUTS: dict[Cut, dict[IsaClass, float]] = {
    Cut(128, 128): {"sm_80": 0.96, "sm_75": 0.97},
    Cut(128, 256): {"sm_80": 0.96, "sm_75": 1.0},
    Cut(64, 128): {"sm_80": 0.9, "sm_75": 0.73},
}


def linear_int4(
    x: Tensor | Int4Rows,
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
    """residual + gate * activation(scale * (x4 @ weight^T) * x_scale * weight_scale + bias), each part optional.

    x             [batch, ..., k] fp16, rounded to x4 with a scale for each row; or what `rows_to_int4` made of it, if several
                  products have the same input
    weight        [n, k / 2] int8, two numbers to a byte as `rows_to_int4` packs them, rows may be apart
    weight_scale  fp32: one element, or one for each row of the weight ([n] or [n, 1])
    rotation      the group in which the weight's rows were turned before they were rounded, 0 if they were not: x is turned
                  alike. Rows that are rounded already were turned then
    The rest is as `linear` has it. The sums are exact; all that follows is fp32, and rounded once.
    """
    numbers, scales = x if isinstance(x, Int4Rows) else (x, None)
    tensors = (numbers, scales, weight, weight_scale, bias, residual, gate)
    out: Tensor = LINEAR_INT4(tensors, (activation, scale, saturate, rotation, out_dtype), policy)
    return out


def linear_int4_(
    out: Tensor,
    x: Tensor | Int4Rows,
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
    """`linear_int4`, written to `out`, [batch, ..., n] fp16 or fp32 with rows anywhere. The residual may be `out` itself."""
    numbers, scales = x if isinstance(x, Int4Rows) else (x, None)
    tensors = (out, numbers, scales, weight, weight_scale, bias, residual, gate)
    LINEAR_INT4_(tensors, (activation, scale, saturate, rotation), policy)


def linear_int4_pair(
    x: Tensor | Int4Rows,
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

    weight, up              [n, k / 2] int8 each, with equal strides: of one tensor, or of two
    weight_scale, up_scale  fp32, as many of each: one element, or one for each row
    The rest is as `linear_int4` has it.
    """
    numbers, scales = x if isinstance(x, Int4Rows) else (x, None)
    tensors = (numbers, scales, weight, weight_scale, up, up_scale)
    out: Tensor = LINEAR_INT4_PAIR(tensors, (activation, scale, saturate, rotation, out_dtype), policy)
    return out


def linear_int4_pair_(
    out: Tensor,
    x: Tensor | Int4Rows,
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
    """`linear_int4_pair`, written to `out`, [batch, ..., n] fp16 or fp32 with rows anywhere."""
    numbers, scales = x if isinstance(x, Int4Rows) else (x, None)
    tensors = (out, numbers, scales, weight, weight_scale, up, up_scale)
    LINEAR_INT4_PAIR_(tensors, (activation, scale, saturate, rotation), policy)


PRODUCT = IntegerProduct("linear_int4", CUTS)
LINEAR_INT4 = PRODUCT.op()
LINEAR_INT4_ = LINEAR_INT4.into("linear_int4_")
LINEAR_INT4_PAIR = PRODUCT.pair()
LINEAR_INT4_PAIR_ = LINEAR_INT4_PAIR.into("linear_int4_pair_")
