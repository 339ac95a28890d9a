"""linear_int8, linear_int4, their pairs and twins: `linear` with both matrices of integers, a scale for each row of either.

The maths and the layout stand at the heads of src/linear_int8.cu and src/linear_int4.cu; what is launched and what else can
compute it in integer_product.py and integer_operands.py. How many bits the numbers have decides the kernels, and how x is rounded:
one `IntegerLinear` for each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...call import Candidate
from ...policy import STANDARD, IsaClass, KernelPolicy
from ..quant.rows_to_int4 import Int4Rows
from ..quant.rows_to_int8 import Int8Rows
from .integer_product import IntegerProduct
from .linear import Activation, Cut

RoundedRows = Int8Rows | Int4Rows


class IntegerLinear:
    """The products of integers of one size."""

    def __init__(
        self,
        unit: str,
        cuts: dict[Cut, dict[IsaClass, float]],
        round_rows: Callable[..., RoundedRows],
        rows: type[RoundedRows],
        *others: Candidate,
    ) -> None:
        """unit: the op's name. round_rows: what rounds x, and the type of the result. others: candidates of the single product
        beside our kernel and torch's own operations."""
        self.product = IntegerProduct(unit, cuts)
        self.round_rows = round_rows
        self.rows = rows
        self.op = self.product.op(*others)
        self.op_into = self.op.into(f"{unit}_")
        self.pair_op = self.product.pair()
        self.pair_op_into = self.pair_op.into(f"{unit}_pair_")

    def linear(
        self,
        x: Tensor | RoundedRows,
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
        """residual + gate * activation(scale * (x' @ weight^T) * x_scale * weight_scale + bias), each part optional.

        x             [batch, ..., k] fp16 or bf16, rounded to x' with a scale for each row; or what `rows_to_int8` or
                      `rows_to_int4` made of it, if several products have the same input
        weight        int8, rows may be apart: [n, k]; of 4 bits [n, k / 2], two numbers to a byte as `rows_to_int4` packs them
        weight_scale  fp32: one element, or one for each row of the weight ([n] or [n, 1])
        rotation      the group in which the weight's rows were turned before they were rounded, 0 if they were not: x is turned
                      alike. Rows that are rounded already were turned then
        The rest is as `linear` has it, fp16 or fp32; or bf16 or fp32, and then the result may be bf16. It is of x's type where
        nothing else says so, of rows that are rounded already fp16. The sums are exact; all that follows is fp32, and rounded
        once.
        """
        tensors = (*self._given(x), weight, weight_scale, bias, residual, gate)
        out: Tensor = self.op(tensors, (activation, scale, saturate, rotation, out_dtype), policy)
        return out

    def linear_(
        self,
        out: Tensor,
        x: Tensor | RoundedRows,
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
        """`linear`, written to `out`, [batch, ..., n] fp16, bf16 or fp32 with rows anywhere. The residual may be `out` itself."""
        tensors = (out, *self._given(x), weight, weight_scale, bias, residual, gate)
        self.op_into(tensors, (activation, scale, saturate, rotation), policy)

    def pair(
        self,
        x: Tensor | RoundedRows,
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

        weight, up              as `linear` has the weight, with equal strides: of one tensor, or of two
        weight_scale, up_scale  fp32, as many of each: one element, or one for each row
        The rest is as `linear` has it.
        """
        tensors = (*self._given(x), weight, weight_scale, up, up_scale)
        out: Tensor = self.pair_op(tensors, (activation, scale, saturate, rotation, out_dtype), policy)
        return out

    def pair_(
        self,
        out: Tensor,
        x: Tensor | RoundedRows,
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
        """`pair`, written to `out`, [batch, ..., n] fp16, bf16 or fp32 with rows anywhere."""
        tensors = (out, *self._given(x), weight, weight_scale, up, up_scale)
        self.pair_op_into(tensors, (activation, scale, saturate, rotation), policy)

    def _given(self, x: Tensor | RoundedRows) -> tuple[Tensor, Tensor | None]:
        """x, and the scales of rows that are rounded already."""
        if isinstance(x, Tensor):
            return x, None
        if not isinstance(x, self.rows):
            raise TypeError(
                f"{self.product.unit} multiplies rows that are {self.rows.__name__}, not {type(x).__name__}"
            )
        return x.numbers, x.scales
