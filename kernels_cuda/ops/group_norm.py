"""group_norm_silu and instance_norm: normalisation over all pixels of a group of channels, and what follows it.

The maths, the layouts and the access patterns stand at the head of src/group_norm.cu.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64

import torch
from torch import Tensor
from torch.nn import functional

from ..call import Call, Plan
from ..launcher import Card, Pointer, output, parameter_struct
from ..policy import STANDARD, KernelPolicy
from ..registry import CudaCandidate, Op, StockCandidate
from .checks import check_eps, check_one_of
from .planes import (
    ACTIVATIONS,
    Planes,
    check_planes,
    obstacles,
    output_like,
    per_channel,
    plane_class,
    plane_view,
    strides_like,
)

PACK = 8  # kPack
THREADS = 256  # kThreads
MERGE_THREADS = 1024  # kMergeThreads
HELD = 4  # kHeld
HELD_FIRST = 8  # kHeldFirst
WIDEST = 32  # packs of channels across a block, channels-last


def group_norm_silu(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    silu: bool = True,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """GroupNorm over `groups` groups of channels, with weight and bias per channel, then SiLU.

    x             [batch, c, ...] fp16, contiguous or channels-last, or a slice of one along batch, channels or the
                  outermost image dimension
    weight, bias  [c], fp16 or fp32, each optional
    silu          False leaves the SiLU out
    Returns x's shape and dtype in x's memory format. Statistics are fp32 and the same bits at every run.
    """
    out: Tensor = GROUP_NORM_SILU((x, weight, bias), (groups, eps, "silu" if silu else "none"), policy)
    return out


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    relu: bool = False,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """InstanceNorm: each channel of each batch by its own mean and variance, then ReLU if asked; as group_norm_silu."""
    groups = max(x.shape[1], 1) if x.ndim > 1 else 1  # of a tensor without them `validate` speaks
    out: Tensor = INSTANCE_NORM((x, weight, bias), (groups, eps, "relu" if relu else "none"), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, act: str) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return torch.empty_like(x)
    grouped = x.to(wide).reshape(x.shape[0], groups, -1)
    value = grouped - grouped.mean(-1, keepdim=True)
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    value = value.reshape(x.shape)
    if weight is not None:
        value = value * per_channel(weight, x, "weight").to(wide)
    if bias is not None:
        value = value + per_channel(bias, x, "bias").to(wide)
    return in_format(activation(value, act).to(x.dtype), x)


def stock(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, act: str) -> Tensor:
    """What stock runs: nn.GroupNorm or nn.InstanceNorm2d, then the activation."""
    weight, bias = (
        None if t is None else per_channel(t, x, name).flatten().to(x.dtype)
        for t, name in ((weight, "weight"), (bias, "bias"))
    )
    if x.numel() == 0:
        return torch.empty_like(x)
    if groups == x.shape[1] and x[0, 0].numel() > 1:
        value = functional.instance_norm(x, None, None, weight, bias, True, 0.0, eps)
    else:
        value = torch.group_norm(x, groups, weight, bias, eps)
    return in_format(activation(value, act), x)


def fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def activation(value: Tensor, act: str) -> Tensor:
    if act == "silu":
        return functional.silu(value)
    return functional.relu(value) if act == "relu" else value


def in_format(value: Tensor, x: Tensor) -> Tensor:
    """The value in x's memory format, which torch's GroupNorm does not keep."""
    if value.stride() == strides_like(x):
        return value
    return torch.empty_like(x).copy_(value)


# --------------------------------------------------------------------------------------------------------- the kernel

GroupNormParams = parameter_struct(
    "GroupNormParams",
    (Pointer, "x weight bias parts coefficients out"),
    (c_int64, "x_batch x_step out_batch out_step batches pixels packs_per_plane chunks pixels_per_chunk"),
    (c_int, "channels groups channels_per_group lanes column_blocks is_last"),
    (c_float, "eps"),
    (c_int, "weight_is_float bias_is_float activation"),
)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    x, weight, bias = call.tensors
    assert x is not None
    groups, eps, act = call.options
    check_planes(x, weight, bias)
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"x: {list(x.shape)} cannot be split into {groups} groups of channels")
    check_eps(eps)
    check_one_of("act", act, ACTIVATIONS)


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix layout, chunks and grids of the three launches; what remains per call is memory and pointers."""
    x, weight, bias = call.tensors
    assert x is not None
    groups, eps, act = call.options
    new_out = output_like(x, card)
    if x.numel() == 0:
        return lambda *_: new_out()
    view, out = plane_view(x.shape, x.stride()), plane_view(x.shape, strides_like(x))
    is_last = view.layout == "last"
    packs_per_plane = -(-view.pixels // PACK)
    lanes, column_blocks, threads, per_chunk = column_shape(view, card.multiprocessors)
    if is_last:
        chunks = -(-view.pixels // per_chunk)
        stats_blocks = apply_blocks = view.batches * chunks * column_blocks
        parts = view.batches * chunks * view.channels
    else:
        threads = THREADS
        chunks = -(-packs_per_plane * (view.channels // groups) // (THREADS * HELD_FIRST))
        stats_blocks = parts = view.batches * groups * chunks
        apply_blocks = -(-view.batches * view.channels * packs_per_plane // (THREADS * HELD))
    params = {
        "x_batch": view.batch_stride,
        "x_step": view.step,
        "out_batch": out.batch_stride,
        "out_step": out.step,
        "batches": view.batches,
        "pixels": view.pixels,
        "packs_per_plane": packs_per_plane,
        "chunks": chunks,
        "pixels_per_chunk": per_chunk,
        "channels": view.channels,
        "groups": groups,
        "channels_per_group": view.channels // groups,
        "lanes": lanes,
        "column_blocks": column_blocks,
        "is_last": is_last,
        "eps": eps,
        "weight_is_float": weight is not None and weight.dtype is torch.float32,
        "bias_is_float": bias is not None and bias.dtype is torch.float32,
        "activation": ACTIVATIONS[act],
    }
    end = "" if _whole(x, view, out) else "_any"
    stats, merge, apply = (
        card.kernel("group_norm", f"group_norm_{name}").prepare(
            GroupNormParams(**params), grid=(blocks, 1, 1), block=block, shape=call.describe()
        )
        for name, blocks, block in (
            (f"{view.layout}_stats{end}", stats_blocks, threads),
            ("merge", view.batches * groups, MERGE_THREADS),
            (f"{view.layout}_apply{end}", apply_blocks, threads),
        )
    )
    # Two floats each: for every part, and behind them for every channel of every batch.
    new_workspace = output((2 * (parts + view.batches * view.channels),), torch.float32, card.index)

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        out, workspace = new_out(), new_workspace()
        room = workspace.data_ptr()
        pointers = (
            x.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            room,
            room + 8 * parts,
            out.data_ptr(),
        )
        stats(*pointers)
        merge(*pointers)
        apply(*pointers)
        return out

    return run


def column_shape(view: Planes, multiprocessors: int) -> tuple[int, int, int, int]:
    """Channels-last: (packs across a block, blocks across all channels, threads, pixels per chunk).

    Chunks are long, so that their moments cost next to nothing to write and join, but enough of them to fill the card.
    """
    packs = -(-view.channels // PACK)
    column_blocks = -(-packs // WIDEST)
    lanes = -(-packs // column_blocks)
    rows = THREADS // lanes
    turns = -(-view.pixels // (rows * HELD))
    wanted = max(1, 6 * multiprocessors // (view.batches * column_blocks))
    return lanes, column_blocks, lanes * rows, rows * HELD * max(1, -(-turns // wanted))


def _whole(x: Tensor, view: Planes, out: Planes) -> bool:
    """Whether every pack is eight elements at an address that is a multiple of 16."""
    strides = view.batch_stride, view.step, out.batch_stride, out.step
    size = view.pixels if view.layout == "first" else view.channels
    return x.data_ptr() % 16 == 0 and size % PACK == 0 and all(stride % PACK == 0 for stride in strides)


def shape_class(call: Call) -> str:
    x, weight, bias = call.tensors
    assert x is not None
    groups, _, act = call.options
    return f"{plane_class(x)} groups={groups} {act} affine={weight is not None}{bias is not None}"


KERNELS = (
    "group_norm_merge",
    *(f"group_norm_{a}_{b}{c}" for a in ("first", "last") for b in ("stats", "apply") for c in ("", "_any")),
)


def _op(name: str) -> Op:
    """Both ops are one computation: they differ in what a model may switch, and in what is remembered."""
    return Op(
        name=name,
        schema="(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, str act, str policy) -> Tensor",
        reference=reference,
        fake=fake,
        candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
        shape_class=shape_class,
        validate=validate,
        kernels={"group_norm": KERNELS},
    )


GROUP_NORM_SILU, INSTANCE_NORM = _op("group_norm_silu"), _op("instance_norm")
