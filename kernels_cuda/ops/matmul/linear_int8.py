"""linear_int8, linear_int8_pair and their twins: products of 8-bit numbers. What they take stands in integer_linear.py; the
maths and the layout at the head of src/linear_int8.cu."""

from __future__ import annotations

from ...policy import IsaClass
from ..quant.rows_to_int8 import Int8Rows, rows_to_int8
from .integer_linear import IntegerLinear
from .integer_operands import KitchenLinear
from .linear import Cut

CUTS: dict[Cut, dict[IsaClass, float]] = {
    Cut(128, 128): {"sm_80": 0.96, "sm_75": 0.97, "sm_61": 1.0},
    Cut(192, 128, 96): {"sm_80": 1.0, "sm_75": 0.55},
    Cut(128, 256): {"sm_80": 0.96, "sm_75": 1.0, "sm_61": 0.89},
    Cut(64, 128): {"sm_80": 0.9, "sm_75": 0.73, "sm_61": 0.99},
}
INT8 = IntegerLinear("linear_int8", CUTS, rows_to_int8, Int8Rows, KitchenLinear())

linear_int8, linear_int8_ = INT8.linear, INT8.linear_
linear_int8_pair, linear_int8_pair_ = INT8.pair, INT8.pair_
