"""Boxes of rows: what a strided copy reads and writes. The structs mirror Part and Divisor of src/layout.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_uint
from dataclasses import dataclass

from ..launcher import parameter_struct

PACK = 8  # kPack

Divisor = parameter_struct("Divisor", (c_int64, "value"), (c_uint, "multiplier"), (c_int, "shift"))
Part = parameter_struct("Part", (c_int64, "from_a from_b from_c to_a to_b to_c count"), (Divisor, "units_per_row b c"))


def divisor(value: int) -> ctypes.Structure:
    """A division by a known number as a multiplication: exact for every dividend below 2^31.

    multiplier = ceil(2^(31 + shift) / value) with 2^shift >= value exceeds the exact quotient by less than 1, which
    moves the result by less than dividend / 2^(31 + shift) < 1 / value: too little to reach the next whole number.
    """
    value = max(value, 1)
    shift = (value - 1).bit_length()
    multiplier = -(-(1 << (31 + shift)) // value) if value < 2**31 else 0  # larger ones never take this way
    return Divisor(value=value, multiplier=multiplier, shift=shift)


@dataclass(frozen=True)
class Box:
    """One part: [a, b, c] rows of `width` elements, the strides of what is read and of what is written."""

    sizes: tuple[int, int, int]
    width: int
    source: tuple[int, int, int]
    target: tuple[int, int, int]

    @property
    def rows(self) -> int:
        a, b, c = self.sizes
        return a * b * c

    @property
    def in_packs(self) -> bool:
        strides = (s for n, *both in zip(self.sizes, self.source, self.target, strict=True) if n > 1 for s in both)
        return self.width % PACK == 0 and all(s % PACK == 0 for s in strides)

    def part(self, unit: int) -> ctypes.Structure:
        per_row = self.width // unit
        names = ("from_a", "from_b", "from_c", "to_a", "to_b", "to_c")
        return Part(
            count=self.rows * per_row,
            units_per_row=divisor(per_row),
            b=divisor(self.sizes[1]),
            c=divisor(self.sizes[2]),
            **dict(zip(names, (*self.source, *self.target), strict=True)),
        )


def triple(values: Sequence[int], fill: int) -> tuple[int, int, int]:
    a, b, c = [fill] * (3 - len(values)) + list(values)
    return a, b, c
