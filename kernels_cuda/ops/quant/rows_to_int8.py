"""rows_to_int8: activations and weights as 8-bit numbers with a scale for each row, turned by Hadamard matrices if asked.

The maths, the layout and the access pattern stand at the head of src/rows_to_int8.cu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int, c_int64
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...call import Call, Plan
from ...launcher import MAX_GRID, Card, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import wrong_dtype
from ..views.rows import folded, row_class, row_view, rows
from .rotation import check_rotation, matrix, root, turned

PACK = 8  # kPack
LARGEST = 127
# Packs of a thread, and threads of a block at most: which rows a kernel holds.
BLOCKS = {1: 256, 2: 512, 4: 1024}
WIDEST = max(packs * threads for packs, threads in BLOCKS.items()) * PACK


class Int8Rows(NamedTuple):
    """Rows of 8-bit numbers, and what to multiply those of a row with."""

    numbers: Tensor  # [..., k] int8
    scales: Tensor  # [...] fp32


def rows_to_int8(x: Tensor, *, rotation: int = 0, policy: KernelPolicy = STANDARD) -> Int8Rows:
    """x' = x, or x times a Hadamard matrix for each `rotation` neighbours; then round(x' / scale), scale = max |x'| / 127.

    x         [..., k] fp16; rows may be anywhere, their elements adjacent
    rotation  0, 4, 16, 64 or 256, which divides k: a weight's rows and those of what it multiplies must be turned alike

    A row with an Inf or NaN in it has the scale NaN, and zeros. A row of zeros has the scale 1.
    """
    numbers, scales = ROWS_TO_INT8((x,), (rotation,), policy)
    return Int8Rows(numbers, scales)


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(x: Tensor, rotation: int) -> tuple[Tensor, Tensor]:
    """The kernel's bits, in fp32; for float64 inputs in float64."""
    wide = turned(x.to(torch.promote_types(x.dtype, torch.float32)), rotation)
    most = wide.abs().amax(-1, keepdim=True)
    finite = most.isfinite()
    top = torch.where(most == 0, LARGEST / root(rotation), most)
    # A tensor, because torch divides by a number by multiplying with a rounded reciprocal.
    largest = torch.full_like(top, LARGEST)
    inverse = torch.where(finite, largest / top, torch.zeros_like(top))
    numbers = torch.nan_to_num(wide * inverse, 0, 0, 0).round().to(torch.int8)
    scales = torch.where(finite, top * (root(rotation) / LARGEST), math.nan)
    return numbers.contiguous(), scales.squeeze(-1).float().contiguous()


def stock(x: Tensor, rotation: int) -> tuple[Tensor, Tensor]:
    """As stock rounds activations, in x's own type; but rows of zeros and rows that are not finite as this op has them, since
    `auto` may choose it."""
    if rotation:
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // rotation, rotation)
        x = (groups @ matrix(rotation, x.dtype, x.device)).reshape(x.shape)
    most = x.abs().amax(-1, keepdim=True).float()
    finite = most.isfinite()
    scales = torch.where(most == 0, torch.ones_like(most), most / LARGEST)
    numbers = torch.nan_to_num(torch.where(finite, x.float() / scales, 0.0), 0, 0, 0).round().to(torch.int8)
    return numbers.contiguous(), torch.where(finite, scales, math.nan).squeeze(-1).contiguous()


def fake(x: Tensor, rotation: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - x says it all
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors RowsToInt8Params in src/rows_to_int8.cu.
RowsToInt8Params = parameter_struct(
    "RowsToInt8Params", (Pointer, "x x8 scales"), (c_int64, "x_batch x_row"), (c_int, "k group")
)


@dataclass(frozen=True)
class Block:
    """How rows of k are held: packs of a thread, and threads."""

    packs: int
    threads: int

    @staticmethod
    def of(k: int) -> Block:
        for packs, most in BLOCKS.items():
            threads = -(-k // (PACK * packs * 32)) * 32
            if threads <= most:
                return Block(packs, threads)
        raise ValueError(f"rows of {k} exceed {WIDEST}")


def validate(call: Call) -> None:
    """Shapes that no implementation could serve."""
    x = call.first
    if x.ndim == 0 or not x.shape[-1]:
        raise ValueError(f"x: {list(x.shape)} has no rows with elements")
    check_rotation(call.options[0], x.shape[-1])


def obstacles(call: Call) -> Iterator[str]:
    x = call.first
    yield from wrong_dtype((torch.float16,), x=x)
    yield from row_obstacles(x)


def row_obstacles(x: Tensor) -> Iterator[str]:
    """What keeps the kernel from fp16 rows."""
    k = x.shape[-1]
    if k % PACK:
        yield f"k is {k}, the kernel takes multiples of {PACK}"
    if k > WIDEST:
        yield f"k is {k}, the kernel holds rows of {WIDEST} at most"
    view = rows(x if x.ndim > 1 else x[None])
    if isinstance(view, str):
        yield f"x: {view}"
    elif x.data_ptr() % 16 or view.row_stride % PACK or view.batch_stride % PACK:
        yield f"x: rows do not start at multiples of 16 bytes (strides {x.stride()})"
    elif folded(view).batches > MAX_GRID[1]:
        yield f"{view.batches} batches exceed a grid"


def prepare(card: Card, x: Tensor, rotation: int, describe: str) -> Plan:
    """What rounds tensors of x's shape and strides: to numbers and scales."""
    view = folded(row_view(x if x.ndim > 1 else x[None]))
    launches = []
    if x.numel():
        block = Block.of(view.d)
        params = RowsToInt8Params(k=view.d, group=rotation, **view.places("x"))
        kernel = card.kernel("rows_to_int8", f"rows_to_int8_{block.packs}")
        grid = (view.tokens, view.batches, 1)
        launches = [kernel.prepare(params, grid=grid, block=block.threads, shape=describe)]
    new_numbers = output(x.shape, torch.int8, card.index)
    new_scales = output(x.shape[:-1], torch.float32, card.index)
    return plan_of(launches, "x", (x,), x8=new_numbers, scales=new_scales)


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    return prepare(card, call.first, call.options[0], call.describe())


def shape_class(call: Call) -> str:
    return f"{row_class(call.first)} rotation {call.options[0]}"


KERNELS = {"rows_to_int8": tuple(f"rows_to_int8_{packs}" for packs in BLOCKS)}

ROWS_TO_INT8 = Op(
    name="rows_to_int8",
    schema="(Tensor x, int rotation, str policy) -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)
