"""Language models that read prompts, in transformers' names: `model.layers.{i}.self_attn`, ...

They differ in norms, biases and the ends. What ComfyUI knows each by stays at its published size;
all else is small.

    qwen3       by its norms of heads, and the width
    qwen25      by the number of its keys' biases: 256 are the 3B's
    gemma2      by its fourth norm
    gemma3_4b   by that and the norms of heads
    mistral3    by the width of 5120. With fewer than 40 layers it is the one cut for Flux.2, which
                reads layers 10, 20 and 30 of 30, and has no last norm
    ministral3  by the width of 3072
    llama3      by nothing else being true of it
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..weights import Spec, Table, gain, linear, normal, tree

SMALL = 0.5  # what a layer adds to the residual, of four


@dataclass(frozen=True)
class LlamaSize:
    """The sizes of one model. Stock fixes a head's width: 256 for Gemma, 128 for the others.

    gemma       four norms in a layer, whose weights one is added to
    qk_norm     norms of each head's queries and keys: Qwen3 and Gemma 3
    biased      whether queries, keys and values have biases: Qwen2.5
    final_norm  whether there is a norm behind the layers
    own_words   whether the output matrix is separate from the embedding
    adds        what a branch adds to the residual
    """

    width: int
    ffn: int
    heads: int
    key_heads: int
    head_width: int
    layers: int
    vocabulary: int
    gemma: bool = False
    qk_norm: bool = True
    biased: bool = False
    final_norm: bool = True
    own_words: bool = False
    adds: float = SMALL


MANY = 0.15  # what each of fifty layers adds
QWEN3 = LlamaSize(width=2560, ffn=32, heads=2, key_heads=1, head_width=128, layers=4, vocabulary=256)
QWEN3_06B = replace(QWEN3, width=1024)
QWEN3_8B = replace(QWEN3, width=4096, ffn=16, own_words=True)
QWEN25 = LlamaSize(
    width=128, ffn=192, heads=4, key_heads=2, head_width=128, layers=4, vocabulary=256, qk_norm=False, biased=True
)
LLAMA3 = replace(QWEN25, biased=False)
# Every token of their tokenizers is within these vocabularies.
GEMMA2 = LlamaSize(
    width=64, ffn=128, heads=2, key_heads=1, head_width=256, layers=4, vocabulary=512, gemma=True, qk_norm=False
)
# The sixth of each six layers looks at the whole prompt.
GEMMA3_4B = replace(GEMMA2, layers=7, qk_norm=True)
MISTRAL3 = replace(QWEN3, width=5120, ffn=16, layers=3, vocabulary=320, qk_norm=False, final_norm=False)
MINISTRAL3 = replace(MISTRAL3, width=3072, layers=4, final_norm=True)


def llama(size: LlamaSize) -> Table:
    """Every tensor but the tokenizer. Queries share a key. Gemma adds one to its norms' weights."""
    width, query, key = size.width, size.heads * size.head_width, size.key_heads * size.head_width

    def rms(factor: float = 1.0) -> Spec:
        return normal(0.1, width, mean=factor - 1.0 if size.gemma else factor)

    # In Gemma a norm ends a branch, so its gain is what the branch adds.
    branch = rms(size.adds if size.gemma else 1.0)
    of_head = normal(0.1, size.head_width) if size.gemma else gain(size.head_width)
    words = normal(1 / math.sqrt(width) if size.gemma else 1.0, size.vocabulary, width)
    return tree(
        {
            "model.embed_tokens.weight": words,
            f"model.layers.[{size.layers}]": {
                "self_attn.q_proj": linear(query, width, bias=size.biased),
                "self_attn.(k|v)_proj": linear(key, width, bias=size.biased),
                "self_attn.o_proj": linear(width, query, size.adds, bias=False),
                "mlp.(gate|up)_proj": linear(size.ffn, width, bias=False),
                "mlp.down_proj": linear(width, size.ffn, size.adds, bias=False),
                "input_layernorm.weight": rms(),
                "post_attention_layernorm.weight": branch,
                "pre_feedforward_layernorm.weight": rms() if size.gemma else None,
                "post_feedforward_layernorm.weight": branch if size.gemma else None,
                "self_attn.(q|k)_norm.weight": of_head if size.qk_norm else None,
            },
            "model.norm.weight": rms() if size.final_norm else None,
            "lm_head.weight": normal(1 / math.sqrt(width), size.vocabulary, width) if size.own_words else None,
        }
    )
