"""T5 and UMT5 text encoders: FP16 products around an FP32 stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...family import Family, Role

if TYPE_CHECKING:
    from ....kernels_cuda import KernelPolicy
    from ....memory import WeightFile

FIRST = "encoder.block.0.layer.0.SelfAttention"


def _is_t5(header: WeightFile) -> bool:
    return f"{FIRST}.q.weight" in header.extents


def _is_umt5(header: WeightFile) -> bool:
    """UMT5 has a relative bias in every block, T5 in its first one."""
    return f"{FIRST}.relative_attention_bias.weight".replace("block.0", "block.1") in header.extents


def _fuse(model: Any, policy: KernelPolicy) -> int:
    from .encoder import fuse  # noqa: PLC0415

    return fuse(model, policy)


def _options(header: WeightFile) -> Mapping[str, Any]:
    from . import umt5  # noqa: PLC0415

    return {umt5.CONFIG_OPTION: umt5.config(header)} if _is_umt5(header) else {}


def _kind(header: WeightFile) -> str | None:
    return "WAN" if _is_umt5(header) else None


T5 = Family(
    name="T5 or UMT5",
    role=Role.TEXT,
    covers="UMT5-XXL (Wan) and T5-XXL: FP16 products around an FP32 stream, without the padding",
    recognises=_is_t5,
    fuse=_fuse,
    ops=("attention", "linear", "linear_", "linear_pair", "norm_modulate", "to_half"),
    options=_options,
    kind=_kind,
)
