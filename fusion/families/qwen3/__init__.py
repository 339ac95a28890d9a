"""Qwen3 text encoders: FP16 products around an FP32 stream, up to the last layer that is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...base.family import Expected, Family, Role
from .layout import is_qwen3

if TYPE_CHECKING:
    import torch

    from ....kernels_cuda import KernelPolicy
    from ....memory import WeightFile
    from ...base.specimen import Specimen


def _expects(header: WeightFile) -> Expected:
    from .layout import expected  # noqa: PLC0415

    return expected(header)


def _fuse(model: Any, policy: KernelPolicy) -> int:
    from ...text.stack import fuse  # noqa: PLC0415

    return fuse(model, policy)


def _idle(model: Any, device: torch.device) -> int:
    from ...text.stack import idle  # noqa: PLC0415

    return idle(model, device)


def _specimens() -> Iterable[Specimen]:
    from .specimens import specimens  # noqa: PLC0415

    return specimens()


QWEN3 = Family(
    name="Qwen3",
    role=Role.TEXT,
    covers="Qwen3 0.6B to 8B (Flux.2 klein, Z-Image): FP16 products around an FP32 stream, no layers that nothing reads; writes",
    recognises=is_qwen3,
    fuse=_fuse,
    ops=(
        "attention",
        "codes_to_half",
        "codes_to_int8",
        "decode_attention",
        "few_rows",
        "int8_to_half",
        "join_sums",
        "linear",
        "linear_",
        "linear_pair",
        "norm_modulate",
        "rms_parts",
        "rms_rope_",
        "rms_rope_keep",
        "rms_rope_sums",
        "to_half",
    ),
    expects=_expects,
    idle=_idle,
    specimens=_specimens,
)
