"""The layers of the Wan VAEs, over our kernels. Stock's modules hold their weights.

Convolutions read the cached frames in place instead of concatenating them, nothing is padded, the
norm and its SiLU are one pass, a block's skip is added by its last convolution, and an upsampled
image is never stored. Everything is channels-last from the first convolution of either half on.

Weights are taken as everywhere (`operands.py`), so they may be offloaded or of another type. If an
op has no kernel for an input (another type than fp16, the CPU) it runs stock's computation or its
reference, and says so in the ledger.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .....kernels_cuda import (
    KernelPolicy,
    attention,
    channel_rms_silu,
    conv2d,
    conv3d,
    fold_upsample,
    linear,
    upsample_conv2d,
)
from ....fused.attention import for_heads
from ....vae.memory_limits import channels_last, weights

CACHED_FRAMES = 2

# The last frames that each causal convolution has seen. None: there are no frames before, and none
# will follow.
Caches = dict[nn.Module, Tensor] | None


# ------------------------------------------------------------------------------------------------------ convolutions


def causal_conv(
    module: Any, policy: KernelPolicy, x: Tensor, cache: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Stock's CausalConv3d, plus `residual`: [b, c, t, h, w] -> [b, n, t, h, w].

    The cached frames precede x, and zeros precede these.
    """
    x = channels_last(x)
    with weights(module, policy, x) as (weight, bias):
        return conv3d(x, weight, bias, cache=cache, residual=residual, before=module._padding, policy=policy)


def cached_conv(module: Any, policy: KernelPolicy, x: Tensor, caches: Caches, residual: Tensor | None = None) -> Tensor:
    """A causal convolution that takes the frames before x from the caches, and leaves x's last ones
    there."""
    if caches is None:
        return causal_conv(module, policy, x, residual=residual)
    x = channels_last(x)
    before = caches.get(module)
    out = causal_conv(module, policy, x, before, residual)
    kept = x[:, :, -CACHED_FRAMES:]
    if kept.shape[2] < CACHED_FRAMES and before is not None:
        kept = torch.cat((before[:, :, kept.shape[2] - CACHED_FRAMES :], kept), 2)
    elif x.shape[2] > CACHED_FRAMES:
        kept = kept.clone(memory_format=torch.preserve_format)  # a view would keep all of x
    caches[module] = kept
    return out


def as_images(x: Tensor) -> Tensor:
    """[b, c, t, h, w] -> [b t, c, h, w], a view if possible."""
    return channels_last(x.movedim(2, 1).flatten(0, 1))


def as_video(images: Tensor, batch: int) -> Tensor:
    """[b t, c, h, w] -> [b, c, t, h, w], a view."""
    return images.view(batch, -1, *images.shape[1:]).movedim(1, 2)


def dense(x: Tensor) -> Tensor:
    """A contiguous copy of rows [..., c]. 16 bytes at a time if rows allow it, because torch copies
    another order value by value."""
    lanes = torch.complex128.itemsize // x.element_size()
    if x.shape[-1] % lanes or x.stride(-1) != 1 or any(step % lanes for step in (*x.stride()[:-1], x.storage_offset())):
        return x.contiguous()
    return x.view(torch.complex128).contiguous().view(x.dtype)


def upsample(module: Any, policy: KernelPolicy, x: Tensor, caches: Caches, first: bool) -> Tensor:
    """Stock's Resample, upwards: [b, c, t, h, w] -> [b, n, t', 2 h, 2 w].

    If it doubles the frames, t' is 2 t, except that the very first frame stays one.
    """
    batch, c, t, height, width = x.shape
    if module.mode == "upsample3d" and not first:
        # The first half of each frame's 2 c channels is one frame, the second half the next.
        both = cached_conv(module.time_conv, policy, x, caches)
        del x
        apart = both.movedim(1, -1).reshape(batch, t, height, width, 2, c).movedim(4, 2)
        frames = dense(apart).view(batch * t * 2, height, width, c).movedim(-1, 1)
        del both, apart
    else:
        frames = as_images(x)
    layer = module.resample[1]
    with weights(layer, policy, frames) as (weight, bias):
        return as_video(upsample_conv2d(frames, weight, bias, folded=fold_upsample(weight), policy=policy), batch)


def downsample(module: Any, policy: KernelPolicy, x: Tensor, caches: Caches) -> Tensor:
    """Stock's Resample, downwards: [b, c, t, h, w] -> [b, c, t', h / 2, w / 2].

    If it halves the frames, t' is t / 2, except that the very first frame stays one.
    """
    frames = as_images(x)
    pad, layer = module.resample
    with weights(layer, policy, frames) as (weight, bias):
        x = as_video(conv2d(frames, weight, bias, stride=2, padding=pad.padding, policy=policy), x.shape[0])
    if module.mode != "downsample3d" or caches is None:
        return x
    before = caches.get(module.time_conv)
    caches[module.time_conv] = x[:, :, -1:].clone(memory_format=torch.preserve_format)
    if before is None:
        return x
    with weights(module.time_conv, policy, x) as (weight, bias):
        return conv3d(x, weight, bias, cache=before, time_stride=2, before=1, policy=policy)


# ------------------------------------------------------------------------------------------------------------- blocks


def norm_silu(module: Any, policy: KernelPolicy, x: Tensor, silu: bool = True) -> Tensor:
    """Stock's RMS_norm over channels, then SiLU."""
    gamma = module.gamma.to(x)
    bias = None if module.bias is None else module.bias.to(x)
    return channel_rms_silu(x, gamma, bias, silu=silu, policy=policy)


def residual_block(module: Any, policy: KernelPolicy, x: Tensor, caches: Caches) -> Tensor:
    """norm, SiLU, convolution, twice, and the skip, which the second convolution adds."""
    norm_1, _, conv_1, norm_2, _, _, conv_2 = module.residual
    x = channels_last(x)
    skip = x if isinstance(module.shortcut, nn.Identity) else causal_conv(module.shortcut, policy, x)
    between = cached_conv(conv_1, policy, norm_silu(norm_1, policy, x), caches)
    del x
    seen = norm_silu(norm_2, policy, between)
    del between
    return cached_conv(conv_2, policy, seen, caches, skip)


def attention_block(module: Any, policy: KernelPolicy, x: Tensor) -> Tensor:
    """Stock's AttentionBlock: one head over the pixels of a frame, between two products of
    pixels."""
    b, c, t, h, w = x.shape
    x = channels_last(x)
    skip = x.movedim(1, -1).reshape(b * t, h * w, c)
    normed = norm_silu(module.norm, policy, x, silu=False).movedim(1, -1).reshape(b * t, h * w, c)
    with weights(module.to_qkv, policy, x) as (weight, bias):
        qkv = linear(normed, weight.reshape(3 * c, c), bias, policy=policy)
    del normed
    q, k, v = qkv.reshape(b * t, h * w, 3, 1, c).unbind(2)
    del qkv
    seen = attention(q, k, v, policy=for_heads(policy, c)).reshape(b * t, h * w, c)
    del q, k, v
    with weights(module.proj, policy, x) as (weight, bias):
        out = linear(seen, weight.reshape(c, c), bias, residual=skip, policy=policy)
    return out.reshape(b, t, h, w, c).movedim(-1, 1)


def middle(module: Any, policy: KernelPolicy, x: Tensor, caches: Caches) -> Tensor:
    """Residual block, attention, residual block, at the size of the latent."""
    before, attend, after = module
    x = residual_block(before, policy, x, caches)
    x = attention_block(attend, policy, x)
    return residual_block(after, policy, x, caches)


def head(module: Any, policy: KernelPolicy, x: Tensor, caches: Caches) -> Tensor:
    """Norm, SiLU and the last convolution of either half."""
    norm, _, conv = module
    return cached_conv(conv, policy, norm_silu(norm, policy, x), caches)
