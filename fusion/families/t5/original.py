"""UMT5 as Wan's authors publish it, and files made from that: `models_t5_umt5-xxl-enc-bf16.pth`,
`umt5-xxl-enc-bf16.safetensors`.

The same encoder under other names, and without the tokenizer:

    token_embedding.weight                      shared.weight
    blocks.{i}.norm1, .norm2                    encoder.block.{i}.layer.0.layer_norm,
                                                .layer.1.layer_norm
    blocks.{i}.attn.{q,k,v,o}                   encoder.block.{i}.layer.0.SelfAttention.{q,k,v,o}
    blocks.{i}.pos_embedding.embedding          encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias
    blocks.{i}.ffn.gate.0, the half with GELU   encoder.block.{i}.layer.1.DenseReluDense.wi_0
    blocks.{i}.ffn.fc1, .fc2                    encoder.block.{i}.layer.1.DenseReluDense.wi_1, .wo
    norm.weight                                 encoder.final_layer_norm.weight
"""

from __future__ import annotations

import re

from ....memory import WeightFile
from ...files.repeated_blocks import renamed

OUTSIDE = {"token_embedding.": "shared.", "norm.": "encoder.final_layer_norm."}
INSIDE = {
    "norm1.": "layer.0.layer_norm.",
    "attn.": "layer.0.SelfAttention.",
    "pos_embedding.embedding.": "layer.0.SelfAttention.relative_attention_bias.",
    "norm2.": "layer.1.layer_norm.",
    "ffn.gate.0.": "layer.1.DenseReluDense.wi_0.",
    "ffn.fc1.": "layer.1.DenseReluDense.wi_1.",
    "ffn.fc2.": "layer.1.DenseReluDense.wo.",
}
# No other known model has this half of a feed-forward under this name.
LANDMARK = re.compile(r"blocks\.\d+\.ffn\.gate\.0\.weight")


def is_original(header: WeightFile) -> bool:
    return any(LANDMARK.fullmatch(name) for name in header.extents)


def rename(name: str) -> str:
    """Stock's name of a tensor, or of one that goes with it, such as a scale."""
    return renamed(name, OUTSIDE, INSIDE, "encoder.block.{}.")
