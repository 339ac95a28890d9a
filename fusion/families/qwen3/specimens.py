"""A small specimen of stock's Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comfy.text_encoders import llama as stock

from ....kernels_cuda import KernelPolicy
from ...base.specimen import Draw, Options, Specimen
from ...text.specimens import (
    CONFIG,
    PAD,
    REPLACES,
    SOURCE,
    built,
    read,
    written,
)
from ...text.stack import fuse

PROMPTS = [[8, 11, 12, 9, 3, 15, 9, 3], [8, 4, 4, *[PAD] * 5]]


def specimens() -> Sequence[Specimen]:
    return (Specimen("Qwen3 encoder", _built, _called, _fused, REPLACES, (*SOURCE, stock.Qwen3_4B)),)


def _fused(model: Any, policy: KernelPolicy) -> int:
    return fuse(model, policy, on_cpu=True)


def _built(draw: Draw) -> Any:
    return built(draw, stock.Qwen3_4B, CONFIG)


def _called(model: Any, _draw: Draw, _options: Options) -> Any:
    return read(model, PROMPTS), written(model, PROMPTS[0])
