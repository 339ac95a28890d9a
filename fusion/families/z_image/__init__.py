"""Z-Image and Lumina Image 2: prompt and picture refined apart, then one stream of both."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...base.family import Expected, Family, Late, Role
from ...files.repeated_blocks import expected, prefix_of, published_counts

if TYPE_CHECKING:
    from ....memory import WeightFile

NORM = re.compile(
    r"(model\.diffusion_model\.|)(layers|noise_refiner|context_refiner)\.\d+\.attention\.(q|k)_norm\.weight"
)
BESIDE = ("cap_embedder.1.weight", "final_layer.linear.weight")
LISTS = "layers", "noise_refiner", "context_refiner"
ENDS = "cap_embedder.0.weight", "cap_embedder.1.weight", "x_embedder.weight"
# Numbers of blocks, by width: Z-Image, Lumina Image 2.
PUBLISHED = {3840: (30, 2, 2), 2304: (26, 2, 2)}
# Text encoders by the width of a prompt's tokens.
ENCODERS = {
    2560: "qwen_3_4b.safetensors, type lumina2,",
    2304: "gemma_2_2b_fp16.safetensors, type lumina2,",
}


def _prefix(header: WeightFile) -> str | None:
    return prefix_of(header, NORM, BESIDE)


def _is_z_image(header: WeightFile) -> bool:
    return _prefix(header) is not None


def _expects(header: WeightFile) -> Expected:
    prefix = _prefix(header) or ""
    return expected(header, prefix, LISTS, ENDS, published_counts(header, prefix + BESIDE[0], LISTS, PUBLISHED))


def _reads(net: Any) -> tuple[int, str | None] | None:
    width = getattr(net.cap_embedder[-1], "in_features", None)
    return None if width is None else (width, ENCODERS.get(width))


Z_IMAGE = Family(
    name="Z-Image",
    role=Role.DIFFUSION,
    covers="Z-Image (Turbo, Base, Edit) and Lumina Image 2",
    recognises=_is_z_image,
    fuse=Late(__package__, "block:fuse"),
    ops=(
        "attention",
        "codes_to_half",
        "codes_to_int8",
        "gated_residual",
        "gated_residual_",
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
    need=Late(__package__, "need:need"),
    cost=Late(__package__, "cost:cost"),
    expects=_expects,
    vaes={16: "ae.safetensors"},
    reads=_reads,
    specimens=Late(__package__, "specimens:specimens"),
)
