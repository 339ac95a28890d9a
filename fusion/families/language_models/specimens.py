"""Small specimens of stock's language models, one for each row of the table.

Layers with a window see four tokens, so that the window shows in short prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from comfy.text_encoders import llama as stock

from ....kernels_cuda import KernelPolicy
from ...base.specimen import Draw, Options, Specimen
from ...text.specimens import (
    CONFIG,
    PAD,
    SOURCE,
    built,
    read,
    replaces,
    written,
)
from ...text.stack import fuse
from ...text.vision.specimens import of_qwen2_vl, of_siglip

PROMPTS = [[8, 11, 12, 9, 3, 15, 9, 3], [8, 4, 4, *[PAD] * 5]]
PADDED_BEFORE = [PROMPTS[0], [*[PAD] * 3, 8, 4, 4, 9, 6]]
WINDOW = 4


class Model(NamedTuple):
    """name     in messages
    network  stock's class of it
    layer    stock's class of its layers
    prompts  that it reads
    """

    name: str
    network: Any
    layer: type = stock.TransformerBlock
    prompts: list[list[int]] = PROMPTS

    @property
    def writes(self) -> bool:
        return issubclass(self.network, stock.BaseGenerate)


# By the names of the families.
MODELS: dict[str, tuple[Model, ...]] = {
    "Qwen3": (Model("Qwen3", stock.Qwen3_4B),),
    "Qwen2.5": (Model("Qwen2.5", stock.Qwen25_3B),),
    "Gemma 3": (Model("Gemma 3", stock.Gemma3_4B, stock.TransformerBlockGemma2, PADDED_BEFORE),),
    "Gemma 2": (Model("Gemma 2", stock.Gemma2_2B, stock.TransformerBlockGemma2),),
    "Llama 3 or Mistral 3": (
        Model("Llama 3", stock.Llama2),
        Model("Ministral 3", stock.Ministral3_3B, prompts=PADDED_BEFORE),
    ),
}


# Vision towers of some, by the names of the families.
TOWERS: dict[str, Callable[[], Specimen]] = {"Qwen2.5": of_qwen2_vl, "Gemma 3": of_siglip}


def of(family: str) -> Sequence[Specimen]:
    """The specimens of a family by its name."""
    towers = [TOWERS[family]()] if family in TOWERS else []
    return towers + [
        Specimen(
            f"{model.name} encoder",
            partial(_built, model),
            partial(_called, model),
            _fused,
            replaces(model.layer, writes=model.writes),
            (*SOURCE, model.layer, model.network),
        )
        for model in MODELS[family]
    ]


def _fused(model: Any, policy: KernelPolicy) -> int:
    return fuse(model, policy, on_cpu=True)


def _built(model: Model, draw: Draw) -> Any:
    made = built(draw, model.network, CONFIG)
    for layer in made.transformer.model.layers:
        if getattr(layer, "sliding_attention", False):
            layer.sliding_attention = WINDOW
    return made


def _called(model: Model, made: Any, _draw: Draw, _options: Options) -> Any:
    encodings = read(made, model.prompts)
    return (encodings, written(made, model.prompts[0])) if model.writes else encodings
