"""Small specimens of stock's CLIP for text.

With both activations, with and without clip skip, and with a mask that includes padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.clip_model as stock
import comfy.sd1_clip

from ....kernels_cuda import KernelPolicy
from ...base.specimen import Draw, Options, Specimen
from ...text.encoder.clip import FusedEncoder, FusedLayer
from .encoder import fuse

WORDS, PLACES = 20, 9
END = WORDS - 1
CONFIG = {
    "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 192,
    "max_position_embeddings": PLACES, "eos_token_id": END,
}  # fmt: skip
PROMPTS = [[18, 3, 7, 1, 5, 2, 11, 4, END], [18, 6, 9, *[END] * 6]]
SOURCE = (stock, comfy.sd1_clip.SDClipModel)


def specimens() -> Sequence[Specimen]:
    return (_specimen("CLIP-L encoder", "quick_gelu"), _specimen("CLIP-G encoder", "gelu"))


def _specimen(name: str, activation: str) -> Specimen:
    replaces: dict[type, type] = {FusedEncoder: stock.CLIPEncoder, FusedLayer: stock.CLIPLayer}
    parts = (stock.CLIPTextModel_, stock.CLIPMLP, stock.CLIPAttention)
    return Specimen(name, partial(_built, activation), _called, _fused, replaces, (*SOURCE, *parts))


def _fused(model: Any, policy: KernelPolicy) -> int:
    return fuse(model, policy, on_cpu=True)


def _built(activation: str, draw: Draw) -> Any:
    """Stock's encoder with a table of a few words, instead of its 49408."""
    model = comfy.sd1_clip.SDClipModel(
        device=draw.device,
        textmodel_json_config={**CONFIG, "hidden_act": activation},
        dtype=draw.dtype,
        special_tokens={"start": 18, "end": END, "pad": END},
        layer_norm_hidden_state=False,
        model_options={"custom_operations": draw.operations},
    )
    table = draw.operations.Embedding(WORDS, CONFIG["hidden_size"], dtype=draw.dtype, device=draw.device)
    model.transformer.set_input_embeddings(table)
    return model


def _called(model: Any, _draw: Draw, _options: Options) -> Any:
    """The output of the last layer with the pooled token; with a mask, the output of the last but
    one; all outputs."""
    embeds, mask, counts, _ = model.process_tokens(PROMPTS, model.transformer.get_input_embeddings().weight.device)
    asked = {"embeds": embeds, "num_tokens": counts}
    return (
        model(PROMPTS),
        model.transformer(None, mask, intermediate_output=-2, **asked),
        model.transformer(None, None, intermediate_output="all", **asked)[1],
    )
