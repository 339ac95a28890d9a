"""MiniMax H3: prompt, references, sound and video in one stream of tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...base.family import Expected, Family, Late, Role
from ...files.repeated_blocks import expected, prefix_of, published_counts

if TYPE_CHECKING:
    from ....memory import WeightFile

QKV = re.compile(r"(model\.diffusion_model\.|)blocks\.\d+\.attn\.qkv_proj\.weight")
BESIDE = ("audio_patch_proj.weight",)
LISTS = "blocks", "token_refiner.blocks"
ENDS = "video_patch_proj.weight", "audio_patch_proj.weight", "condition_proj.weight", "final_layer.video_out.weight"
# Numbers of blocks, by width.
PUBLISHED = {5376: (50, 2)}
# Text encoders by the width of a prompt's tokens.
ENCODERS = {5120: "Qwen3-VL 32B, type minimax,"}


def _prefix(header: WeightFile) -> str | None:
    return prefix_of(header, QKV, BESIDE)


def _is_minimax_h3(header: WeightFile) -> bool:
    return _prefix(header) is not None


def _expects(header: WeightFile) -> Expected:
    prefix = _prefix(header) or ""
    return expected(header, prefix, LISTS, ENDS, published_counts(header, prefix + ENDS[0], LISTS, PUBLISHED))


def _reads(net: Any) -> tuple[int, str | None] | None:
    width = getattr(net.condition_proj, "in_features", None)
    return None if width is None else (width, ENCODERS.get(width))


MINIMAX_H3 = Family(
    name="MiniMax H3",
    role=Role.DIFFUSION,
    covers="MiniMax H3, pruned too, where a card has no BF16, around an FP32 stream (with BF16 it streams as all others do)",
    recognises=_is_minimax_h3,
    fuse=Late(__package__, "block:fuse"),
    ops=(
        "attention",
        "codes_to_half",
        "codes_to_int8",
        "int8_to_half",
        "linear",
        "linear_",
        "linear_int4",
        "linear_int4_",
        "linear_int4_pair",
        "linear_int8",
        "linear_int8_",
        "linear_int8_pair",
        "linear_pair",
        "norm_modulate",
        "norm_to_int4",
        "norm_to_int8",
        "rms_rope_",
        "rows_to_int4",
        "rows_to_int8",
        "silu_mul",
        "to_half",
    ),
    types=("float16", "float32"),
    as_stock_chooses=True,
    need=Late(__package__, "need:need"),
    cost=Late(__package__, "cost:cost"),
    expects=_expects,
    reads=_reads,
    specimens=Late(__package__, "specimens:specimens"),
)
