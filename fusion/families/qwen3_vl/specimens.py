"""A small specimen of stock's Qwen3-VL, and a prompt with two pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.text_encoders.llama
import comfy.text_encoders.qwen3vl as stock
import comfy.text_encoders.qwen35 as stocks_vision
import comfy.text_encoders.qwen_vl

from ....kernels_cuda import KernelPolicy
from ...base.hooks import SPECIMEN_KIND
from ...base.specimen import Draw, Options, Specimen
from ...text import specimens as language
from ...text.stack import fuse as fuse_language
from ...text.vision.qwen3_vl import CutsOnTheDevice, FusedBlock, FusedMerger, FusedTower
from ...text.vision.towers import fuse

CONFIG = {**language.CONFIG, "lm_head": True}
TOWER = {
    "hidden_size": 128, "intermediate_size": 192, "depth": 2, "num_heads": 2, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
SIZES = (64, 96), (64, 64)
REPLACES: dict[type, type] = {
    **language.replaces(comfy.text_encoders.llama.TransformerBlock, writes=True),
    FusedTower: stock.Qwen3VLVisionModel,
    FusedBlock: stocks_vision.Qwen35VisionBlock,
    FusedMerger: stock.Qwen3VLDeepstackMerger,
    CutsOnTheDevice: stock.Qwen3VL,
}
PARTS = (
    stocks_vision.Qwen35VisionAttention,
    stocks_vision.Qwen35VisionMLP,
    stocks_vision.Qwen35VisionPatchEmbed,
    stocks_vision.Qwen35VisionPatchMerger,
    stocks_vision.Qwen35VisionRotaryEmbedding,
    stock.Qwen3VLClipModel,
)
SOURCE = (
    *language.SOURCE,
    comfy.text_encoders.llama.TransformerBlock,
    stock,
    stocks_vision,
    comfy.text_encoders.qwen_vl,
    *PARTS,
)


def specimens() -> Sequence[Specimen]:
    return (Specimen("Qwen3-VL encoder", _built, _called, _fused, REPLACES, SOURCE),)


def _fused(model: Any, policy: KernelPolicy) -> int:
    return min(fuse_language(model, policy, on_cpu=True), fuse(model, policy, on_cpu=True))


def _built(draw: Draw) -> Any:
    """Stock's own encoder, which reads the sizes of the vision tower from a table."""
    stock.QWEN3VL_VISION[SPECIMEN_KIND] = TOWER
    stock.QWEN3VL_CONFIGS[SPECIMEN_KIND] = comfy.text_encoders.llama.Qwen3VL_8BConfig
    options = {
        "custom_operations": draw.operations,
        "model_name": SPECIMEN_KIND,
        f"{SPECIMEN_KIND}_model_config": CONFIG,
    }
    try:
        model = stock.Qwen3VLClipModel(
            device=draw.device, dtype=draw.dtype, model_options=options, model_type=SPECIMEN_KIND
        )
    finally:
        del stock.QWEN3VL_VISION[SPECIMEN_KIND], stock.QWEN3VL_CONFIGS[SPECIMEN_KIND]
    model.set_clip_options({"execution_device": draw.device})
    return model


def _called(model: Any, draw: Draw, _options: Options) -> Any:
    wide, square = (draw(1, *size, 3).float().sigmoid() for size in SIZES)
    pictures = [{"type": "image", "data": one, "original_type": "image"} for one in (wide, square)]
    prompt = [10, pictures[0], 19, 20, pictures[1], 6, 17, 15]
    return language.read(model, [prompt], (("hidden", -1),)), language.written(model, prompt, (language.LIKELIEST,))
