"""Stable Diffusion's U-Nets: SD 1.5, 2.1, SDXL, and what was distilled or trained from them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...base.family import Family, Late, Role
from ...files.repeated_blocks import prefix_of

if TYPE_CHECKING:
    from ....memory import WeightFile

# A residual block on the way up, which ControlNets lack: in the original spelling, and in
# diffusers'.
SPELLINGS = (
    (re.compile(r"(model\.diffusion_model\.|)output_blocks\.\d+\.0\.in_layers\.0\.weight"), ("time_embed.0.weight",)),
    (re.compile(r"()up_blocks\.\d+\.resnets\.\d+\.norm1\.weight"), ("time_embedding.linear_1.weight",)),
)
OVER_TIME = ".time_stack."  # in the names of a U-Net that makes videos
# Text encoders by the width of a prompt's tokens.
ENCODERS = {
    768: "clip_l.safetensors, type stable_diffusion,",
    1024: "the text encoder of SD 2 (OpenCLIP H), type stable_diffusion,",
    1280: "the text encoder of SDXL's refiner (CLIP-G), type stable_diffusion,",
    2048: "clip_l.safetensors and clip_g.safetensors, type sdxl,",
}


def _is_unet(header: WeightFile) -> bool:
    if all(prefix_of(header, part, beside) is None for part, beside in SPELLINGS):
        return False
    return not any(OVER_TIME in name for name in header.extents)


def _reads(net: Any) -> tuple[int, str | None] | None:
    from .transformer import prompt_width  # noqa: PLC0415

    width = prompt_width(net)
    return None if width is None else (width, ENCODERS.get(width))


UNET = Family(
    name="Stable Diffusion U-Net",
    role=Role.DIFFUSION,
    covers="Stable Diffusion 1.5, 2.1 and SDXL, their inpainting, Turbo, LCM, Lightning and Hyper versions: the whole U-Net, its "
    "pictures channels-last from the first convolution to the last",
    recognises=_is_unet,
    fuse=Late(__package__, "net:fuse"),
    ops=(
        "attention",
        "codes_to_half",
        "codes_to_int8",
        "conv",
        "gelu_mul",
        "group_norm_silu",
        "int8_to_half",
        "linear",
        "linear_",
        "linear_int4",
        "linear_int4_",
        "linear_int8",
        "linear_int8_",
        "norm_modulate",
        "rows_to_int4",
        "rows_to_int8",
        "to_half",
        "upsample_conv2d",
    ),
    vaes={4: "the VAE of Stable Diffusion (for SDXL sdxl_vae.safetensors)"},
    reads=_reads,
    specimens=Late(__package__, "specimens:specimens"),
)
