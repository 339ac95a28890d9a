"""rms_parts: the norm of an fp32 stream, as two fp16 numbers that add up to it.

The maths, the layout and the access pattern stand at the head of src/rms_parts.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan
from ...launcher import MAX_GRID, Card, Pointer, output, parameter_struct
from ...plans import floats, plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_eps, check_vector, not_contiguous, unseen, wrong_dtype
from ..views.parts import PARTS, split
from ..views.rows import row_class, row_view, rows
from .rms import by_its_rms

TYPES = {torch.float16: "f16", torch.float32: "f32"}
PACK = 8  # kPack
PACKS, THREADS = 2, 512  # kPacks, kThreads
WIDEST = PACKS * THREADS * PACK
MOST = 2**31 - 1


def rms_parts(x: Tensor, weight: Tensor, *, eps: float, policy: KernelPolicy = STANDARD) -> Tensor:
    """rms(x) * weight, for a product of two parts.

    x       [batch, ..., d] fp32; rows may be anywhere, their elements adjacent
    weight  [d], fp16 or fp32
    Returns [2, *x.shape] fp16, contiguous: the value, which saturates, and what rounding took from it. NaN stays.
    """
    out: Tensor = RMS_PARTS((x, weight), (eps,), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return split(by_its_rms(x.to(wide), eps) * weight.to(wide))


def stock(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch's norm in fp32, which is what stock runs, and then what rounding takes."""
    return split(functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps))


def fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty((PARTS, *x.shape), dtype=torch.float16)


# --------------------------------------------------------------------------------------------------------- the kernel


# Mirrors RmsPartsParams in src/rms_parts.cu.
RmsPartsParams = parameter_struct(
    "RmsPartsParams",
    (Pointer, "x weight out"),
    (c_int64, "x_batch x_row rows"),
    (c_int, "tokens d"),
    (c_float, "eps inverse_d"),
    (c_int, "weight_is_float"),
)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    x, weight = call.operands
    check_eps(call.options[0])
    if x.ndim < 2:
        raise ValueError(f"x: {list(x.shape)} has no rows")
    check_vector("weight", weight, x.shape[-1])


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    x, weight = call.operands
    yield from wrong_dtype((torch.float32,), x=x)
    yield from wrong_dtype(TYPES, weight=weight)
    yield from unseen(rows(x), "x")
    yield from not_contiguous(weight=weight)
    if max(x.shape) > MOST:
        yield f"a dimension of {tuple(x.shape)} exceeds {MOST}"


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    x, weight = call.operands
    new_out = output((PARTS, *x.shape), torch.float16, card.index)
    if not x.numel():
        return lambda *_: new_out()
    view, d = row_view(x), x.shape[-1]
    whole = call.aligned and d <= WIDEST and not (d % PACK or view.batch_stride % PACK or view.row_stride % PACK)
    params = RmsPartsParams(
        rows=view.batches * view.tokens,
        tokens=view.tokens,
        d=d,
        eps=call.options[0],
        inverse_d=1 / d,
        **view.places("x"),
        **floats(weight=weight),
    )
    launch = card.kernel("rms_parts", f"rms_parts_{TYPES[weight.dtype] if whole else 'any'}").prepare(
        params,
        grid=(min(view.batches * view.tokens, MAX_GRID[0]), 1, 1),
        block=threads_for(d, whole=whole),
        shape=call.describe(),
    )
    return plan_of(launch, "x weight", call.tensors, out=new_out)


def threads_for(d: int, *, whole: bool) -> int:
    """Whole warps that hold a row, or as many as find an element each."""
    return min(THREADS, -(-d // ((PACKS * PACK if whole else 1) * 32)) * 32)


def shape_class(call: Call) -> str:
    """Width exactly, rows to a power of two."""
    x, weight = call.operands
    return f"{row_class(x)} {row_class(weight)}{'' if x.is_contiguous() else ' strided'}"


RMS_PARTS = Op(
    name="rms_parts",
    schema="(Tensor x, Tensor weight, float eps, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels={"rms_parts": ("rms_parts_f16", "rms_parts_f32", "rms_parts_any")},
)
