"""gated_residual and gated_residual_: x + gate * y.

The maths, the layout and the access pattern stand at the head of src/gated_residual.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int, c_int64
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...call import Call, Plan
from ...launcher import Card, Launch, Pointer, output, parameter_struct
from ...plans import floats, plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate, nothing, overwriting
from ..views.checks import beside, check_shape, check_written, unseen, wrong_dtype
from ..views.half_range import LARGEST, kept
from ..views.rows import (
    MOST_ROWS,
    SharedRow,
    batch_sizes,
    check_frames,
    row_classes,
    row_view,
    rows,
    shared_row,
    spread,
)
from ..views.tiles import Tiles, known, packed, place_fields, tiles

TYPES = {torch.float16: "f16", torch.float32: "f32", torch.bfloat16: "bf16"}


def gated_residual(
    x: Tensor, y: Tensor, gate: Tensor | None = None, *, saturate: bool = False, policy: KernelPolicy = STANDARD
) -> Tensor:
    """x + gate * y.

    x, y   [batch, ..., d] of one shape, x fp16, bf16 or fp32; rows may be anywhere
    gate   [d], [1 or batch, 1, d], [.., frames, d] or [.., frames, 1, d], spread over the tokens as stock does; one
           per token is Wan 2.2 5B's way. None: 1. y and gate are fp16 or fp32, beside bf16 rows bf16 or fp32
    saturate  what overflows an fp16 stream becomes +-65504 instead of infinity; NaN stays
    Returns a contiguous tensor of x's shape and dtype. Arithmetic is fp32, rounded once.
    """
    out: Tensor = GATED((x, y, gate), (saturate,), policy)
    return out


def gated_residual_(
    x: Tensor, y: Tensor, gate: Tensor | None = None, *, saturate: bool = False, policy: KernelPolicy = STANDARD
) -> None:
    """x += gate * y, where x lies. y must not overlap x unless it is x."""
    GATED_((x, y, gate), (saturate,), policy)


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(x: Tensor, y: Tensor, gate: Tensor | None, saturate: bool) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if gate is None:
        return kept(x.to(wide) + y.to(wide), x.dtype, saturate).to(x.dtype).contiguous()
    b, s, d = batch_sizes(x)
    flat, added = (t.to(wide).reshape(b, s, d) for t in (x, y))
    by = spread(gate.to(wide), s, b, d, "gate")
    return kept(flat + by * added, x.dtype, saturate).reshape(x.shape).to(x.dtype).contiguous()


def stock(x: Tensor, y: Tensor, gate: Tensor | None, saturate: bool) -> Tensor:
    """What stock runs (WanAttentionBlock.forward): addcmul, with the gate repeated over the tokens."""
    if gate is None:
        return kept((x + y).to(x.dtype), x.dtype, saturate).contiguous()
    b, s, d = batch_sizes(x)
    flat, added = (t.reshape(b, s, d) for t in (x, y))
    by = spread(gate, s, b, d, "gate")
    return kept(torch.addcmul(flat, added, by).reshape(x.shape).to(x.dtype), x.dtype, saturate).contiguous()


def fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def stock_(x: Tensor, y: Tensor, gate: Tensor | None, saturate: bool) -> None:
    """In place wherever torch can."""
    if gate is None:
        x.add_(y)
    else:
        b, s, d = batch_sizes(x)
        by = spread(gate, s, b, d, "gate")
        by = by.view(*by.shape[:1], *[1] * (x.ndim - 2), d) if by.shape[1] == 1 else by.expand(b, s, d).reshape(x.shape)
        x.addcmul_(y, by if x.ndim > 2 else by.reshape(-1, d))
    if saturate and x.dtype is torch.float16:
        x.clamp_(-LARGEST, LARGEST)


# --------------------------------------------------------------------------------------------------------- the kernel


# Mirrors GatedResidualParams in src/gated_residual.cu.
GatedResidualParams = parameter_struct(
    "GatedResidualParams",
    (Pointer, "x y gate out"),
    (c_int64, place_fields("x", "y", "gate", "out")),
    (c_int64, "tokens_per_frame"),
    (c_int, "x_is_float y_is_float gate_is_float saturate"),
)


def validate(call: Call) -> None:
    """Shapes that no implementation could serve."""
    x, y, gate = call.operands
    check_shape("y", y, x)
    if gate is not None:
        if x.ndim < 2:
            raise ValueError(f"x: {list(x.shape)} has no rows for a gate")
        check_frames(gate, x, x.shape[-1], "gate")
    if call.op == GATED_.name:
        check_written({"x": x}, {"y": y, "gate": gate}, itself="y")


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call. Later checks rely on earlier ones having passed."""
    x, y, gate = call.operands
    yield from wrong_dtype(TYPES, x=x)
    yield from wrong_dtype(beside(x), y=y, gate=gate)
    yield from unseen(_tiles(call))


def _tiles(call: Call) -> tuple[Tiles, int] | str:
    """Sizes and strides of x, y, gate and out, and how many tokens share a gate; or why there are none."""
    x, y, gate = call.operands
    written = x.stride() if call.op == GATED_.name else packed(x.shape)
    if x.numel() == 0:
        return Tiles(0, 0, 0, ((0, 0, 0),) * 4), 1
    if gate is None:
        flat = tiles(x.shape, x.stride(), y.stride(), (0,) * x.ndim, written)
        return flat if isinstance(flat, str) else (flat, flat.rows)
    views = rows(x), rows(y)
    for name, view in zip("xy", views, strict=True):
        if isinstance(view, str):
            return f"{name}: {view}"
    x_rows, y_rows = row_view(x), row_view(y)
    shared = shared_row(gate, x_rows, "gate")
    if not isinstance(shared, SharedRow):
        return shared or ""
    if x_rows.tokens > MOST_ROWS:
        return f"x: {x_rows.tokens} tokens exceed {MOST_ROWS}"
    b, s, d = x_rows.batches, x_rows.tokens, x_rows.d
    x_place = (x_rows.batch_stride, x_rows.row_stride, 1)
    y_place, gate_place = (y_rows.batch_stride, y_rows.row_stride, 1), (shared.batch_stride, shared.frame_stride, 1)
    out_place = x_place if call.op == GATED_.name else (s * d, d, 1)
    return Tiles(b, s, d, (x_place, y_place, gate_place, out_place)), shared.tokens_per_frame


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    x = call.first
    new_out = output(x.shape, x.dtype, card.index)
    launches = [_prepare(call, card)] if x.numel() else []
    if call.op == GATED_.name:
        return plan_of(launches, "x=out y gate", call.tensors)
    return plan_of(launches, "x y gate", call.tensors, out=new_out)


def _prepare(call: Call, card: Card) -> Launch:
    x, y, gate = call.operands
    found = _tiles(call)
    view, run = found if isinstance(found, tuple) else (known(found), 1)
    params = GatedResidualParams(
        tokens_per_frame=run,
        saturate=call.options[0] and x.dtype is torch.float16,
        **floats(x=x, y=y, gate=gate),
    )
    view.fill(params, "x", "y", "gate", "out")
    columns = [column for _, _, column in view.places]
    short, _ = beside(x)
    wide = call.aligned and view.wide((0, 1)) and y.dtype is short and columns == [1, 1, 0 if gate is None else 1, 1]
    if wide:
        types = f"{TYPES[x.dtype]}_{TYPES[short if gate is None else gate.dtype]}"
    else:
        types = "bf16_any" if short is torch.bfloat16 else "any"
    grid, threads = view.grid(wide)
    kernel = card.kernel("gated_residual", f"gated_residual_{types}")
    return kernel.prepare(params, grid=grid, block=threads, shape=call.describe())


def shape_class(call: Call) -> str:
    """Width exactly, rows to a power of two, and how much gate each row has to read."""
    return row_classes(call.tensors, layout=True)


_TYPES = ("any", "f16_f16", "f16_f32", "f32_f16", "f32_f32", "bf16_any", "bf16_bf16", "bf16_f32")  # of x and the gate

GATED = Op(
    name="gated_residual",
    schema="(Tensor x, Tensor y, Tensor? gate, bool saturate, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels={"gated_residual": tuple(f"gated_residual_{types}" for types in _TYPES)},
)

GATED_ = replace(
    GATED,
    name="gated_residual_",
    schema="(Tensor(a!) x, Tensor y, Tensor? gate, bool saturate, str policy) -> ()",
    reference=overwriting(reference),
    fake=nothing,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock_)),
)
