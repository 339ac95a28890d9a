"""T5 and UMT5 as llama.cpp writes them into GGUF files: the same encoder under other names.

    token_embd.weight                        shared.weight
    enc.blk.{i}.attn_norm                    encoder.block.{i}.layer.0.layer_norm
    enc.blk.{i}.attn_q, _k, _v, _o           encoder.block.{i}.layer.0.SelfAttention.{q,k,v,o}
    enc.blk.{i}.attn_rel_b                   encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias
    enc.blk.{i}.ffn_norm                     encoder.block.{i}.layer.1.layer_norm
    enc.blk.{i}.ffn_gate, the half with GELU encoder.block.{i}.layer.1.DenseReluDense.wi_0
    enc.blk.{i}.ffn_up, ffn_down             encoder.block.{i}.layer.1.DenseReluDense.wi_1, .wo
    enc.output_norm                          encoder.final_layer_norm

In an encoder without gates `ffn_up` is `wi`. Matrices have the orientation of transformers.
"""

from __future__ import annotations

import re

from ....memory import WeightFile
from ...base.family import Rename
from ...files.llama_cpp import Names

OUTSIDE = {"token_embd": "shared", "enc.output_norm": "encoder.final_layer_norm"}
INSIDE = {
    "attn_norm": "layer.0.layer_norm",
    **{f"attn_{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"},
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "ffn_norm": "layer.1.layer_norm",
    "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo",
}
BLOCKS = ("enc.blk", "encoder.block")
GATED = Names(BLOCKS, INSIDE, OUTSIDE)
UNGATED = Names(BLOCKS, {**INSIDE, "ffn_up": "layer.1.DenseReluDense.wi"}, OUTSIDE)
# No other model of llama.cpp's has an encoder with a relative bias.
LANDMARK = re.compile(r"enc\.blk\.0\.attn_rel_b\.weight")
GATE = re.compile(r"enc\.blk\.\d+\.ffn_gate\.weight")


def is_llama_cpps(header: WeightFile) -> bool:
    return any(LANDMARK.fullmatch(name) for name in header.extents)


def renaming(header: WeightFile) -> Rename:
    """The renaming from this file's names to stock's."""
    return GATED if any(GATE.fullmatch(name) for name in header.extents) else UNGATED
