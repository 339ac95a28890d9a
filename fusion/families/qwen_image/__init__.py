"""Qwen-Image: picture and prompt, each with its own weights, attend jointly in every block."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...base.family import Expected, Family, Late, Role
from ...files.repeated_blocks import expected, prefix_of, published_counts

if TYPE_CHECKING:
    from ....memory import WeightFile

# Lens has such norms and other projections, diffusers' Flux and Stable Diffusion 3 other modulation.
PROJECTION = re.compile(r"(model\.diffusion_model\.|)transformer_blocks\.\d+\.attn\.add_(q|k|v)_proj\.weight")
BESIDE = ("txt_norm.weight", "img_in.weight")
# How names begin that only ControlNets have.
RELATIVES = ("controlnet_", "control_")
PROMPT = "txt_norm.weight"
MAGE_FLOW = 2560  # width of its prompt's tokens: the same blocks in another network of stock's
LISTS = ("transformer_blocks",)
ENDS = "img_in.weight", "txt_norm.weight", "txt_in.weight", "proj_out.weight"
# Number of blocks, by width.
PUBLISHED = {3072: (60,)}
# Text encoders by the width of a prompt's tokens.
ENCODERS = {3584: "qwen_2.5_vl_7b_fp8_scaled.safetensors, type qwen_image,"}


def _prefix(header: WeightFile) -> str | None:
    prefix = prefix_of(header, PROJECTION, BESIDE)
    if prefix is None or any(name.startswith(tuple(prefix + one for one in RELATIVES)) for name in header.extents):
        return None
    prompt = header.extents.get(prefix + PROMPT)
    return None if prompt is not None and tuple(prompt.shape) == (MAGE_FLOW,) else prefix


def _is_qwen_image(header: WeightFile) -> bool:
    return _prefix(header) is not None


def _expects(header: WeightFile) -> Expected:
    prefix = _prefix(header) or ""
    return expected(header, prefix, LISTS, ENDS, published_counts(header, prefix + ENDS[0], LISTS, PUBLISHED))


def _reads(net: Any) -> tuple[int, str | None] | None:
    width = getattr(net.txt_in, "in_features", None)
    return None if width is None else (width, ENCODERS.get(width))


QWEN_IMAGE = Family(
    name="Qwen-Image",
    role=Role.DIFFUSION,
    covers="Qwen-Image (2512 too), Qwen-Image Edit (2509 and 2511 too) and Qwen-Image Layered: FP16 products around an "
    "FP32 stream",
    recognises=_is_qwen_image,
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
    need=Late(__package__, "need:need"),
    cost=Late(__package__, "cost:cost"),
    expects=_expects,
    vaes={16: "qwen_image_vae.safetensors"},
    reads=_reads,
    specimens=Late(__package__, "specimens:specimens"),
)
