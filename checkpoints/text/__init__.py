"""Text encoders, and CLIP's picture tower: tensor names of the published files.

    t5               UMT5, T5 v1.1 XXL and ByT5
    towers           CLIP's text tower, and its picture tower
    decoders         Qwen, Gemma, Mistral and Llama
    vision_language  those of them with a vision tower: Qwen-VL and Gemma 3

Where the tokenizer is stock's own, its ids lie far beyond the small vocabulary: encode from ids.
Other sizes reach stock through `load_clip`'s model options (`options.py` makes them from a file).
Other spellings of these encoders are in `spellings.py`.
"""

from __future__ import annotations

from .decoders import (
    GEMMA2,
    GEMMA3_4B,
    LLAMA3,
    MINISTRAL3,
    MISTRAL3,
    QWEN3,
    QWEN3_06B,
    QWEN3_8B,
    QWEN25,
    LlamaSize,
    llama,
)
from .t5 import BUCKETS, BYT5, T5_WIDTH, T5XXL, UMT5, Umt5Size, t5xxl, umt5
from .towers import (
    CLIP_G_FFN,
    CLIP_G_LAYERS,
    CLIP_HEAD,
    CLIP_LAYERS,
    CLIP_VISION,
    CLIP_VISION_H,
    CLIP_WIDTH,
    VISION_HEADS,
    VISION_PATCH,
    VISION_SIDE,
    ClipVisionSize,
    clip,
    clip_vision,
)
from .vision_language import (
    GEMMA3,
    GEMMA_PATCH,
    KREA2_TE,
    MINIMAX_H3_TE,
    QWEN3_VISION_HEAD,
    QWEN3_VL,
    QWEN25_VISION_HEAD,
    QWEN25_VL,
    SIGLIP_HEAD,
    Gemma3Size,
    Qwen3VLSize,
    Qwen25VLSize,
    gemma3,
    minimax_h3_te,
    qwen3_vl,
    qwen25_vl,
)

__all__ = [
    "BUCKETS",
    "BYT5",
    "CLIP_G_FFN",
    "CLIP_G_LAYERS",
    "CLIP_HEAD",
    "CLIP_LAYERS",
    "CLIP_VISION",
    "CLIP_VISION_H",
    "CLIP_WIDTH",
    "GEMMA2",
    "GEMMA3",
    "GEMMA3_4B",
    "GEMMA_PATCH",
    "KREA2_TE",
    "LLAMA3",
    "MINIMAX_H3_TE",
    "MINISTRAL3",
    "MISTRAL3",
    "QWEN3",
    "QWEN3_06B",
    "QWEN3_8B",
    "QWEN3_VISION_HEAD",
    "QWEN3_VL",
    "QWEN25",
    "QWEN25_VISION_HEAD",
    "QWEN25_VL",
    "SIGLIP_HEAD",
    "T5XXL",
    "T5_WIDTH",
    "UMT5",
    "VISION_HEADS",
    "VISION_PATCH",
    "VISION_SIDE",
    "ClipVisionSize",
    "Gemma3Size",
    "LlamaSize",
    "Qwen3VLSize",
    "Qwen25VLSize",
    "Umt5Size",
    "clip",
    "clip_vision",
    "gemma3",
    "llama",
    "minimax_h3_te",
    "qwen3_vl",
    "qwen25_vl",
    "t5xxl",
    "umt5",
]
