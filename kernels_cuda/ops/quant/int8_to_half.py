"""int8_to_half: a weight of 8-bit numbers becomes fp16 on arrival, turned back where its rows were turned (ConvRot).

The maths, the layout and the access pattern stand at the head of src/int8_to_half.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int, c_uint

import torch
from torch import Tensor

from ...call import Call, Plan
from ...launcher import Card, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_into, ragged, wrong_dtype
from ..views.half_range import saturated
from ..views.rows import row_class
from .rotation import check_rotation, matrix, root, turned
from .to_half import over_rows

PACK = 8  # kPack
CHUNK = 256 * 4  # packs of a block: kThreads * kAtOnce
MOST_PACKS = 2**32 - 1


def int8_to_half(
    x: Tensor, scale: Tensor, *, rotation: int = 0, out: Tensor | None = None, policy: KernelPolicy = STANDARD
) -> Tensor:
    """x * scale as fp16, and where rows were turned before they were rounded, turned back.

    x         [rows, k] int8, contiguous
    scale     fp32: one element, or one for each row ([rows] or [rows, 1])
    rotation  0, 4, 16, 64 or 256, which divides k: the group that was turned
    out       fp16, contiguous, of x's shape: written instead of a new tensor, and returned. Nothing is allocated then. The
              launch goes to torch's current stream. With mode `auto` the first call of a shape is measured, which waits for
              the device; a pager forces `on`

    Turning back is exact; the product with the scale is fp32, rounded once. What is finite and beyond 65504 becomes +-65504.
    """
    if out is None:
        result: Tensor = INT8_TO_HALF((x, scale), (rotation,), policy)
        return result
    INT8_TO_HALF_INTO((x, scale, out), (rotation,), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(x: Tensor, scale: Tensor, rotation: int) -> Tensor:
    """The kernel's bits."""
    value = turned(x.float(), rotation) * (over_rows(scale, x).float() * root(rotation))
    return torch.where(value.isfinite(), saturated(value), value).half()


def stock(x: Tensor, scale: Tensor, rotation: int) -> Tensor:
    """As stock: scaled in fp32, turned by a matrix product, rounded. Saturating, since `auto` may choose it."""
    value = x.float() * over_rows(scale, x).float()
    if rotation:
        groups = value.reshape(*x.shape[:-1], x.shape[-1] // rotation, rotation)
        value = (groups @ matrix(rotation, torch.float32, x.device)).reshape(x.shape)
    return torch.where(value.isfinite(), saturated(value), value).half()


def beside(call: Call) -> int:
    """Bytes that stock's way takes on the way: fp32 numbers, and those turned or saturated."""
    x = call.first
    return 8 * x.numel()


def fake(x: Tensor, scale: Tensor, rotation: int) -> Tensor:  # noqa: ARG001 - x says it all
    return x.new_empty(x.shape, dtype=torch.float16)


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors Int8ToHalfParams in src/int8_to_half.cu.
Int8ToHalfParams = parameter_struct(
    "Int8ToHalfParams", (Pointer, "x8 scale out"), (c_uint, "packs packs_per_row"), (c_int, "scale_per_row group")
)


def validate(call: Call) -> None:
    """Shapes that no implementation could serve."""
    x, scale, *rest = call.operands
    if x.ndim != 2:
        raise ValueError(f"x: {list(x.shape)} is not [rows, k]")
    over_rows(scale, x)
    check_rotation(call.options[0], x.shape[1])
    check_into(rest, x.shape, torch.float16, x=x, scale=scale)


def obstacles(call: Call) -> Iterator[str]:
    x, scale, *rest = call.operands
    yield from wrong_dtype((torch.int8,), x=x)
    yield from wrong_dtype((torch.float32,), scale=scale)
    if x.shape[1] % PACK:
        yield f"k is {x.shape[1]}, the kernel takes multiples of {PACK}"
    if x.numel() // PACK > MOST_PACKS:
        yield f"{x.numel()} elements are more than {MOST_PACKS * PACK}"
    yield from ragged(8, x=x)
    yield from ragged(4, scale=scale)
    yield from ragged(16, out=rest[0] if rest else None)


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix sizes and grid; what remains per call is the output and the pointers."""
    x, scale, *_ = call.operands
    new_out = output(x.shape, torch.float16, card.index)
    if not x.numel():
        return plan_of((), "x8 scale out", call.tensors, out=new_out)
    packs = x.numel() // PACK
    params = Int8ToHalfParams(
        packs=packs, packs_per_row=x.shape[1] // PACK, scale_per_row=int(scale.numel() > 1), group=call.options[0]
    )
    kernel = card.kernel("int8_to_half", "int8_to_half")
    launch = kernel.prepare(params, grid=(-(-packs // CHUNK), 1, 1), block=CHUNK // 4, shape=call.describe())
    return plan_of(launch, "x8 scale out", call.tensors, out=new_out)


def shape_class(call: Call) -> str:
    x, scale, *_ = call.operands
    return f"{row_class(x)} scales={min(scale.numel(), 2)} rotation {call.options[0]}"


KERNELS: dict[str, tuple[str, ...]] = {"int8_to_half": ("int8_to_half",)}

INT8_TO_HALF = Op(
    name="int8_to_half",
    schema="(Tensor x, Tensor scale, int rotation, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock, beside=beside)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)

INT8_TO_HALF_INTO = INT8_TO_HALF.into("int8_to_half_into", at=2)
