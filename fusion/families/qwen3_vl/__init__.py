"""Qwen3-VL: a language model that sees pictures, as a text encoder and to write with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.family import Late
from ...text.family import language_model
from .layout import expected, is_qwen3_vl

if TYPE_CHECKING:
    from ....memory import WeightFile


def _kind(header: WeightFile) -> str | None:
    """The type for sizes unknown to stock, which serve for writing text only. For the 4B and the 8B
    the user has to choose."""
    from .sizes import options  # noqa: PLC0415

    return "QWEN_IMAGE" if options(header) else None


QWEN3_VL = language_model(
    "Qwen3-VL",
    "Qwen3-VL 2B to 32B (Krea 2, MiniMax H3): its vision tower and its language model, FP16 products around FP32 streams; writes",
    is_qwen3_vl,
    expects=expected,
    options=Late(__package__, "sizes:options"),
    kind=_kind,
    specimens=Late(__package__, "specimens:specimens"),
)
