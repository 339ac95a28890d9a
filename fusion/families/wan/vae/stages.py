"""The stages of a Wan VAE, as rows of the planner's table (`vae/video_plan.py`), and as the passage
runs them (`video_passage.py`).

A stage is some residual blocks and a resampling. Wan 2.1 has them in one flat list; Wan 2.2 has a
list of stages, each with a shortcut round it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
from torch import Tensor

from .....kernels_cuda import KernelPolicy
from ....vae.bands import DOWN, UP
from ....vae.video_passage import Half, Pieces
from ....vae.video_plan import Cut, Profile
from .layers import Caches, cached_conv, downsample, head, middle, residual_block, upsample

Resample = (comfy.ldm.wan.vae.Resample, comfy.ldm.wan.vae2_2.Resample)
DupUp3D = comfy.ldm.wan.vae2_2.DupUp3D


@dataclass(frozen=True)
class Stage:
    """Blocks at one size, and the resampling to the next."""

    blocks: list[Any]
    resample: Any = None
    shortcut: Any = None  # of Wan 2.2, round the whole stage
    entry: Any = None  # the encoder's first convolution
    exit: Any = None  # the decoder's head

    @property
    def upwards(self) -> bool:
        return self.resample is not None and self.resample.mode.startswith("up")

    @property
    def over_time(self) -> bool:
        return self.resample is not None and self.resample.mode.endswith("3d")

    def profile(self) -> Profile:
        """Its row in the table."""
        pairs = tuple((block.residual[2].in_channels, block.residual[6].in_channels) for block in self.blocks)
        others = [*([self.entry.in_channels] if self.entry else []), *([self.exit[2].in_channels] if self.exit else [])]
        last = pairs[-1][1]
        return Profile(
            blocks=pairs,
            others=tuple(others),
            resample=None if self.resample is None else UP if self.upwards else DOWN,
            over_time=self.over_time,
            out=self.resample.resample[1].out_channels if self.resample is not None else last,
            shortcut=self.shortcut is not None,
        )


def stages(half: Any) -> list[Stage]:
    """The stages of stock's Encoder3d or Decoder3d."""
    decodes = hasattr(half, "upsamples")
    found: list[dict[str, Any]] = []
    blocks: list[Any] = []
    for layer in half.upsamples if decodes else half.downsamples:
        inner = getattr(layer, "upsamples", None) or getattr(layer, "downsamples", None)
        if inner is not None:
            resample = inner[-1] if isinstance(inner[-1], Resample) else None
            found.append({"blocks": [b for b in inner if b is not resample], "resample": resample})
            found[-1]["shortcut"] = layer.avg_shortcut
        elif isinstance(layer, Resample):
            found.append({"blocks": blocks, "resample": layer})
            blocks = []
        else:
            blocks.append(layer)
    if blocks:
        found.append({"blocks": blocks})
    found[-1 if decodes else 0] |= {"exit": half.head} if decodes else {"entry": half.conv1}
    return [Stage(**parts) for parts in found]


# ------------------------------------------------------------------------------------------------------ stage by stage


def through(stage: Stage, policy: KernelPolicy, pieces: Iterable[Tensor], cut: Cut, *, remember: bool) -> Pieces:
    """The output of a stage for frames [b, c, t, h, w]. cut: the part of the image to pass on.

    remember: whether more than one piece comes.
    """
    caches: Caches = {} if remember else None
    first = True
    for x in pieces:
        box = [x]
        del x
        box.append(_compute(stage, policy, box.pop(), caches, cut, first))
        first = False
        yield box.pop()


def _compute(stage: Stage, policy: KernelPolicy, x: Tensor, caches: Caches, cut: Cut, first: bool) -> Tensor:
    if stage.entry is not None:
        x = cached_conv(stage.entry, policy, x, caches)
    skip = None
    if stage.shortcut is not None and not isinstance(stage.shortcut, DupUp3D):
        # It is smaller than x, so that x need not be kept for it.
        skip = stage.shortcut(cut.of(x) if stage.resample is None else cut.even(x))
    elif stage.shortcut is not None:
        skip = x
    for block in stage.blocks:
        x = residual_block(block, policy, x, caches)
    if stage.exit is not None:
        x = head(stage.exit, policy, x, caches)
    if stage.resample is None:
        x = cut.of(x)
        return x if skip is None else x.add_(skip)
    box = [cut.of(x)]
    del x
    if not stage.upwards:
        x = downsample(stage.resample, policy, box.pop(), caches)
        return x if skip is None else x.add_(skip)
    x = upsample(stage.resample, policy, box.pop(), caches, first)
    return x if skip is None else add_duplicated(x, cut.of(skip), stage.shortcut, first)


def add_duplicated(out: Tensor, x: Tensor, shortcut: Any, first: bool) -> Tensor:
    """out + stock's DupUp3D of x, in place: the channels of each pixel of x are dealt out over the
    frames and pixels that it becomes. The upsampled x is never stored. out [b, n, ft t, fs h, fs
    w]; for the very first frame only the last frame counts.

    The place of a value is frame i, row j and column k of its pixel's result, counted as one
    number. A channel of the result comes from `each` channels of x, and the first parts of the
    place choose one: i, or j if frames are not doubled. So x with its channels taken apart is added
    to out with its pixels taken apart: all places in one pass.
    """
    over_time, over_space = shortcut.factor_t, shortcut.factor_s
    places, n = (over_time, over_space, over_space), out.shape[1]
    each = left = x.shape[1] // n
    dealt = []
    for count in places:
        dealt.append(math.gcd(left, count))
        left //= dealt[-1]
    if left != 1 or each * n != x.shape[1] or any(d not in (1, count) for d, count in zip(dealt, places, strict=True)):
        raise ValueError(f"{x.shape[1]} channels cannot be dealt out to {n} over {places}")
    t, h, w = x.shape[2:]
    parts = x.view(x.shape[0], n, *dealt, t, h, w).permute(0, 1, 5, 2, 6, 3, 7, 4)  # b n t i h j w k
    frames = 1 if first else over_time
    wide = out.view(*out.shape[:2], t, frames, h, over_space, w, over_space)
    wide += parts[:, :, :, -1:] if first else parts
    return out


# ------------------------------------------------------------------------------------------------------------- halves


def half_of(vae: Any, decodes: bool, policy: KernelPolicy, fold: int, remember: bool) -> Half:
    """The decoder or the encoder of stock's WanVAE for one passage.

    fold      pixels of the image, on either side, that are one pixel to its convolutions
    remember  whether more than one piece comes
    """
    net = vae.decoder if decodes else vae.encoder
    return Half(
        stages=[partial(through, stage, policy, remember=remember) for stage in stages(net)],
        whole=partial(before_stages if decodes else behind_stages, net, policy, remember=remember),
        fold=fold,
        turned=comfy.ldm.wan.vae2_2.unpatchify if decodes else comfy.ldm.wan.vae2_2.patchify,
    )


def before_stages(decoder: Any, policy: KernelPolicy, pieces: Iterable[Tensor], remember: bool) -> Pieces:
    """The decoder's first convolution and its middle, whose attention needs whole frames."""
    caches: Caches = {} if remember else None
    for x in pieces:
        yield middle(decoder.middle, policy, cached_conv(decoder.conv1, policy, x, caches), caches)


def behind_stages(encoder: Any, policy: KernelPolicy, pieces: Iterable[Tensor], remember: bool) -> Pieces:
    """The encoder's middle, whose attention needs whole frames, and its head."""
    caches: Caches = {} if remember else None
    for x in pieces:
        yield head(encoder.head, policy, middle(encoder.middle, policy, x, caches), caches)
