"""Qwen3-VL: a language model that sees pictures, as a text encoder and to write with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...base.family import Expected
from ...text.family import language_model
from .layout import is_qwen3_vl

if TYPE_CHECKING:
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


def _specimens() -> Iterable[Specimen]:
    from .specimens import specimens  # noqa: PLC0415

    return specimens()


QWEN3_VL = language_model(
    "Qwen3-VL",
    "Qwen3-VL 2B to 32B (Krea 2, MiniMax H3): its vision tower and its language model, FP16 products around FP32 streams; writes",
    is_qwen3_vl,
    expects=_expects,
    options=_options,
    kind=_kind,
    specimens=_specimens,
)
