"""Small specimens of stock's vision towers, for the families of language models that have them.

Qwen2.5-VL's sizes are in its constructors, and it has 630 million weights, so its class is built
here around a small tower; and windows are cut at the edges of its pictures. Qwen3-VL's tower is
compared within its language model.
"""

from __future__ import annotations

from typing import Any

import torch
from comfy import clip_model
from comfy.text_encoders import llama, qwen_vl
from torch import nn

from ....kernels_cuda import KernelPolicy
from ...base.specimen import Draw, Options, Specimen
from ..encoder import clip
from . import qwen2_vl, siglip

WIDTH, HEADS = 160, 2
LAYERS = 8  # of Qwen2.5-VL: the last one sees whole pictures
SIZES = (112, 280), (260, 140)  # height and width of pictures
FRAMES = (2, 10, 6)  # frames, rows and columns of patches
SIGLIP = {
    **llama.GEMMA3_VISION_CONFIG, "hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 200,
    "num_hidden_layers": 3, "image_size": 42,
}  # fmt: skip


class SmallQwen2VL(llama.Qwen25_7BVLI):
    """Stock's class without its language model, and with a small tower."""

    def __init__(self, draw: Draw) -> None:
        nn.Module.__init__(self)
        placed = {"device": draw.device, "dtype": draw.dtype, "ops": draw.operations}
        self.visual = qwen_vl.Qwen2VLVisionTransformer(WIDTH, 64, 84, HEADS, LAYERS, **placed)


def of_qwen2_vl() -> Specimen:
    replaces: dict[type, type] = {
        qwen2_vl.FusedTower: qwen_vl.Qwen2VLVisionTransformer,
        qwen2_vl.FusedBlock: qwen_vl.VisionBlock,
        qwen2_vl.CutsOnTheDevice: llama.Qwen25_7BVLI,
    }
    parts = (
        qwen_vl.VisionAttention,
        qwen_vl.VisionMLP,
        qwen_vl.VisionPatchEmbed,
        qwen_vl.PatchMerger,
        qwen_vl.VisionRotaryEmbedding,
    )
    return Specimen("Qwen2.5-VL vision tower", SmallQwen2VL, _pictures, _fuse_qwen2_vl, replaces, (qwen_vl, *parts))


def of_siglip() -> Specimen:
    replaces: dict[type, type] = {clip.FusedEncoder: clip_model.CLIPEncoder, clip.FusedLayer: clip_model.CLIPLayer}
    parts = (clip_model.CLIPVision, clip_model.CLIPMLP, clip_model.CLIPAttention)
    return Specimen("SigLIP", _built_siglip, _pixels, _fuse_siglip, replaces, (clip_model, *parts))


def _pictures(model: Any, draw: Draw, _options: Options) -> Any:
    """Two pictures as a prompt has them, and one of two frames beside another."""
    drawn = ({"type": "image", "data": draw(1, *size, 3).float().sigmoid()} for size in SIZES)
    grid = torch.tensor([FRAMES, (1, 4, 12)])
    frames = draw(int(grid.prod(1).sum()), 3 * 2 * 14 * 14, dtype=torch.float32)
    return [model.preprocess_embed(one, draw.device)[0] for one in drawn], model.visual(frames, grid)


def _fuse_qwen2_vl(model: Any, policy: KernelPolicy) -> int:
    return qwen2_vl.fuse(model, policy, on_cpu=True)


def _built_siglip(draw: Draw) -> nn.Module:
    model: nn.Module = clip_model.CLIPVision(SIGLIP, draw.dtype, draw.device, draw.operations)
    return model


def _pixels(model: Any, draw: Draw, _options: Options) -> Any:
    """The output, and that of the last layer but one."""
    pixels = draw(2, 3, SIGLIP["image_size"], SIGLIP["image_size"], dtype=torch.float32)
    return model(pixels), model(pixels, intermediate_output=-2)[1]


def _fuse_siglip(model: Any, policy: KernelPolicy) -> int:
    return siglip.fuse(model, policy, on_cpu=True)
