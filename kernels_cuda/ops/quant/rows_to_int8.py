"""rows_to_int8: activations and weights as 8-bit numbers with a scale for each row, turned by Hadamard matrices if asked.

The maths, the layout and the access pattern stand at the head of src/integer_rows.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...policy import STANDARD, KernelPolicy
from .integer_rows import IntegerRows

LARGEST = 127
INT8_ROWS = IntegerRows("rows_to_int8", LARGEST)


class Int8Rows(NamedTuple):
    """Rows of 8-bit numbers, and what to multiply those of a row with."""

    numbers: Tensor  # [..., k] int8
    scales: Tensor  # [...] fp32


def rows_to_int8(x: Tensor, *, rotation: int = 0, policy: KernelPolicy = STANDARD) -> Int8Rows:
    """x' = x, or x times a Hadamard matrix for each `rotation` neighbours; then round(x' / scale), scale = max |x'| / 127.

    x         [..., k] fp16 or bf16; rows may be anywhere, their elements adjacent
    rotation  0, 4, 16, 64 or 256, which divides k: a weight's rows and those of what it multiplies must be turned alike

    A row with an Inf or NaN in it has the scale NaN, and zeros. A row of zeros has the scale 1. The scale of others is
    that of max |x'| = 2^-121 at least.
    """
    numbers, scales = ROWS_TO_INT8((x,), (rotation,), policy)
    return Int8Rows(numbers, scales)


ROWS_TO_INT8 = INT8_ROWS.op
