"""Small specimens of stock's T5 encoders.

Gated ones with a bias in the first block and with one in every block, and T5's first form. Prompts
are padded, and tokens that the caller zeroes are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.ops
import comfy.sd1_clip
import comfy.text_encoders.t5 as stock

from ....kernels_cuda import KernelPolicy
from ...base.specimen import Draw, Options, Specimen
from ...text.common import FusedEmbedding
from ...weights.fp32_residual import TILE
from .encoder import FusedBlock, FusedStack, fuse

WORDS = 30
WIDTH = 128
PAD, END = 0, 1
GATED = {
    "num_layers": 2, "d_model": WIDTH, "d_kv": 64, "num_heads": 2, "d_ff": 192, "vocab_size": WORDS, "model_type": "t5",
    "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True,
}  # fmt: skip
OF_EVERY_BLOCK = {**GATED, "model_type": "umt5"}
PLAIN = {**GATED, "dense_act_fn": "relu", "is_gated_act": False}
LENGTH = TILE + 8  # more than are computed if the caller zeroes the padding
PROMPTS = [[*range(2, WORDS), END], [7, 2, 2, 19, END]]
PADDED = [prompt + [PAD] * (LENGTH - len(prompt)) for prompt in PROMPTS]
FEW = [prompt[:5] for prompt in PADDED]
SOURCE = (stock, comfy.sd1_clip.SDClipModel)
# T5 does not divide its scores by the square root of a head's size. With random weights they are
# large, so the rounding of queries and keys counts for more. UMT5's error is 0.0023.
WITHIN = 0.01


def specimens() -> Sequence[Specimen]:
    return (
        _specimen("T5 encoder", GATED, zeroes=False),
        _specimen("UMT5 encoder", OF_EVERY_BLOCK, zeroes=True),
        _specimen("T5 encoder without gates", PLAIN, zeroes=True),
    )


def _specimen(name: str, config: dict[str, Any], *, zeroes: bool) -> Specimen:
    replaces: dict[type, type] = {
        FusedStack: stock.T5Stack,
        FusedBlock: stock.T5Block,
        FusedEmbedding: comfy.ops.manual_cast.Embedding,
    }
    dense = stock.T5DenseGatedActDense if config["is_gated_act"] else stock.T5DenseActDense
    parts = (stock.T5LayerNorm, stock.T5LayerFF, stock.T5LayerSelfAttention, stock.T5Attention, dense)
    return Specimen(name, partial(_built, config, zeroes), _called, _fused, replaces, (*SOURCE, *parts), within=WITHIN)


def _fused(model: Any, policy: KernelPolicy) -> int:
    return fuse(model, policy, on_cpu=True)


def _built(config: dict[str, Any], zeroes: bool, draw: Draw) -> Any:
    return comfy.sd1_clip.SDClipModel(
        device=draw.device,
        textmodel_json_config=dict(config),
        dtype=draw.dtype,
        special_tokens={"end": END, "pad": PAD},
        model_class=stock.T5,
        enable_attention_masks=True,
        zero_out_masked=zeroes,
        return_attention_masks=True,
        model_options={"custom_operations": draw.operations},
    )


def _called(model: Any, draw: Draw, _options: Options) -> Any:
    """Outputs for padded prompts; and the output of the first block for a stream so small that a
    norm's epsilon shows."""
    embeds = draw.large_and_small(2, len(FEW[0]), WIDTH).float()
    return model(PADDED), model.transformer(None, None, embeds=embeds, intermediate_output=0)
