"""When products are of integers: the rule, for whoever has a weight and rows to multiply it with.

A tier is a permission: `turbo` for every weight, `auto` for those that the file has in 8 or 4 bits. What would gain nothing, or has
a size that the kernels do not take, stays in FP16, and nobody is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...binary.arch import int8_pays
from ...policy import KernelPolicy
from ..quant.integer_rows import TYPES, WIDEST
from ..quant.rotation import GROUPS
from .integer_product import BYTES, COLUMNS, LONGEST

# Whoever switches one of these off wants no product of such integers: of `linear` he asked for what stock computes, in FP16.
OPS = {bits: ("linear", "linear_", f"linear_int{bits}", f"linear_int{bits}_") for bits in (8, 4)}
FORCED = {bits: f"linear_int{bits}" for bits in OPS}

# Of x, where the weight must be rounded first, at each use. That moves 3 bytes for each of its elements, 2 read and 1 written: in
# that time 8 bits gain what they gain, over FP16 with half sums, in the products of so many rows. By the cards' sheets 380 of an
# RTX 2060 Super, 430 of a 3060, 700 of a 5090, 980 of a 4090; below, a product in 8 bits would be the slower one.
LEAST_ROWS = 1024


def multiplies_integers(
    x: Tensor, shape: Sequence[int], policy: KernelPolicy, *, rounds: bool, is_stored: bool = False, bits: int = 8
) -> bool:
    """Whether x [..., k] and a weight of this shape, [n, k], shall be multiplied by `linear_int8`, or of 4 bits by `linear_int4`.

    rounds     whether the weight is none of integers yet. One that is needs no number of rows: made FP16, it would move more
    is_stored  whether its file has it in integers: what a LoRA changes is rounded anew, and was of integers all the same
    bits       of the integers that would be multiplied

    With mode `on` always, whatever the card and the size; the op says then why it cannot. On the CPU, where the references compute,
    as on a card that gains.
    """
    permitted = policy.int8_products
    if permitted == "never" or (permitted == "as stored" and not is_stored):
        return False
    if any(policy.mode(op) == "off" for op in OPS[bits]):
        return False
    if policy.mode(FORCED[bits]) == "on":
        return True
    enough = not rounds or x.shape[:-1].numel() >= LEAST_ROWS
    pays = not x.is_cuda or int8_pays(_capability(x.get_device()), is_stored=not rounds)
    return serves_integers(x, shape, bits) and enough and pays


def serves_integers(x: Tensor, shape: Sequence[int], bits: int = 8) -> bool:
    """Whether the kernels take x [..., k] and a weight of this shape, [n, k]: their types and sizes."""
    n, k = shape
    return x.dtype in TYPES and n % COLUMNS == 0 and k % (BYTES * 8 // bits) == 0 and 0 < k <= min(LONGEST, WIDEST)


def best_rotation(k: int) -> int:
    """In which groups a weight's rows of k are best turned before they are rounded: the largest that divides them, for outliers
    spread over more neighbours are smaller. Measured, of a whole block: 0.55 % error, against 0.94 % where nothing was turned."""
    return max((group for group in GROUPS if k % group == 0), default=0)


@lru_cache(maxsize=16)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
