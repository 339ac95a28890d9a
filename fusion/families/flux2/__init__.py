"""Flux.2, Flux.1 and Chroma: two streams of tokens that attend jointly, then one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...base.family import Expected, Family, Late, Role
from ...files.repeated_blocks import expected, prefix_of, published_counts

if TYPE_CHECKING:
    from ....memory import WeightFile

NORM = re.compile(r"(model\.diffusion_model\.|)double_blocks\.\d+\.img_attn\.norm\.(key|query)_norm\.(scale|weight)")
# Names that relatives with such blocks lack: HunyuanVideo refines its text, ControlNets have no
# last layer.
BESIDE = ("txt_in.weight", "final_layer.linear.weight")
# How names begin that only relatives have: HunyuanVideo, HunyuanImage and Hunyuan3D.
RELATIVES = ("txt_in.individual_token_refiner.", "latent_in.", "cond_in.")
LISTS = "double_blocks", "single_blocks"
END = "txt_in.weight"
SHARED = "single_stream_modulation.lin.weight"  # only in Flux.2
# Numbers of its blocks by width: klein 4B and 9B, dev. Flux.1 is left out, because many shortened
# versions exist.
PUBLISHED = {3072: (5, 20), 4096: (8, 24), 6144: (8, 48)}
# VAEs by the channels of the latents: a latent of Flux.2 folds four pixels of its VAE's latents.
VAES = {16: "ae.safetensors", 128: "flux2-vae.safetensors"}
# Text encoders by the width of a prompt's tokens: Flux.2 reads three layers of a language model,
# concatenated.
ENCODERS = {
    7680: "qwen_3_4b.safetensors, type flux2,",
    12288: "qwen_3_8b_fp8mixed.safetensors, type flux2,",
    15360: "mistral_3_small_flux2_fp8.safetensors, type flux2,",
    4096: "t5xxl_fp16.safetensors (for Flux.1 with clip_l.safetensors as second file; for Chroma type chroma)",
    3584: "qwen_2.5_vl_7b.safetensors, type longcat_image,",
}


def _prefix(header: WeightFile) -> str | None:
    prefix = prefix_of(header, NORM, BESIDE)
    if prefix is None or any(name.startswith(tuple(prefix + one for one in RELATIVES)) for name in header.extents):
        return None
    return prefix


def _is_flux(header: WeightFile) -> bool:
    return _prefix(header) is not None


def _expects(header: WeightFile) -> Expected:
    prefix = _prefix(header) or ""
    known = PUBLISHED if prefix + SHARED in header.extents else {}
    return expected(header, prefix, LISTS, (END,), published_counts(header, prefix + END, LISTS, known))


def _reads(net: Any) -> tuple[int, str | None] | None:
    width = getattr(net.txt_in, "in_features", None)
    return None if width is None else (width, ENCODERS.get(width))


FLUX = Family(
    name="Flux",
    role=Role.DIFFUSION,
    covers="Flux.2 (klein 4B and 9B, dev), Flux.1 (dev, schnell, Kontext, Fill and their like), LongCat-Image and Chroma "
    "(Ovis-Image and Chroma Radiance stream as all others do)",
    recognises=_is_flux,
    fuse=Late(__package__, "fused:fuse"),
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
        "linear_int4_pair_",
        "linear_int8",
        "linear_int8_",
        "linear_int8_pair",
        "linear_int8_pair_",
        "linear_pair",
        "linear_pair_",
        "norm_modulate",
        "norm_to_int4",
        "norm_to_int8",
        "rms_rope_",
        "rows_to_int4",
        "rows_to_int8",
        "to_half",
    ),
    need=Late(__package__, "need:need"),
    cost=Late(__package__, "cost:cost"),
    expects=_expects,
    vaes=VAES,
    reads=_reads,
    specimens=Late(__package__, "specimens:specimens"),
)
