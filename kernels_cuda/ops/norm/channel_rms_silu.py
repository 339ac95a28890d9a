"""channel_rms_silu: the Wan VAE's normalisation over the channels of each pixel, with the SiLU behind it.

The maths, the layouts and the access patterns stand at the head of src/channel_rms_silu.cu.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan
from ...launcher import Card, Pointer, parameter_struct
from ...plans import floats, plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.planes import (
    Planes,
    check_planes,
    obstacles,
    output_like,
    per_channel,
    plane_class,
    plane_view,
    strides_like,
)

EPS = 1e-12  # of F.normalize
PACK = 8  # kPack
CHANNELS_PER_THREAD = 12  # kChannelsPerThread
TILE_THREADS = 352  # kMostTileThreads
THREADS = 256  # kMostThreads
# Channels-last: packs of a pixel per lane the kernels were compiled for -> pixels per lane.
PACKS = {2: 4, 3: 2, 4: 2, 5: 1, 8: 1}
WARP = 32


def channel_rms_silu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool = True, policy: KernelPolicy = STANDARD
) -> Tensor:
    """x / max(|x|, 1e-12) * sqrt(c) * weight + bias, then SiLU; |x| is taken over the channels of each pixel.

    x             [batch, c, ...] fp16, e.g. [b, c, t, h, w] or [b, c, h, w], contiguous or channels-last, or a slice of
                  one along batch, channels or the outermost image dimension
    weight, bias  one value per channel, fp16 or fp32: [c], [c, 1, 1] or [c, 1, 1, 1], as the model stores them
    silu          False leaves the SiLU out
    Returns x's shape and dtype in x's memory format. All arithmetic is fp32, rounded once. A pixel of zeros gives its
    bias (stock's fp16 rounds 1e-12 to 0 and makes it NaN); lengths beyond 65504 do not overflow.
    """
    out: Tensor = CHANNEL_RMS_SILU((x, weight, bias), (silu,), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    length = value.square().sum(1, keepdim=True).sqrt()
    value = value / length.clamp_min(EPS) * x.shape[1] ** 0.5 * per_channel(weight, x, "weight").to(wide)
    if bias is not None:
        value = value + per_channel(bias, x, "bias").to(wide)
    return (functional.silu(value) if silu else value).to(x.dtype)


def stock(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """What stock runs: RMS_norm of comfy/ldm/wan/vae.py, then nn.SiLU."""
    value = functional.normalize(x, dim=1) * x.shape[1] ** 0.5 * per_channel(weight, x, "weight").to(x)
    if bias is not None:
        value = value + per_channel(bias, x, "bias").to(x)
    return functional.silu(value) if silu else value


def fake(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:  # noqa: ARG001 - x says it all
    return torch.empty_like(x)


# --------------------------------------------------------------------------------------------------------- the kernel

ChannelRmsParams = parameter_struct(
    "ChannelRmsParams",
    (Pointer, "x weight bias out"),
    (c_int64, "x_batch x_step out_batch out_step pixels"),
    (c_int, "blocks_per_batch channels lanes"),
    (c_float, "root"),
    (c_int, "weight_is_float bias_is_float silu"),
)


def validate(call: Call) -> None:
    """Shapes that no implementation could serve."""
    check_planes(*call.operands)


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix layout, strides, grid and kernel; what remains per call is the output and the pointers."""
    x, weight, bias = call.operands
    new_out = output_like(x, card)
    if x.numel() == 0:
        return lambda *_: new_out()
    view, out = plane_view(x.shape, x.stride()), plane_view(x.shape, strides_like(x))
    name, lanes, threads, pixels = _kernel(call, view, out)
    blocks = -(-view.pixels // pixels)
    params = ChannelRmsParams(
        pixels=view.pixels,
        blocks_per_batch=blocks,
        channels=view.channels,
        lanes=lanes,
        root=view.channels**0.5,
        silu=call.options[0],
        **view.places("x"),
        **out.places("out"),
        **floats(weight=weight, bias=bias),
    )
    kernel = card.kernel("channel_rms_silu", name)
    launch = kernel.prepare(params, grid=(blocks * view.batches, 1, 1), block=threads, shape=call.describe())
    return plan_of(launch, "x weight bias", call.tensors, out=new_out)


def _kernel(call: Call, view: Planes, out: Planes) -> tuple[str, int, int, int]:
    """(kernel, lanes, threads, pixels that a block takes at a time)."""
    strides = view.batch_stride, view.step, out.batch_stride, out.step
    whole = call.aligned and all(stride % PACK == 0 for stride in strides)
    if view.layout == "first":
        shape = tile_shape(view.channels) if whole and view.pixels % PACK == 0 else None
        if shape:
            return FIRST, shape[0], shape[1], shape[0] * PACK
        return f"{FIRST}_any", 1, THREADS, THREADS
    split = lane_shape(view.channels) if whole and view.channels % PACK == 0 else None
    if split:
        lanes, packs = split
        return f"channel_rms_silu_last_{packs}", lanes, THREADS, THREADS // lanes * PACKS[packs]
    return "channel_rms_silu_last_any", 32, THREADS, THREADS // 32


def tile_shape(channels: int) -> tuple[int, int] | None:
    """(lanes across the pixels, threads) of a channels-first tile: as wide as the threads allow, or None."""
    groups = -(-channels // CHANNELS_PER_THREAD)
    widths = ((lanes, -(-lanes * groups // WARP) * WARP) for lanes in (32, 16, 8, 4, 2))
    return next(((lanes, threads) for lanes, threads in widths if threads <= TILE_THREADS), None)


def lane_shape(channels: int) -> tuple[int, int] | None:
    """(lanes, packs per lane) that hold a pixel with the least room to spare; the narrower in packs where equal."""
    packs = -(-channels // PACK)
    fits = [(lanes * each, each, lanes) for each in PACKS for lanes in (1, 2, 4, 8, 16, 32) if lanes * each >= packs]
    if not fits:
        return None
    _, each, lanes = min(fits)
    return lanes, each


def shape_class(call: Call) -> str:
    return f"{plane_class(call.first)} silu={call.options[0]} bias={call.tensors[2] is not None}"


FIRST = "channel_rms_silu_first"
LAST = tuple(f"channel_rms_silu_last_{packs}" for packs in PACKS)

CHANNEL_RMS_SILU = Op(
    name="channel_rms_silu",
    schema="(Tensor x, Tensor weight, Tensor? bias, bool silu, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels={"channel_rms_silu": (FIRST, f"{FIRST}_any", *LAST, "channel_rms_silu_last_any")},
)
