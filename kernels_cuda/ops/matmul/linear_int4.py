"""linear_int4, linear_int4_pair and their twins: products of 4-bit numbers, two to a byte. What they take stands in
integer_linear.py; the maths and the layout at the head of src/linear_int4.cu."""

from __future__ import annotations

from ...policy import IsaClass
from ..quant.rows_to_int4 import Int4Rows, rows_to_int4
from .integer_linear import IntegerLinear
from .linear import Cut

CUTS: dict[Cut, dict[IsaClass, float]] = {
    Cut(128, 128): {"sm_80": 0.96, "sm_75": 0.97, "sm_61": 1.0},
    Cut(192, 128, 96): {"sm_80": 1.0, "sm_75": 0.55},
    Cut(128, 256): {"sm_80": 0.96, "sm_75": 1.0, "sm_61": 0.89},
    Cut(64, 128): {"sm_80": 0.9, "sm_75": 0.73, "sm_61": 0.99},
}
INT4 = IntegerLinear("linear_int4", CUTS, rows_to_int4, Int4Rows)

linear_int4, linear_int4_ = INT4.linear, INT4.linear_
linear_int4_pair, linear_int4_pair_ = INT4.pair, INT4.pair_
