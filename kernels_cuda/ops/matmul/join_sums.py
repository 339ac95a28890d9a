"""join_sums: between two products of operands in two parts. What the first left is added up, gated, and parted again.

The maths, the layout and the access pattern stand at the head of src/join_sums.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64

import torch
from torch import Tensor

from ...call import Call, Plan
from ...launcher import Card, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_one_of, check_scale, check_shape, unseen, wrong_dtype
from ..views.half_range import saturated
from ..views.parts import PARTS, check_sums, join, split
from ..views.rows import row_classes
from ..views.tiles import Tiles, known, packed, place_fields, tiles
from .linear import Activation
from .linear_operands import ACTIVATIONS, activate_wide


def join_sums(
    first: Tensor,
    second: Tensor | None = None,
    *,
    activation: Activation = "none",
    scale: float = 1.0,
    parts: bool = True,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """activation(first[0] + first[1]) * (second[0] + second[1]) * scale, without its second factor if there is none.

    first, second  [2, ..., n] fp32, rows anywhere: what a product of two parts makes, or two halves of one such
    scale          a power of two
    parts          True: returns [2, ..., n] fp16, the value, which saturates, and what rounding took from it. False: the value
    alone, [..., n]. NaN stays; the result is contiguous.
    """
    out: Tensor = JOIN_SUMS((first, second), (activation, scale, parts), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(first: Tensor, second: Tensor | None, activation: str, scale: float, parts: bool) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    value = activate_wide(join(first), activation)
    if second is not None:
        value = value * join(second)
    value = value * scale
    return split(value) if parts else saturated(value).half().contiguous()


def fake(first: Tensor, _second: Tensor | None, _activation: str, _scale: float, parts: bool) -> Tensor:
    return first.new_empty(first.shape if parts else first.shape[1:], dtype=torch.float16)


# --------------------------------------------------------------------------------------------------------- the kernel


# Mirrors JoinSumsParams in src/join_sums.cu.
JoinSumsParams = parameter_struct(
    "JoinSumsParams",
    (Pointer, "first second out"),
    (c_int64, place_fields("first", "second", "out")),
    (c_int64, "first_part second_part out_part"),
    (c_float, "scale"),
    (c_int, "activation"),
)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    first, second = call.operands
    activation, scale, _ = call.options
    check_one_of("activation", activation, ACTIVATIONS)
    check_scale(scale)
    check_sums("first", first)
    check_shape("second", second, first, "first")


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    first, second = call.operands
    yield from wrong_dtype((torch.float32,), first=first, second=second)
    if first.numel():
        yield from unseen(_tiles(first, second))


def _tiles(first: Tensor, second: Tensor | None) -> Tiles | str:
    """Of a part."""
    shape = first.shape[1:]
    of_second = (first if second is None else second).stride()[1:]
    return tiles(shape, first.stride()[1:], of_second, packed(shape))


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    first, second = call.operands
    activation, scale, parts = call.options
    new_out = output(first.shape if parts else first.shape[1:], torch.float16, card.index)
    if not first.numel():
        return lambda *_: new_out()
    view = known(_tiles(first, second))
    between = first.stride(0), 0 if second is None else second.stride(0)
    params = JoinSumsParams(
        first_part=between[0],
        second_part=between[1],
        out_part=first.numel() // PARTS if parts else 0,
        scale=scale,
        activation=ACTIVATIONS.index(activation),
    )
    view.fill(params, "first", "second", "out")
    # Parts lie 16 bytes apart too, those of the result where its width is a multiple of a pack.
    wide = call.aligned and view.wide() and not any(step % 4 for step in between)
    grid, threads = view.grid(wide)
    launch = card.kernel("join_sums", f"join_sums_{activation if wide else 'any'}").prepare(
        params, grid=grid, block=threads, shape=call.describe()
    )
    return plan_of(launch, "first second", call.tensors, out=new_out)


def shape_class(call: Call) -> str:
    """Width exactly, rows to a power of two, layout."""
    activation, _, parts = call.options
    return f"{activation} {'parts' if parts else 'value'} {row_classes(call.tensors, layout=True)}"


JOIN_SUMS = Op(
    name="join_sums",
    schema="(Tensor first, Tensor? second, str activation, float scale, bool parts, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    # Stock, which computes in fp32, has no sums in parts; the reference is torch's own operations one after another.
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(reference)),
    shape_class=shape_class,
    validate=validate,
    kernels={"join_sums": ("join_sums_any", *(f"join_sums_{kind}" for kind in ACTIVATIONS))},
)
