"""The parts of a U-Net that convolve, over our kernels: residual blocks, and the resamplings.

    x ─ norm, SiLU ─ 3x3, + time ─ norm, SiLU ─ 3x3, + x or 1x1 of x ─

Pictures are channels-last. A norm with its SiLU is one pass, and so is a convolution with all that
is added to its result. The time's embedding is added by the first convolution, as a residual with
one pixel for each row of the batch. Weights are laid out for the kernels once, when they arrive on
the card (`weights/channels_last.py`), and take no more memory there. Others, as on the CPU, are
laid out at each use.

The input of a block on the way up, x and the picture kept on the way down, stays stock's
concatenation: groups of its first norm lie across the seam (1280 and 640 channels in groups of 60),
so it cannot be normed in two parts, and a convolution with two sources would add the second in
another pass.
"""

from __future__ import annotations

from typing import Any

import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, ResBlock, Upsample
from torch import Tensor, nn
from torch.nn import functional

from ....kernels_cuda import KernelPolicy, conv2d, fold_upsample, group_norm_silu, upsample_conv2d
from ...vae.memory_limits import channels_last, weights
from ...weights.operands import operands
from ...weights.products import product
from .run import Part, run_of

# Pixels of an enlarged picture, over all rows of a batch, from which on sums of its convolution's
# taps are made. These sums take some ten passes over the weight, mostly in fp32, and save five of
# nine taps for each pixel. Predicted from data sheets, not measured: the two are equal at 2200
# pixels on an RTX 2060 Super, and at 5000 on an H200.
FOLDED_FROM = 4096


def obstacle(module: Any) -> str | None:
    """Why a part cannot be ours, in words a user understands."""
    convolutions = [one for one in module.modules() if isinstance(one, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    if not convolutions:
        return "it has no convolution"
    if not all(_is_served(one) for one in convolutions):
        return "its convolutions are of a kind without fused kernels"
    if isinstance(module, ResBlock) and (module.updown or module.use_scale_shift_norm or module.exchange_temb_dims):
        return "it is a residual block of a kind without fused kernels"
    return None


def _is_served(conv: Any) -> bool:
    if not isinstance(conv, nn.Conv2d) or conv.kernel_size not in ((1, 1), (3, 3)):
        return False
    taps = conv.kernel_size[0]
    plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    return plain and conv.padding == (taps // 2, taps // 2) and conv.stride in ((1, 1), (taps // 2 + 1, taps // 2 + 1))


# --------------------------------------------------------------------------------------------------------------- layers


def normed(norm: Any, x: Tensor, policy: KernelPolicy, *, silu: bool = True) -> Tensor:
    """Stock's GroupNorm of x [batch, c, h, w] fp16, channels-last, then SiLU."""
    with operands(x, policy, norm) as [own]:
        return group_norm_silu(x, norm.num_groups, own.weight, own.bias, eps=norm.eps, silu=silu, policy=policy)


def convolved(conv: Any, x: Tensor, policy: KernelPolicy, residual: Tensor | None = None) -> Tensor:
    """One of stock's Conv2d for x [batch, c, h, w] fp16, channels-last, plus a residual of its
    result's shape."""
    around = conv.padding[0]
    options: Any = {"stride": conv.stride[0], "padding": (around,) * 4, "policy": policy}
    with weights(conv, policy, x) as (weight, bias):
        return conv2d(x, weight, bias, residual=residual, **options)


# --------------------------------------------------------------------------------------------------------------- blocks


class FusedResidual(Part):
    """Mixed into stock's ResBlock."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        policy = self.policy_here(x)
        if policy is None:
            out: Tensor = super().forward(x, emb)  # type: ignore[misc]
            return out
        module: Any = self
        return residual(module, policy, x, run_of(module).activated(emb))


def residual(module: Any, policy: KernelPolicy, x: Tensor, emb: Tensor) -> Tensor:
    """Stock's ResBlock: x [batch, c, h, w] fp16, emb [batch, width] after its SiLU. Returns a new
    tensor, channels-last."""
    x = channels_last(x)
    first, last = module.in_layers[2], module.out_layers[3]
    time = None
    if not module.skip_t_emb:
        added = product(emb, module.emb_layers[1], policy)
        time = added[:, :, None, None].expand(x.shape[0], -1, *x.shape[2:])
    between = convolved(first, normed(module.in_layers[0], x, policy), policy, time)
    seen = normed(module.out_layers[0], between, policy)
    del between
    skip = module.skip_connection
    return convolved(last, seen, policy, x if isinstance(skip, nn.Identity) else convolved(skip, x, policy))


class FusedDownsample(Part):
    """Mixed into stock's Downsample."""

    def forward(self, x: Tensor) -> Tensor:
        policy = self.policy_here(x)
        if policy is None:
            out: Tensor = super().forward(x)  # type: ignore[misc]
            return out
        module: Any = self
        return convolved(module.op, channels_last(x), policy)


class FusedUpsample(Part):
    """Mixed into stock's Upsample."""

    def forward(self, x: Tensor, output_shape: torch.Size | None = None) -> Tensor:
        policy = self.policy_here(x)
        if policy is None:
            out: Tensor = super().forward(x, output_shape=output_shape)  # type: ignore[misc]
            return out
        module: Any = self
        height, width = (2 * side for side in x.shape[2:])
        size = (height, width) if output_shape is None else tuple(output_shape[2:])
        return enlarged(module.conv, policy, channels_last(x), size)


def enlarged(conv: Any, policy: KernelPolicy, x: Tensor, size: tuple[int, ...]) -> Tensor:
    """A convolution of x [batch, c, h, w], enlarged to this size by repetition. The size is twice
    x's, or one less if the picture on the way down had an odd side."""
    twice = size == (2 * x.shape[2], 2 * x.shape[3])
    if not twice or x.shape[0] * size[0] * size[1] < FOLDED_FROM:
        larger = functional.interpolate(x, size=size, mode="nearest")
        return convolved(conv, channels_last(larger), policy)
    with operands(x, policy, conv) as [own]:
        folded = fold_upsample(own.matrix)
        return upsample_conv2d(x, own.matrix, own.bias, folded=folded, policy=policy)


# ----------------------------------------------------------------------------------------------------------------- ends


class FusedFirst(Part):
    """Mixed into the convolution that takes the latents. From here on pictures are
    channels-last."""

    def forward(self, x: Tensor, *more: Any, **others: Any) -> Tensor:
        policy = None if more or others else self.policy_here(x)
        if policy is None:
            out: Tensor = super().forward(x, *more, **others)  # type: ignore[misc]
            return out
        return convolved(self, channels_last(x), policy)


class FusedLast(Part):
    """Mixed into the network's end: norm, SiLU, convolution. The result is contiguous, as the
    caller expects."""

    def forward(self, x: Tensor) -> Tensor:
        policy = self.policy_here(x)
        if policy is None:
            out: Tensor = super().forward(x)  # type: ignore[misc]
            return out
        module: Any = self
        return convolved(module[2], normed(module[0], channels_last(x), policy), policy).contiguous()


KINDS: dict[type[nn.Module], type[Part]] = {
    ResBlock: FusedResidual,
    Downsample: FusedDownsample,
    Upsample: FusedUpsample,
}
