"""Wan 2.1 and 2.2: the video transformer's blocks, and the VAEs below `vae`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...base.family import Expected, Family, Late, Rename, Role
from ...files.repeated_blocks import prefix_of
from . import spellings
from .layout import expected
from .vae.layout import expected as expected_of_vae
from .vae.layout import is_of_this_geometry

if TYPE_CHECKING:
    from ....memory import WeightFile

QUERY = re.compile(r"(model\.diffusion_model\.|)blocks\.\d+\.self_attn\.q\.weight")
BESIDE = ("head.modulation", "time_projection.1.weight")
# VAEs by the channels of the latents: Wan 2.2's 5B has its own, all others Wan 2.1's.
VAES = {16: "wan_2.1_vae.safetensors", 48: "wan2.2_vae.safetensors"}


def _prefix(header: WeightFile) -> str | None:
    return prefix_of(header, QUERY, BESIDE)


def _is_wan(header: WeightFile) -> bool:
    return _prefix(header) is not None or spellings.is_diffusers(header)


def _renames(header: WeightFile) -> Rename | None:
    return spellings.rename if spellings.is_diffusers(header) else None


def _reshapes(header: WeightFile) -> Mapping[str, tuple[int, ...]]:
    return spellings.reshaped(header, _prefix(header) or "")


def _expects(header: WeightFile) -> Expected:
    return expected(header, _prefix(header) or "")


def _reads(net: Any) -> tuple[int, str] | None:
    width = getattr(net.text_embedding[0], "in_features", None)
    return None if width is None else (width, "umt5_xxl_fp8_e4m3fn_scaled.safetensors")


WAN = Family(
    name="Wan",
    role=Role.DIFFUSION,
    covers="Wan 2.1 and 2.2, 1.3B to 14B: T2V, I2V, FLF2V, VACE, Fun, camera, 5B, S2V, Animate (HuMo and causal Wan stream as all "
    "others do); TurboWan (SLA) and FastWan (VSA) with the sparse attention that they were trained with",
    recognises=_is_wan,
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
    blocks=Late(__package__, "order:in_order"),
    learned=Late(__package__, "trained_sparse:learned"),
    grow=Late(__package__, "trained_sparse:grow"),
    need=Late(__package__, "need:need"),
    in_pieces=True,
    cost=Late(__package__, "cost:cost"),
    expects=_expects,
    renames=_renames,
    reshapes=_reshapes,
    vaes=VAES,
    reads=_reads,
    doubts=Late(__package__, "images:doubts"),
    specimens=Late(__package__, "specimens:specimens"),
)


def _is_wan_vae(header: WeightFile) -> bool:
    if {"decoder.middle.0.residual.0.gamma", "decoder.head.0.gamma"}.isdisjoint(header.extents.keys()):
        return False
    return is_of_this_geometry(header)


WAN_VAE = Family(
    name="Wan",
    role=Role.VAE,
    covers="Wan 2.1's and 2.2's: encoding and decoding in bands of about 3 GiB, whatever the size",
    recognises=_is_wan_vae,
    fuse=Late(__package__, "vae.fused:install"),
    ops=("attention", "channel_rms_silu", "conv", "linear", "upsample_conv2d"),
    expects=expected_of_vae,
    specimens=Late(__package__, "vae.specimens:specimens"),
)
