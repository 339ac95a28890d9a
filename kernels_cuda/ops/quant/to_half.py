"""to_half: weights as they are stored (bf16, fp32, fp8, scaled fp8) become fp16, on arrival.

The maths, the layout and the access pattern stand at the head of src/to_half.cu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int, c_int64
from typing import NamedTuple

import torch
from torch import Tensor

from ...call import Call, Plan
from ...launcher import Card, Launch, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_into, not_contiguous, scattered, unseen, wrong_dtype
from ..views.half_range import saturated
from ..views.rows import row_class

PACK = 8  # kPack
THREADS = 256  # kThreads
PACKS_PER_THREAD = 4  # kPacksPerThread
TYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
EXACT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16)  # every value of these is a value of fp16


def to_half(
    x: Tensor, scale: Tensor | None = None, *, out: Tensor | None = None, policy: KernelPolicy = STANDARD
) -> Tensor:
    """x, or x * scale, as fp16.

    x      bf16, fp32, fp8_e4m3fn or fp8_e5m2; contiguous of any shape, or [rows, cols] with any distance between rows
    scale  fp32: one element, or one for each index of x's first dimension ([n], [n, 1], ...)
    out    fp16, contiguous, of x's shape, anywhere in memory but over x: written instead of a new tensor, and returned.
           Nothing is allocated then. The launch goes to torch's current stream, for the pager its copy stream.
           With mode `auto` the first call of a shape is measured, which waits for the device; a pager forces `on`

    A finite x (times a finite scale) beyond 65504 becomes +-65504, so that no weight turns infinite in fp16. Infinities
    of the source (bf16, fp32, e5m2; or of the scale) stay infinite; NaN stays NaN. The product is fp32, rounded once.
    """
    if out is None:
        result: Tensor = TO_HALF((x, scale), (), policy)
        return result
    TO_HALF_INTO((x, scale, out), (), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(x: Tensor, scale: Tensor | None) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    value = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
    finite = value.isfinite()
    if scale is not None:
        by = over_rows(scale, x).to(value.dtype)
        value, finite = value * by, finite & by.isfinite()
    return torch.where(finite, saturated(value), value).half()


def unsaturated(x: Tensor, scale: Tensor | None) -> Tensor:
    """What stock ComfyUI runs: a cast, and a product in fp16. Finite values beyond 65504 become infinite."""
    value = x.to(torch.float16, copy=True)
    return value if scale is None else value * over_rows(scale, x).to(torch.float16)


def stock(x: Tensor, scale: Tensor | None) -> Tensor:
    """As stock, but saturating: what `auto` may choose must keep what the op promises."""
    value = unsaturated(x, scale)
    if scale is None and x.dtype in EXACT:
        return value
    wide = x.to(torch.float32, copy=True)
    finite = wide.isfinite()
    if scale is not None:  # a number or a scale beyond fp16 does not say that their product is
        by = over_rows(scale, x)
        finite &= by.isfinite()
        wide *= by
    return torch.where(finite & ~value.isfinite(), saturated(wide).half(), value)


def beside(call: Call) -> int:
    """Bytes that stock's way takes on the way: fp32 numbers again, and those limited."""
    x, scale, *_ = call.operands
    return 0 if scale is None and x.dtype in EXACT else 8 * x.numel()


def fake(x: Tensor, scale: Tensor | None) -> Tensor:  # noqa: ARG001 - x says it all
    return x.new_empty(x.shape, dtype=torch.float16)


def over_rows(scale: Tensor, x: Tensor) -> Tensor:
    """The scale, shaped to broadcast against x."""
    if scale.numel() == 1:
        return scale.reshape(())
    rows = x.shape[0] if x.ndim else 1
    if scale.numel() != rows or scale.shape[0] != rows:
        raise ValueError(f"scale: {list(scale.shape)} is neither one value nor one for each of {rows} rows")
    return scale.reshape(-1, *[1] * (x.ndim - 1))


# --------------------------------------------------------------------------------------------------------- the kernel

ToHalfParams = parameter_struct(
    "ToHalfParams",
    (Pointer, "x scale out"),
    (c_int64, "x_row rows cols packs_per_row packs_reciprocal"),
    (c_int, "scale_per_row"),
)


class Matrix(NamedTuple):
    """x as rows of adjacent elements: a single one where nothing asks for more."""

    rows: int
    cols: int
    stride: int


def matrix(x: Tensor, by_row: bool) -> Matrix | str:
    if x.is_contiguous():
        rows = x.shape[0] if by_row else 1
        cols = x.numel() // max(rows, 1)
        return Matrix(rows, cols, cols)
    if x.ndim == 2 and (x.stride(1) == 1 or x.shape[1] == 1):
        return Matrix(x.shape[0], x.shape[1], x.stride(0))
    return f"strides {x.stride()} are neither contiguous nor rows of adjacent elements"


def validate(call: Call) -> None:
    """Shapes that no implementation could serve."""
    x, scale, *rest = call.operands
    if scale is not None:
        over_rows(scale, x)
    check_into(rest, x.shape, torch.float16, x=x, scale=scale)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    x, scale, *rest = call.operands
    yield from scattered(out=rest[0] if rest else None)
    yield from wrong_dtype(TYPES, x=x)
    yield from wrong_dtype((torch.float32,), scale=scale)
    yield from not_contiguous(scale=scale)
    yield from unseen(matrix(x, scale is not None and scale.numel() > 1), "x")


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    x = call.first
    launches = [_prepare(call, card)] if x.numel() else []
    return plan_of(launches, "x scale out", call.tensors, out=output(x.shape, torch.float16, card.index))


def _prepare(call: Call, card: Card) -> Launch:
    x, scale, *rest = call.operands
    by_row = scale is not None and scale.numel() > 1
    view = matrix(x, by_row)
    assert not isinstance(view, str)  # `obstacles` found none
    unit = min(16, PACK * x.element_size())  # bytes that one load of a pack takes at once
    whole = x.data_ptr() % unit == 0 and all(out.data_ptr() % 16 == 0 for out in rest)
    if view.rows > 1:
        whole = whole and view.cols % PACK == 0 and view.stride % PACK == 0
    packs_per_row = -(-view.cols // PACK)
    params = ToHalfParams(
        x_row=view.stride if view.rows > 1 else 0,
        rows=view.rows,
        cols=view.cols,
        packs_per_row=packs_per_row,
        packs_reciprocal=reciprocal(packs_per_row) if view.rows * packs_per_row < 2**32 else 0,
        scale_per_row=by_row,
    )
    kernel = card.kernel("to_half", f"to_half_{TYPES[x.dtype]}" + ("" if whole else "_any"))
    work = view.rows * (packs_per_row if whole else view.cols)
    grid = (math.ceil(work / (THREADS * PACKS_PER_THREAD)), 1, 1)
    return kernel.prepare(params, grid=grid, block=THREADS, shape=call.describe())


def reciprocal(divisor: int) -> int:
    """2^64 / divisor, rounded up: the upper 64 bits of its product with n < 2^32 are n // divisor. 0 for a divisor of 1.

    ctypes keeps the bits of a number beyond 2^63.
    """
    return -(-(2**64) // divisor) % 2**64


def shape_class(call: Call) -> str:
    x, scale, *_ = call.operands
    scales = 0 if scale is None else min(scale.numel(), 2)
    return f"{row_class(x)} scales={scales} contiguous={x.is_contiguous()}"


KERNELS = {"to_half": tuple(f"to_half_{name}{kind}" for name in TYPES.values() for kind in ("", "_any"))}

TO_HALF = Op(
    name="to_half",
    schema="(Tensor x, Tensor? scale, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock, beside=beside)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)

TO_HALF_INTO = TO_HALF.into("to_half_into", at=2)
