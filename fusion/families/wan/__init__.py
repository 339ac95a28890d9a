"""Wan 2.1 and 2.2: the video transformer's blocks, and the VAEs below `vae`."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.family import Expected, Family, Role
from ...files.repeated_blocks import prefix_of

if TYPE_CHECKING:
    import torch

    from ....kernels_cuda import KernelPolicy
    from ....memory import WeightFile
    from ...base.cost import Cost
    from ...base.specimen import Specimen

QUERY = re.compile(r"(model\.diffusion_model\.|)blocks\.\d+\.self_attn\.q\.weight")
BESIDE = ("head.modulation", "time_projection.1.weight")
# VAEs by the channels of the latents: Wan 2.2's 5B has its own, all others Wan 2.1's.
VAES = {16: "wan_2.1_vae.safetensors", 48: "wan2.2_vae.safetensors"}


def _prefix(header: WeightFile) -> str | None:
    return prefix_of(header, QUERY, BESIDE)


def _is_wan(header: WeightFile) -> bool:
    return _prefix(header) is not None


def _expects(header: WeightFile) -> Expected:
    from .layout import expected  # noqa: PLC0415

    return expected(header, _prefix(header) or "")


def _fuse(net: Any, _policy: KernelPolicy) -> int:
    from .block import fuse  # noqa: PLC0415

    return fuse(net)


def _blocks(net: Any) -> Sequence[tuple[str, Any]]:
    from .order import in_order  # noqa: PLC0415

    return in_order(net)


def _need(net: Any, shape: Sequence[int], dtype: torch.dtype) -> float | None:
    from .need import need  # noqa: PLC0415

    return need(net, shape, dtype)


def _cost(net: Any, shape: Sequence[int]) -> Cost | None:
    from .cost import cost  # noqa: PLC0415

    return cost(net, shape)


def _reads(net: Any) -> tuple[int, str] | None:
    width = getattr(net.text_embedding[0], "in_features", None)
    return None if width is None else (width, "umt5_xxl_fp8_e4m3fn_scaled.safetensors")


def _doubts(model: Any, patched: Container[str], prompts: Sequence[Mapping[str, Any]]) -> str | None:
    from .images import doubts  # noqa: PLC0415

    return doubts(model, patched, prompts)


def _specimens() -> Iterable[Specimen]:
    from .specimens import specimens  # noqa: PLC0415

    return specimens()


WAN = Family(
    name="Wan",
    role=Role.DIFFUSION,
    covers="Wan 2.1 and 2.2, 1.3B to 14B: T2V, I2V, FLF2V, VACE, Fun, camera, 5B, S2V, Animate (HuMo and causal Wan stream as all "
    "others do)",
    recognises=_is_wan,
    fuse=_fuse,
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
    blocks=_blocks,
    need=_need,
    in_pieces=True,
    cost=_cost,
    expects=_expects,
    vaes=VAES,
    reads=_reads,
    doubts=_doubts,
    specimens=_specimens,
)


def _is_wan_vae(header: WeightFile) -> bool:
    if {"decoder.middle.0.residual.0.gamma", "decoder.head.0.gamma"}.isdisjoint(header.extents.keys()):
        return False
    from .vae.layout import is_of_this_geometry  # noqa: PLC0415

    return is_of_this_geometry(header)


def _expects_of_vae(header: WeightFile) -> Expected:
    from .vae.layout import expected  # noqa: PLC0415

    return expected(header)


def _fuse_vae(vae: Any, policy: KernelPolicy) -> int:
    from .vae.fused import install, is_wan  # noqa: PLC0415

    if not is_wan(vae.first_stage_model):
        return 0
    install(vae, policy)
    return 1


def _vae_specimens() -> Iterable[Specimen]:
    from .vae.specimens import specimens  # noqa: PLC0415

    return specimens()


WAN_VAE = Family(
    name="Wan",
    role=Role.VAE,
    covers="Wan 2.1's and 2.2's: encoding and decoding in bands of about 3 GiB, whatever the size",
    recognises=_is_wan_vae,
    fuse=_fuse_vae,
    ops=("attention", "channel_rms_silu", "conv", "linear", "upsample_conv2d"),
    expects=_expects_of_vae,
    specimens=_vae_specimens,
)
