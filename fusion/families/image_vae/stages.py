"""The table of stock's encoder and decoder: residual blocks at one size, and the resampling before
them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from comfy.ldm.modules.diffusionmodules.model import AttnBlock, Decoder, Downsample, Encoder, ResnetBlock, Upsample
from torch import nn

from ...vae.bands import CONV, DOWN, UP
from ...vae.picture_stages import Stage, Table


def table(half: Any) -> Table:
    """The table of stock's Encoder or Decoder."""
    decodes = isinstance(half, Decoder)
    image = half.conv_out.out_channels if decodes else half.conv_in.in_channels
    return Table(tuple(_row(entry, blocks) for entry, blocks in _levels(half)), decodes, image)


def _levels(half: Any) -> Iterator[tuple[Any, Any]]:
    """The entry and the blocks of each stage, in the order in which they run."""
    decodes = isinstance(half, Decoder)
    entry = None if decodes else half.conv_in
    for level in reversed(half.up) if decodes else half.down:
        yield entry, level.block
        entry = getattr(level, "upsample" if decodes else "downsample", None)


def _row(entry: Any, blocks: Any) -> Stage:
    widths = tuple((block.in_channels, block.out_channels) for block in blocks)
    if entry is None:
        return Stage(None, 0, widths, tuple(blocks))
    layer = UP if isinstance(entry, Upsample) else DOWN if isinstance(entry, Downsample) else CONV
    source = entry.in_channels if layer is CONV else entry.conv.in_channels
    return Stage(layer, source, widths, (entry, *blocks))


def obstacle(half: Any) -> str | None:
    """Why an encoder or a decoder is not served, in words a user understands; None: it is."""
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
    resamplings = [entry for entry, _ in _levels(half) if isinstance(entry, Upsample | Downsample)]
    if not all(each.with_conv for each in resamplings):
        return "it resamples without convolutions"
    return None
