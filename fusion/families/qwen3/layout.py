"""Which files are Qwen3's, by stock's names, and the tensors that they must have."""

from __future__ import annotations

from ....memory import WeightFile
from ...base.family import Expected
from ...text.layout import (
    WIDTHS,
    expected_layers,
    has_these_layers,
    width_of,
)

ROOT = "model."
# Prefixes of Qwen3-VL: pictures, and positions in three dimensions.
SEEING = ("visual.", "vision_model.", "model.visual.")
SOUNDING = ("model.audio_decoder.",)  # MiniMax Music 3, whose tables of words are different


def is_qwen3(header: WeightFile) -> bool:
    if not has_these_layers(header, ROOT) or width_of(header, ROOT) not in WIDTHS:
        return False
    return not any(name.startswith(SEEING + SOUNDING) for name in header.extents)


def expected(header: WeightFile) -> Expected:
    return Expected(expected_layers(header, ROOT))
