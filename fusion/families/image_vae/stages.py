"""Stock's encoder and decoder as stages: some residual blocks at one size, and the resampling that leads there or away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comfy.ldm.modules.diffusionmodules.model import AttnBlock, Decoder, Downsample, Encoder, ResnetBlock, Upsample
from torch import nn

from ...vae.memory_limits import IN_ONE_PIECE
from .plan import Kind, Picture, Way, middle, whole_stage


@dataclass(frozen=True)
class Stage:
    """entry: what makes its first picture, an Upsample, a Downsample or the encoder's first convolution; None: it is there."""

    entry: Any
    blocks: tuple[Any, ...]

    @property
    def kind(self) -> Kind:
        if isinstance(self.entry, Upsample):
            return "up"
        return "down" if isinstance(self.entry, Downsample) else "enter"

    @property
    def channels(self) -> int:
        channels: int = self.blocks[-1].out_channels
        return channels

    @property
    def into(self) -> int:
        """Channels of its first picture."""
        channels: int = self.blocks[0].in_channels
        return channels


def stages(half: Any) -> list[Stage]:
    """Of stock's Encoder or Decoder, in the order in which they run."""
    found: list[Stage] = []
    if isinstance(half, Decoder):
        entry = None
        for level in reversed(half.up):
            found.append(Stage(entry, tuple(level.block)))
            entry = getattr(level, "upsample", None)
        return found
    entry = half.conv_in
    for level in half.down:
        found.append(Stage(entry, tuple(level.block)))
        entry = getattr(level, "downsample", None)
    return found


def obstacle(half: Any) -> str | None:
    """Why an encoder or a decoder is not one of those that are served, in words a user understands."""
    if type(half) not in (Encoder, Decoder) or half.carried:
        return "it is of another kind"
    levels = half.up if isinstance(half, Decoder) else half.down
    inner = [module for module in half.modules() if isinstance(module, nn.Conv2d | nn.Conv3d | nn.GroupNorm)]
    if any(isinstance(module, nn.Conv3d) for module in inner):
        return "it is for videos"
    if any(len(level.attn) for level in levels) or getattr(half, "tanh_out", False):
        return "it has layers that no published one has"
    blocks = [*(block for level in levels for block in level.block), half.mid.block_1, half.mid.block_2]
    if any(
        type(block) is not ResnetBlock or block.use_conv_shortcut or hasattr(block, "temb_proj") for block in blocks
    ):
        return "its blocks are of another kind"
    if type(half.mid.attn_1) is not AttnBlock:
        return "its attention is of another kind"
    resamplings = [stage.entry for stage in stages(half) if isinstance(stage.entry, Upsample | Downsample)]
    if not all(each.with_conv for each in resamplings):
        return "it resamples without convolutions"
    return None


# ------------------------------------------------------------------------------------------------------------- the way


@dataclass(frozen=True)
class Journey:
    """How a picture passes through a half of a VAE.

    whole  the stages that it passes as a whole: a decoder's first, an encoder's last
    way    of the others, which it passes in bands; None: there are none
    middle, needs  bytes that the middle, and each of the whole stages, need at a time
    """

    whole: tuple[Stage, ...]
    banded: tuple[Stage, ...]
    way: Way | None
    middle: int
    needs: tuple[int, ...]

    @property
    def most(self) -> int:
        return max([self.middle, *self.needs])

    @property
    def piece(self) -> int:
        """Bytes of the one piece of memory that all of it passes through, if it passes whole."""
        return int(IN_ONE_PIECE * self.most)


def journey(half: Any, height: int, width: int, item: int, room: int) -> Journey:
    """For a latent of a decoder, or pixels of an encoder, of this size. room: bytes for what passes whole."""
    all_stages = stages(half)
    decodes = isinstance(half, Decoder)
    sizes = _sizes(height, width, len(all_stages), decodes)
    areas = [h * w for h, w in sizes]
    # A stage and, while its first picture is made, what that is made of.
    needs = [
        max(
            whole_stage(stage.into, stage.channels, len(stage.blocks), area, item),
            (stage.into * area + _made_of(all_stages, k) * (areas[k - 1] if k else 0)) * item,
        )
        for k, (stage, area) in enumerate(zip(all_stages, areas, strict=True))
    ]
    if decodes:  # and beside the last picture, normed, what leaves for the host
        needs[-1] = max(
            needs[-1], (2 * all_stages[-1].channels * item + half.conv_out.out_channels * (item + 8)) * areas[-1]
        )
    inner = all_stages[0].into if decodes else all_stages[-1].channels
    within = middle(inner, areas[0 if decodes else -1], item)
    fits = [need <= room for need in needs]
    count = len(fits)
    if decodes:
        split = next((k for k in range(count) if not fits[k]), count)
        whole, banded = all_stages[:split], all_stages[split:]
        seen = needs[:split]
    else:
        split = next((k for k in reversed(range(count)) if not fits[k]), -1) + 1
        whole, banded = all_stages[split:], all_stages[:split]
        seen = needs[split:]
    way = None
    if banded and decodes:
        way = _way(banded, sizes[max(0, split - 1) :], half.conv_out.out_channels, item)
    elif banded:
        way = _way(banded, [sizes[0], *sizes], 0, item, pixels=half.conv_in.in_channels)
    return Journey(tuple(whole), tuple(banded), way, within, tuple(seen))


def _made_of(all_stages: Sequence[Stage], k: int) -> int:
    return all_stages[k - 1].channels if k else 0


def _sizes(height: int, width: int, count: int, decodes: bool) -> list[tuple[int, int]]:
    return [(height << k, width << k) if decodes else (height >> k, width >> k) for k in range(count)]


def _way(
    banded: Sequence[Stage], sizes: Sequence[tuple[int, int]], exits: int, item: int, pixels: int | None = None
) -> Way:
    """sizes: of what the bands begin with, and, unless that is the first stage's own, of each stage."""
    first = banded[0]
    entered = first.entry is not None
    channels = pixels if pixels is not None else _source_channels(first)
    found = [Picture("given", channels, *sizes[0], 0, 0, normed=not entered)]
    for number, stage in enumerate(banded):
        height, width = sizes[number + 1] if entered else sizes[number]
        if stage.entry is not None:
            found.append(Picture(stage.kind, stage.into, height, width, len(found) - 1, number))
        for place, block in enumerate(stage.blocks):
            source = len(found) - 1
            found.append(Picture("inner", block.out_channels, height, width, source, number))
            # What a resampling follows, or what leaves the bands, is not normed within them.
            is_last = place == len(stage.blocks) - 1 and not (exits and number == len(banded) - 1)
            widens = block.in_channels != block.out_channels
            found.append(
                Picture("block", block.out_channels, height, width, source, number, widens=widens, normed=not is_last)
            )
    return Way(tuple(found), exits, item)


def _source_channels(stage: Stage) -> int:
    channels: int = stage.blocks[0].in_channels if stage.entry is None else stage.entry.conv.in_channels
    return channels


def modules(banded: Sequence[Stage]) -> list[Any]:
    """Of the pictures of a way, the module that makes each: a resampling or a block. None for what the bands begin with."""
    found: list[Any] = [None]
    for stage in banded:
        found += [] if stage.entry is None else [stage.entry]
        for block in stage.blocks:
            found += [block, block]
    return found
