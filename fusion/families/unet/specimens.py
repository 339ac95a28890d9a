"""Small specimens of stock's U-Net.

They contain every kind of part: residual blocks of equal and unequal widths, a smaller and a larger
picture, transformers after convolutions of single pixels (SD 1.5) and after products (SDXL), the
first convolution and the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.ldm.modules.diffusionmodules.openaimodel as stock
import comfy.ldm.modules.diffusionmodules.util
import torch
from comfy.ldm.modules import attention
from torch import Tensor

from ...base.specimen import Draw, Options, Specimen
from .net import _FusedNet, fuse
from .pictures import FusedDownsample, FusedResidual, FusedUpsample
from .transformer import FusedTransformer, FusedTransformerBlock

WIDTH, CONTEXT, LABELS, TEXT, SIDE = 64, 64, 32, 7, 8
SOURCE = (stock, attention, comfy.ldm.modules.diffusionmodules.util)
PARTS = (attention.CrossAttention, attention.FeedForward, attention.GEGLU)


def specimens() -> Sequence[Specimen]:
    replaces: dict[type, type] = {
        _FusedNet: stock.UNetModel,
        FusedResidual: stock.ResBlock,
        FusedDownsample: stock.Downsample,
        FusedUpsample: stock.Upsample,
        FusedTransformer: attention.SpatialTransformer,
        FusedTransformerBlock: attention.BasicTransformerBlock,
    }
    sd15 = partial(_built, use_linear_in_transformer=False, disable_self_attentions=[True, False])
    sdxl = partial(_built, use_linear_in_transformer=True, num_classes="sequential", adm_in_channels=LABELS)
    return (
        Specimen("U-Net of SD 1.5's kind", sd15, _called, fuse, replaces, (*SOURCE, *PARTS), patches=PATCHES),
        Specimen("U-Net of SDXL's kind", sdxl, _called, fuse, replaces, (*SOURCE, *PARTS), patches=PATCHES),
    )


def _patched(n: Tensor, context: Tensor, value: Tensor, extra: Options) -> tuple[Tensor, Tensor, Tensor]:
    """A node's patch on the inputs of an attention."""
    return n * (1 + 0.01 * extra["n_heads"]), context * 1.1, (context if value is None else value) * 0.9


def _patched_behind(x: Tensor, extra: Options) -> Tensor:
    size, place = int(extra["dim_head"]), int(extra.get("block_index", 0))
    return x * (1.1 + 0.001 * size + 0.01 * place)


PATCHES: dict[str, Any] = {
    **dict.fromkeys(("attn1_patch", "attn2_patch"), _patched),
    **dict.fromkeys(("attn1_output_patch", "attn2_output_patch", "middle_patch"), _patched_behind),
}


def _built(draw: Draw, **kind: Any) -> Any:
    return stock.UNetModel(
        image_size=SIDE,
        in_channels=4,
        out_channels=4,
        model_channels=WIDTH,
        num_res_blocks=[1, 1],
        channel_mult=(1, 2),
        num_head_channels=64,
        use_spatial_transformer=True,
        transformer_depth=[1, 0],
        transformer_depth_output=[1, 1, 0, 0],
        transformer_depth_middle=1,
        context_dim=CONTEXT,
        legacy=False,
        dtype=draw.dtype,
        device=draw.device,
        operations=draw.operations,
        **kind,
    )


def _called(net: Any, draw: Draw, options: Options) -> Tensor:
    x = draw(2, 4, SIDE, SIDE)
    times = torch.tensor([500.0, 20.0], device=draw.device)
    y = None if net.num_classes is None else draw(2, LABELS)
    out: Tensor = net(x, times, draw(2, TEXT, CONTEXT), y, None, options)
    return out
