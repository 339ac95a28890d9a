"""Code shared by the specimens of language models: stock's encoder around a small one, what is read
of it, and what it writes.

A text is written twice: by the likeliest token with penalties for repetition, and by the seed among
tokens that are nearly alike. So neither depends on the last digits of the layers' output, which
stock computes in bf16 on a card.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import comfy.ops
import comfy.sd1_clip
import torch
from comfy.text_encoders import llama as stock
from torch import Tensor

from ..base.specimen import Draw
from . import token_rate
from .common import FusedEmbedding
from .layer import FusedLayer
from .room import AsksForRoom
from .stack import FusedStack, TellsWhatIsRead
from .writing import Writes

WORDS = 24
PAD = WORDS - 1
LAYERS = 2
CONFIG = {
    "vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
PARTS = (stock.Attention, stock.MLP, stock.RMSNorm, stock.BaseLlama, stock.BaseQwen3)
SOURCE = (stock, comfy.sd1_clip.SDClipModel, *PARTS)
# The ways in which stock's models ask: layers by number, the last but one, the last.
READ = (([1, LAYERS], None), ("hidden", -2), ("last", None))
LIKELIEST = {
    "max_length": 3,
    "top_k": 1,
    "temperature": 1.0,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
}
BY_SEED = {"max_length": 2, "top_k": 0, "temperature": 30.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def replaces(layer: type, *, writes: bool) -> dict[type, type]:
    """`Specimen.replaces` of a language model. layer: stock's class of its layers."""
    found: dict[type, type] = {
        FusedStack: stock.Llama2_,
        FusedLayer: layer,
        FusedEmbedding: comfy.ops.manual_cast.Embedding,
        TellsWhatIsRead: comfy.sd1_clip.SDClipModel,
        AsksForRoom: comfy.sd1_clip.SD1ClipModel,
    }
    return {**found, Writes: stock.BaseGenerate} if writes else found


def built(draw: Draw, network: Any, config: dict[str, Any]) -> Any:
    """Stock's encoder around one of stock's networks."""
    model = comfy.sd1_clip.SDClipModel(
        device=draw.device,
        textmodel_json_config=dict(config),
        dtype=draw.dtype,
        special_tokens={"pad": PAD},
        layer_norm_hidden_state=False,
        model_class=network,
        enable_attention_masks=True,
        return_attention_masks=True,
        model_options={"custom_operations": draw.operations},
    )
    model.set_clip_options({"execution_device": draw.device})
    return model


def read(model: Any, prompts: Sequence[Sequence[Any]], ways: Sequence[tuple[Any, int | None]] = READ) -> list[Any]:
    """The encoder's outputs for these prompts, for each way of asking."""
    found = []
    for model.layer, model.layer_idx in ways:
        found.append(model(prompts))
    return found


def written(model: Any, prompt: Sequence[Any], wishes: Sequence[dict[str, Any]] = (LIKELIEST, BY_SEED)) -> list[Tensor]:
    """The tokens that follow a prompt, chosen in each of these ways."""
    tokens = [[(part, 1.0) for part in prompt]]
    # Here stock shows a progress bar.
    with token_rate.untold(), contextlib.redirect_stderr(io.StringIO()):
        return [torch.tensor(model.generate(tokens, do_sample=True, seed=7, **wish)) for wish in wishes]
