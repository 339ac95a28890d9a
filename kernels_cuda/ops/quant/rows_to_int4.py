"""rows_to_int4: activations and weights as 4-bit numbers with a scale for each row, turned by Hadamard matrices if asked.

The maths, the layout and the access pattern stand at the head of src/integer_rows.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...policy import STANDARD, KernelPolicy
from .integer_rows import IntegerRows

INT4_ROWS = IntegerRows("rows_to_int4", 7, 2)


class Int4Rows(NamedTuple):
    """Rows of 4-bit numbers, two to a byte, and what to multiply those of a row with."""

    numbers: Tensor  # [..., k / 2] int8
    scales: Tensor  # [...] fp32


def rows_to_int4(x: Tensor, *, rotation: int = 0, policy: KernelPolicy = STANDARD) -> Int4Rows:
    """x' = x, or x times a Hadamard matrix for each `rotation` neighbours; then round(x' / scale), scale = max |x'| / 7.

    x         [..., k] fp16 or bf16; rows may be anywhere, their elements adjacent
    rotation  0, 4, 16, 64 or 256, which divides k: a weight's rows and those of what it multiplies must be turned alike

    Of two neighbours the first has the lower bits of their byte, as in files of `convrot_w4a4`; -8 is never made.
    A row with an Inf or NaN in it has the scale NaN, and zeros. A row of zeros has the scale 1. The scale of others is
    that of max |x'| = 2^-121 at least.
    """
    numbers, scales = ROWS_TO_INT4((x,), (rotation,), policy)
    return Int4Rows(numbers, scales)


ROWS_TO_INT4 = INT4_ROWS.op
