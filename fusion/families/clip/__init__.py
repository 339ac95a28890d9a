"""CLIP's text encoders: CLIP-L, CLIP-G and OpenCLIP H, alone or within a whole checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.family import Family, Late, Role

if TYPE_CHECKING:
    from ....memory import WeightFile

TABLES = "text_model.embeddings.token_embedding.weight", "text_model.embeddings.position_embedding.weight"
LAYER = ".self_attn.q_proj.weight"
LAYERS = "text_model.encoder.layers."


def _is_clip(header: WeightFile) -> bool:
    """Also a whole CLIP with its vision tower, of which ComfyUI's text encoder takes its half."""
    names = header.extents.keys()
    return names >= set(TABLES) and any(name.startswith(LAYERS) and name.endswith(LAYER) for name in names)


CLIP = Family(
    name="CLIP",
    role=Role.TEXT,
    covers="CLIP-L, CLIP-G and OpenCLIP H (Stable Diffusion, SDXL): FP16 products around an FP32 stream",
    recognises=_is_clip,
    fuse=Late(__package__, "encoder:fuse"),
    ops=(
        "attention",
        "codes_to_half",
        "codes_to_int8",
        "gelu",
        "int8_to_half",
        "join_sums",
        "linear",
        "linear_",
        "norm_modulate",
        "to_half",
    ),
    specimens=Late(__package__, "specimens:specimens"),
)
