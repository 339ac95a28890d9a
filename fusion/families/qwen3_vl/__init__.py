"""Qwen3-VL: a language model that sees pictures, as a text encoder and to write with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...base.family import Expected, Family, Role
from .layout import is_qwen3_vl

if TYPE_CHECKING:
    import torch

    from ....kernels_cuda import KernelPolicy
    from ....memory import WeightFile
    from ...base.specimen import Specimen


def _expects(header: WeightFile) -> Expected:
    from .layout import expected  # noqa: PLC0415

    return expected(header)


def _options(header: WeightFile) -> Mapping[str, Any]:
    from .sizes import options  # noqa: PLC0415

    return options(header)


def _kind(header: WeightFile) -> str | None:
    """The type for sizes unknown to stock, which serve for writing text only. For the 4B and the 8B
    the user has to choose."""
    from .sizes import options  # noqa: PLC0415

    return "QWEN_IMAGE" if options(header) else None


def _fuse(model: Any, policy: KernelPolicy) -> int:
    from ...text.stack import fuse  # noqa: PLC0415
    from .eyes import fuse as fuse_eyes  # noqa: PLC0415

    return fuse(model, policy) + fuse_eyes(model, policy)


def _idle(model: Any, device: torch.device) -> int:
    from ...text.stack import idle  # noqa: PLC0415

    return idle(model, device)


def _specimens() -> Iterable[Specimen]:
    from .specimens import specimens  # noqa: PLC0415

    return specimens()


QWEN3_VL = Family(
    name="Qwen3-VL",
    role=Role.TEXT,
    covers="Qwen3-VL 2B, 4B and 8B: its eyes and its language model, FP16 products around FP32 streams; writes",
    recognises=is_qwen3_vl,
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
    options=_options,
    kind=_kind,
    expects=_expects,
    idle=_idle,
    specimens=_specimens,
)
