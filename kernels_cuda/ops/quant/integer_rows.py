"""Rows of halves or bf16 as rows of integers with a scale for each: what rows_to_int8 and rows_to_int4 share.

The maths, the layout and the access pattern stand at the head of src/integer_rows.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from ...call import Call, Plan
from ...launcher import MAX_GRID, Card, Pointer, output, parameter_struct
from ...plans import plan_of
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import wrong_dtype
from ..views.rows import folded, row_class, row_view, rows
from .rotation import check_rotation, matrix, root, turned

PACK = 8  # kPack
SMALLEST = 2.0**-121  # kSmallest: the largest of the numbers over it is still a float
TYPES = {torch.float16: "", torch.bfloat16: "bf16_"}  # and what they put into a kernel's name
# Packs of a thread, and threads of a block at most: which rows a kernel holds.
BLOCKS = {1: 256, 2: 512, 4: 1024}
WIDEST = max(packs * threads for packs, threads in BLOCKS.items()) * PACK

# Mirrors IntegerRowsParams in src/integer_rows.cuh.
IntegerRowsParams = parameter_struct(
    "IntegerRowsParams", (Pointer, "x numbers scales"), (c_int64, "x_batch x_row"), (c_int, "k group")
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


def packed(numbers: Tensor) -> Tensor:
    """[..., k] numbers of 4 bits as [..., k / 2] int8: of two neighbours the first has the lower bits."""
    first, second = (numbers[..., i::2].to(torch.int32) & 15 for i in (0, 1))
    return (first | second << 4).to(torch.uint8).view(torch.int8)


def unpacked(numbers: Tensor) -> Tensor:
    """The way back: [..., k / 2] bytes as [..., k] int8."""
    first, second = (numbers << 4) >> 4, numbers >> 4  # of int8: the sign stays
    return torch.stack((first, second), -1).flatten(-2)


@dataclass(frozen=True)
class IntegerRows:
    """How rows are rounded: to how large numbers, and how many of them a byte has."""

    unit: str  # the op's name, and its kernels'
    largest: int
    in_byte: int = 1

    @property
    def op(self) -> Op:
        return Op(
            name=self.unit,
            schema="(Tensor x, int rotation, str policy) -> (Tensor, Tensor)",
            reference=self.reference,
            fake=self.fake,
            candidates=(CudaCandidate("cuda", self.obstacles, self.plan), StockCandidate(self.stock)),
            shape_class=shape_class,
            validate=self.validate,
            kernels={self.unit: tuple(f"{self.unit}_{name}{packs}" for name in TYPES.values() for packs in BLOCKS)},
        )

    def stored(self, numbers: Tensor) -> Tensor:
        return (packed(numbers) if self.in_byte > 1 else numbers).contiguous()

    def bytes_as_numbers(self, stored: Tensor) -> Tensor:
        return unpacked(stored) if self.in_byte > 1 else stored

    def stored_shape(self, x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:-1], x.shape[-1] // self.in_byte)

    # ----------------------------------------------------------------------------------------------------- the maths

    def reference(self, x: Tensor, rotation: int) -> tuple[Tensor, Tensor]:
        """The kernel's bits, in fp32; for float64 inputs in float64."""
        wide = turned(x.to(torch.promote_types(x.dtype, torch.float32)), rotation)
        most = wide.abs().amax(-1, keepdim=True)
        finite = most.isfinite()
        top = torch.where(most == 0, self.largest / root(rotation), most.clamp(min=SMALLEST))
        # A tensor, because torch divides by a number by multiplying with a rounded reciprocal.
        largest = torch.full_like(top, self.largest)
        inverse = torch.where(finite, largest / top, torch.zeros_like(top))
        numbers = torch.nan_to_num(wide * inverse, 0, 0, 0).round().to(torch.int8)
        scales = torch.where(finite, top * (root(rotation) / self.largest), math.nan)
        return self.stored(numbers), scales.squeeze(-1).float().contiguous()

    def stock(self, x: Tensor, rotation: int) -> tuple[Tensor, Tensor]:
        """As stock rounds activations, in x's own type; but rows of zeros and rows that are not finite as this op has them,
        since `auto` may choose it."""
        if rotation:
            groups = x.reshape(*x.shape[:-1], x.shape[-1] // rotation, rotation)
            x = (groups @ matrix(rotation, x.dtype, x.device)).reshape(x.shape)
        most = x.abs().amax(-1, keepdim=True).float()
        finite = most.isfinite()
        scales = torch.where(most == 0, torch.ones_like(most), most / self.largest)
        numbers = torch.nan_to_num(torch.where(finite, x.float() / scales, 0.0), 0, 0, 0).round().to(torch.int8)
        return self.stored(numbers), torch.where(finite, scales, math.nan).squeeze(-1).contiguous()

    def fake(self, x: Tensor, rotation: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - x says it all
        numbers = x.new_empty(self.stored_shape(x), dtype=torch.int8)
        return numbers, x.new_empty(x.shape[:-1], dtype=torch.float32)

    # ---------------------------------------------------------------------------------------------------- the kernel

    def validate(self, call: Call) -> None:
        """Shapes that no implementation could serve."""
        x = call.first
        if x.ndim == 0 or not x.shape[-1]:
            raise ValueError(f"x: {list(x.shape)} has no rows with elements")
        if x.shape[-1] % self.in_byte:
            raise ValueError(f"x: rows of {x.shape[-1]} do not fill bytes of {self.in_byte} numbers")
        check_rotation(call.options[0], x.shape[-1])

    def obstacles(self, call: Call) -> Iterator[str]:
        x = call.first
        yield from wrong_dtype(TYPES, x=x)
        yield from row_obstacles(x)

    def prepare(self, card: Card, x: Tensor, rotation: int, describe: str) -> Plan:
        """What rounds tensors of x's shape and strides: to numbers and scales."""
        view = folded(row_view(x if x.ndim > 1 else x[None]))
        launches = []
        if x.numel():
            block = Block.of(view.d)
            params = IntegerRowsParams(k=view.d, group=rotation, **view.places("x"))
            kernel = card.kernel(self.unit, f"{self.unit}_{TYPES[x.dtype]}{block.packs}")
            grid = (view.tokens, view.batches, 1)
            launches = [kernel.prepare(params, grid=grid, block=block.threads, shape=describe)]
        new_numbers = output(self.stored_shape(x), torch.int8, card.index)
        new_scales = output(x.shape[:-1], torch.float32, card.index)
        return plan_of(launches, "x", (x,), numbers=new_numbers, scales=new_scales)

    def plan(self, call: Call, card: Card, _tactic: object) -> Plan:
        return self.prepare(card, call.first, call.options[0], call.describe())


def row_obstacles(x: Tensor) -> Iterator[str]:
    """What keeps the kernels from rows of a type that they take."""
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


def shape_class(call: Call) -> str:
    return f"{row_class(call.first)} rotation {call.options[0]}"
