"""The layers of the Wan VAEs, over our kernels. Stock's modules hold their weights.

Convolutions read the cached frames where they lie instead of concatenating them, nothing is padded, the norm and its SiLU
are one pass, a block's skip is added by its last convolution, and an upsampled image is never stored. All of it
channels-last, which the first convolution of either half sees to.

Weights are taken as stock's layers take them (`cast_bias_weight`), so they may be offloaded or of another type. Where an
op has no kernel for an input (another type than fp16, the CPU) it runs stock's computation or its reference, and says so
in the ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import comfy.ops
import torch
from torch import Tensor, nn

from ..kernels_cuda import (
    KernelPolicy,
    attention,
    channel_rms_silu,
    conv2d,
    conv3d,
    fold_upsample,
    linear,
    upsample_conv2d,
)
from ..kernels_cuda.ops.conv_operands import last_format

CACHED_FRAMES = 2

# The last frames that each causal convolution has seen. None: nothing comes before, and nothing will come after.
Caches = dict[nn.Module, Tensor] | None


@dataclass
class Tools:
    """What the layers compute with.

    policy  which kernels
    keeps   whether weights stay as the kernels want them, for as long as these tools are in use: a video needs each
            dozens of times. ComfyUI may move or change its own between two uses, so what is kept is a copy.
    """

    policy: KernelPolicy
    keeps: bool = False
    _kept: dict[tuple[nn.Module, bool], tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    @contextlib.contextmanager
    def weights(self, module: nn.Module, x: Tensor, fold: bool = False) -> Iterator[tuple[Tensor, Tensor | None]]:
        """A layer's weight and bias where x is and as x is, the weight channels-last; with `fold`, folded for the
        convolution behind an upsampling.
        """
        if (module, fold) in self._kept:
            yield self._kept[module, fold]
            return
        weight, bias, stream = comfy.ops.cast_bias_weight(module, x, offloadable=True)
        try:
            ready = fold_upsample(weight) if fold else weight.contiguous(memory_format=last_format(weight))
            if self.keeps:
                ready = ready.clone(memory_format=torch.preserve_format) if ready is weight else ready
                self._kept[module, fold] = ready, None if bias is None else bias.clone()
            yield ready, bias
        finally:
            comfy.ops.uncast_bias_weight(module, weight, bias, stream)


def channels_last(x: Tensor) -> Tensor:
    """x, copied where its channels do not lie side by side."""
    return x if x.stride(1) == 1 else x.contiguous(memory_format=last_format(x))


# ------------------------------------------------------------------------------------------------------ convolutions


def causal_conv(
    module: Any, tools: Tools, x: Tensor, cache: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Stock's CausalConv3d: [b, c, t, h, w] -> [b, n, t, h, w], and `residual` on top.

    It has the cached frames before x, and zeros before these.
    """
    x = channels_last(x)
    with tools.weights(module, x) as (weight, bias):
        return conv3d(x, weight, bias, cache=cache, residual=residual, before=module._padding, policy=tools.policy)


def cached_conv(module: Any, tools: Tools, x: Tensor, caches: Caches, residual: Tensor | None = None) -> Tensor:
    """A causal convolution that finds the frames before x among the caches, and leaves x's last ones there."""
    if caches is None:
        return causal_conv(module, tools, x, residual=residual)
    x = channels_last(x)
    before = caches.get(module)
    out = causal_conv(module, tools, x, before, residual)
    kept = x[:, :, -CACHED_FRAMES:]
    if kept.shape[2] < CACHED_FRAMES and before is not None:
        kept = torch.cat((before[:, :, kept.shape[2] - CACHED_FRAMES :], kept), 2)
    elif x.shape[2] > CACHED_FRAMES:
        kept = kept.clone(memory_format=torch.preserve_format)  # a view would keep all of x
    caches[module] = kept
    return out


def as_images(x: Tensor) -> Tensor:
    """[b, c, t, h, w] -> [b t, c, h, w], a view where that can be one."""
    return channels_last(x.movedim(2, 1).flatten(0, 1))


def as_video(images: Tensor, batch: int) -> Tensor:
    """[b t, c, h, w] -> [b, c, t, h, w], a view."""
    return images.view(batch, -1, *images.shape[1:]).movedim(1, 2)


def upsample(module: Any, tools: Tools, x: Tensor, caches: Caches, first: bool) -> Tensor:
    """Stock's Resample, upwards: [b, c, t, h, w] -> [b, n, t', 2 h, 2 w].

    Where it doubles the frames too, t' is 2 t, but for the very first frame, which stays one.
    """
    batch, c, t, height, width = x.shape
    if module.mode == "upsample3d" and not first:
        # Of each frame's 2 c channels the first half is one frame, the second half the next.
        both = cached_conv(module.time_conv, tools, x, caches)
        del x
        apart = both.movedim(1, -1).reshape(batch, t, height, width, 2, c).movedim(4, 2)
        frames = apart.reshape(batch * t * 2, height, width, c).movedim(-1, 1)
        del both, apart
    else:
        frames = as_images(x)
    layer = module.resample[1]
    with tools.weights(layer, frames) as (weight, bias), tools.weights(layer, frames, fold=True) as (folded, _):
        return as_video(upsample_conv2d(frames, weight, bias, folded=folded, policy=tools.policy), batch)


def downsample(module: Any, tools: Tools, x: Tensor, caches: Caches) -> Tensor:
    """Stock's Resample, downwards: [b, c, t, h, w] -> [b, c, t', h / 2, w / 2].

    Where it halves the frames too, t' is t / 2, but for the very first frame, which stays one.
    """
    frames = as_images(x)
    pad, layer = module.resample
    with tools.weights(layer, frames) as (weight, bias):
        x = as_video(conv2d(frames, weight, bias, stride=2, padding=pad.padding, policy=tools.policy), x.shape[0])
    if module.mode != "downsample3d" or caches is None:
        return x
    before = caches.get(module.time_conv)
    caches[module.time_conv] = x[:, :, -1:].clone(memory_format=torch.preserve_format)
    if before is None:
        return x
    with tools.weights(module.time_conv, x) as (weight, bias):
        return conv3d(x, weight, bias, cache=before, time_stride=2, before=1, policy=tools.policy)


# ------------------------------------------------------------------------------------------------------------- blocks


def norm_silu(module: Any, tools: Tools, x: Tensor, silu: bool = True) -> Tensor:
    """Stock's RMS_norm over channels, and the SiLU behind it."""
    gamma = module.gamma.to(x)
    bias = None if module.bias is None else module.bias.to(x)
    return channel_rms_silu(x, gamma, bias, silu=silu, policy=tools.policy)


def residual_block(module: Any, tools: Tools, x: Tensor, caches: Caches) -> Tensor:
    """norm, SiLU, convolution, twice, and the skip, which the second convolution adds."""
    norm_1, _, conv_1, norm_2, _, _, conv_2 = module.residual
    x = channels_last(x)
    skip = x if isinstance(module.shortcut, nn.Identity) else causal_conv(module.shortcut, tools, x)
    between = cached_conv(conv_1, tools, norm_silu(norm_1, tools, x), caches)
    del x
    seen = norm_silu(norm_2, tools, between)
    del between
    return cached_conv(conv_2, tools, seen, caches, skip)


def attention_block(module: Any, tools: Tools, x: Tensor) -> Tensor:
    """Stock's AttentionBlock: one head over the pixels of a frame, between two products of pixels."""
    b, c, t, h, w = x.shape
    x = channels_last(x)
    skip = x.movedim(1, -1).reshape(b * t, h * w, c)
    normed = norm_silu(module.norm, tools, x, silu=False).movedim(1, -1).reshape(b * t, h * w, c)
    with tools.weights(module.to_qkv, x) as (weight, bias):
        qkv = linear(normed, weight.reshape(3 * c, c), bias, policy=tools.policy)
    del normed
    q, k, v = qkv.reshape(b * t, h * w, 3, 1, c).unbind(2)
    del qkv
    seen = attention(q, k, v, policy=tools.policy).reshape(b * t, h * w, c)
    del q, k, v
    with tools.weights(module.proj, x) as (weight, bias):
        out = linear(seen, weight.reshape(c, c), bias, residual=skip, policy=tools.policy)
    return out.reshape(b, t, h, w, c).movedim(-1, 1)


def middle(module: Any, tools: Tools, x: Tensor, caches: Caches) -> Tensor:
    """Residual block, attention, residual block, at the size of the latent."""
    before, attend, after = module
    x = residual_block(before, tools, x, caches)
    x = attention_block(attend, tools, x)
    return residual_block(after, tools, x, caches)


def head(module: Any, tools: Tools, x: Tensor, caches: Caches) -> Tensor:
    """Norm, SiLU and the last convolution of either half."""
    norm, _, conv = module
    return cached_conv(conv, tools, norm_silu(norm, tools, x), caches)
