"""The Wan VAEs over our kernels: stock's own modules, whose leaves compute through our ops.

Stock's `encode` and `decode` stay as they are, with their chunks, caches and order of layers: what they call computes
differently. Convolutions read the cached frames where they lie instead of concatenating them, nothing is padded, the
norm and its SiLU are one pass, a block's skip is added by its last convolution, and an upsampled image is never stored.
All of it channels-last, which the first convolution of either half sees to.

Weights are taken as stock's layers take them (`cast_bias_weight`), so they may be offloaded or of another type. Where an
op has no kernel for an input (another type than fp16, the CPU) it runs stock's computation or its reference, and says so
in the ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.ops
import torch
from torch import Tensor, nn

from ..kernels_cuda import (
    STANDARD,
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

CACHED_FRAMES = comfy.ldm.wan.vae.CACHE_T
CausalConv3d = comfy.ldm.wan.vae.CausalConv3d
AttentionBlock = comfy.ldm.wan.vae.AttentionBlock
RMS_norm = comfy.ldm.wan.vae.RMS_norm
ResidualBlock = (comfy.ldm.wan.vae.ResidualBlock, comfy.ldm.wan.vae2_2.ResidualBlock)

Caches = list[Any]  # stock's: frames of each causal convolution, by its number


def fuse(vae: nn.Module, policy: KernelPolicy = STANDARD) -> None:
    """Let stock's WanVAE (2.1 or 2.2) compute through our ops from now on, under this policy. In place."""
    for module in vae.modules():
        for part, forward in _forwards(module):
            part.forward = partial(forward, part, policy)


def _forwards(module: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """What of this module computes through us, and how."""
    if isinstance(module, ResidualBlock):
        yield module, residual_block
    elif isinstance(module, AttentionBlock):
        yield module, attention_block
    elif isinstance(module, CausalConv3d):
        yield module, causal_conv
    elif isinstance(module, nn.Sequential):
        kinds = [type(layer) for layer in module]
        if kinds[:1] == [nn.Upsample]:
            yield module, upsample
        elif kinds[:1] == [nn.ZeroPad2d]:
            yield module, downsample
        elif kinds == [RMS_norm, nn.SiLU, CausalConv3d]:  # a head: stock calls its layers one by one
            yield module[0], norm_silu
            yield module[1], nothing


# ------------------------------------------------------------------------------------------------------------- leaves


@contextlib.contextmanager
def weights(module: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """A layer's weight and bias where x is and as x is, the weight channels-last."""
    weight, bias, stream = comfy.ops.cast_bias_weight(module, x, offloadable=True)
    try:
        yield weight.contiguous(memory_format=last_format(weight)), bias
    finally:
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)


def channels_last(x: Tensor) -> Tensor:
    """x, copied where stock has interleaved its frames, or at the entrance."""
    return x if x.stride(1) == 1 else x.contiguous(memory_format=last_format(x))


def causal_conv(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    cache_x: Tensor | None = None,
    cache_list: Caches | None = None,
    cache_idx: int | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Stock's CausalConv3d: [b, c, t, h, w] -> [b, n, t', h, w], and `residual` on top.

    Its convolution over time has the cached frames before x, and zeros before these; one that pads nothing has x alone.
    """
    if cache_list is not None:
        assert cache_idx is not None
        cache_x, cache_list[cache_idx] = cache_list[cache_idx], None
    before = module._padding
    if cache_x is not None:
        cache_x = channels_last(cache_x.to(x.device)[:, :, -before:]) if before else None
    x = channels_last(x)
    with weights(module, x) as (weight, bias):
        return conv3d(
            x,
            weight,
            bias,
            cache=cache_x,
            residual=residual,
            time_stride=module.stride[0],
            before=before,
            policy=policy,
        )


def norm_silu(module: Any, policy: KernelPolicy, x: Tensor, silu: bool = True) -> Tensor:
    """Stock's RMS_norm over channels, and the SiLU behind it."""
    gamma = module.gamma.to(x)
    bias = None if module.bias is None else module.bias.to(x)
    return channel_rms_silu(x, gamma, bias, silu=silu, policy=policy)


def upsample(module: Any, policy: KernelPolicy, x: Tensor) -> Tensor:
    """Stock's Upsample and Conv2d: [frames, c, h, w] -> [frames, n, 2 h, 2 w]."""
    x = channels_last(x)
    with weights(module[1], x) as (weight, bias):
        # Folded anew each time: a few small sums, and no copies of weights that ComfyUI would not know of.
        return upsample_conv2d(x, weight, bias, folded=fold_upsample(weight), policy=policy)


def downsample(module: Any, policy: KernelPolicy, x: Tensor) -> Tensor:
    """Stock's ZeroPad2d and Conv2d of stride 2: [frames, c, h, w] -> [frames, n, h / 2, w / 2]."""
    x = channels_last(x)
    with weights(module[1], x) as (weight, bias):
        return conv2d(x, weight, bias, stride=2, padding=module[0].padding, policy=policy)


def nothing(_module: Any, _policy: KernelPolicy, x: Tensor) -> Tensor:
    """What is left of a SiLU that the norm before it has done."""
    return x


# ------------------------------------------------------------------------------------------------------------- blocks


def residual_block(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    feat_cache: Caches | None = None,
    feat_idx: list[int] | None = None,
    final: bool = False,  # noqa: ARG001 - stock's signature
) -> Tensor:
    """norm, SiLU, convolution, twice, and the skip, which the second convolution adds."""
    norm_1, _, conv_1, norm_2, _, _, conv_2 = module.residual
    x = channels_last(x)
    skip = x if isinstance(module.shortcut, nn.Identity) else causal_conv(module.shortcut, policy, x)
    x = cached_conv(conv_1, policy, norm_silu(norm_1, policy, x), feat_cache, feat_idx)
    return cached_conv(conv_2, policy, norm_silu(norm_2, policy, x), feat_cache, feat_idx, skip)


def cached_conv(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    feat_cache: Caches | None,
    feat_idx: list[int] | None,
    residual: Tensor | None = None,
) -> Tensor:
    """A convolution that finds its frames in stock's list of caches, and leaves its own last ones there."""
    if feat_cache is None:
        return causal_conv(module, policy, x, residual=residual)
    assert feat_idx is not None
    at = feat_idx[0]
    old = feat_cache[at]
    kept = x[:, :, -CACHED_FRAMES:]
    if kept.shape[2] < CACHED_FRAMES and old is not None:
        kept = torch.cat((old[:, :, kept.shape[2] - CACHED_FRAMES :].to(x.device), kept), 2)
    elif x.shape[2] > CACHED_FRAMES:
        kept = kept.clone(memory_format=torch.preserve_format)  # a view would keep the whole chunk
    out = causal_conv(module, policy, x, old, residual=residual)
    feat_cache[at] = kept
    feat_idx[0] += 1
    return out


def attention_block(
    module: Any,
    policy: KernelPolicy,
    x: Tensor,
    feat_cache: Caches | None = None,  # noqa: ARG001 - stock's signature
    feat_idx: list[int] | None = None,  # noqa: ARG001
    final: bool = False,  # noqa: ARG001
) -> Tensor:
    """Stock's AttentionBlock: one head over the pixels of a frame, between two products of pixels."""
    b, c, t, h, w = x.shape
    x = channels_last(x)
    skip = x.movedim(1, -1).reshape(b * t, h * w, c)
    normed = norm_silu(module.norm, policy, x, silu=False).movedim(1, -1).reshape(b * t, h * w, c)
    with weights(module.to_qkv, x) as (weight, bias):
        qkv = linear(normed, weight.reshape(3 * c, c), bias, policy=policy)
    q, k, v = qkv.reshape(b * t, h * w, 3, 1, c).unbind(2)
    seen = attention(q, k, v, policy=policy).reshape(b * t, h * w, c)
    with weights(module.proj, x) as (weight, bias):
        out = linear(seen, weight.reshape(c, c), bias, residual=skip, policy=policy)
    return out.reshape(b, t, h, w, c).movedim(-1, 1)
