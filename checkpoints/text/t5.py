"""T5's and UMT5's encoders, in transformers' names.

umt5      Comfy-Org's repackaging, with the tokenizer inside the file. Stock knows it by block
          23 having an FFN of 10240, so 24 layers and that FFN must stay; or a file has a matrix
          of that name and height and no other of block 23 (`umt5_mark`)
t5xxl     T5 v1.1 XXL: the same with one table of relative places for all layers. Alone or with
          CLIP-L, by CLIPType
byt5      ByT5 small for glyphs, behind Qwen2.5-VL. HunyuanVideo 1.5 takes its width alone
"""

from __future__ import annotations

from dataclasses import dataclass

from ..weights import Table, Tree, gain, linear, normal, tree

T5_WIDTH = 16  # what the FP8 products of newer cards can take at least
BUCKETS = 32
T5_SMALL = 0.4  # what a layer adds to the residual: with gains of one, 24 of them amplify a rounding error twentyfold


@dataclass(frozen=True)
class Umt5Size:
    """The sizes of one encoder. The head width is that of the published model."""

    width: int = T5_WIDTH
    heads: int = 2
    head_width: int = 64
    ffn: int = 10240
    layers: int = 24
    vocabulary: int = 512


UMT5 = Umt5Size()
T5XXL = Umt5Size(vocabulary=32128)  # T5's own
BYT5 = Umt5Size(width=1472, heads=6, ffn=64, layers=2, vocabulary=1510)  # its tokenizer's bytes


def umt5(size: Umt5Size) -> Table:
    """Every tensor of one encoder, without the tokenizer."""
    width, inner, ffn = size.width, size.heads * size.head_width, size.ffn
    # T5 does not divide q k' by sqrt(head_width): small q and k keep the softmax from saturating.
    attention: Tree = {
        "(q|k)": linear(inner, width, 0.45, bias=False),
        "v": linear(inner, width, bias=False),
        "o": linear(width, inner, T5_SMALL, bias=False),
        "relative_attention_bias.weight": normal(1.0, BUCKETS, size.heads),
    }
    return tree(
        {
            "shared.weight": normal(1.0, size.vocabulary, width),
            f"encoder.block.[{size.layers}]": {
                "layer.0.SelfAttention": attention,
                "layer.0.layer_norm.weight": gain(width),
                "layer.1.DenseReluDense.(wi_0|wi_1)": linear(ffn, width, bias=False),
                "layer.1.DenseReluDense.wo": linear(width, ffn, T5_SMALL, bias=False),
                "layer.1.layer_norm.weight": gain(width),
            },
            "encoder.final_layer_norm.weight": gain(width),
        }
    )


def t5xxl(size: Umt5Size) -> Table:
    """Every tensor of one encoder: the first block's relative places do for all."""
    kept = "encoder.block.0."
    return {n: spec for n, spec in umt5(size).items() if "relative_attention_bias" not in n or n.startswith(kept)}
