"""LTX-2 and LTX-2.3: a stream of a video and one of its sound, which look at each other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...base.family import Expected, Family, Late, Role
from ...files.repeated_blocks import expected, prefix_of, published_counts

if TYPE_CHECKING:
    from ....memory import WeightFile

QUERY = re.compile(r"(model\.diffusion_model\.|)transformer_blocks\.\d+\.audio_to_video_attn\.to_q\.weight")
BESIDE = ("audio_patchify_proj.weight", "audio_proj_out.weight")
LISTS = ("transformer_blocks",)
ENDS = "patchify_proj.weight", "proj_out.weight", *BESIDE
# Numbers of blocks, by the video's width.
PUBLISHED = {4096: (48,)}


def _prefix(header: WeightFile) -> str | None:
    return prefix_of(header, QUERY, BESIDE)


def _is_ltx2(header: WeightFile) -> bool:
    return _prefix(header) is not None


def _expects(header: WeightFile) -> Expected:
    prefix = _prefix(header) or ""
    return expected(header, prefix, LISTS, ENDS, published_counts(header, prefix + ENDS[0], LISTS, PUBLISHED))


LTX_2 = Family(
    name="LTX-2",
    role=Role.DIFFUSION,
    covers="LTX-2 and LTX-2.3 where a card has no BF16, around an FP32 stream (with BF16, and LTX-Video 0.9, they stream as all "
    "others do)",
    recognises=_is_ltx2,
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
        "linear_int8",
        "linear_int8_",
        "norm_modulate",
        "norm_to_int4",
        "norm_to_int8",
        "rms_rope_",
        "rows_to_int4",
        "rows_to_int8",
        "to_half",
    ),
    types=("float16", "float32"),
    as_stock_chooses=True,
    need=Late(__package__, "need:need"),
    in_pieces=True,
    cost=Late(__package__, "cost:cost"),
    expects=_expects,
    specimens=Late(__package__, "specimens:specimens"),
)
