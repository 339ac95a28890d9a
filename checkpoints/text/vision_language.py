"""Language models with a vision tower: a picture becomes tokens among those of the prompt.

    qwen3_vl        a Qwen3 under another prefix, whose vision tower also adds to its first layers.
                    Stock has sizes for 4B and 8B; FuseStream hands it a class for another
    minimax_h3_te   the same of 32B, the first 50 of 64 layers, no last norm. Stock knows it by
                    layer 49
    krea2_te        the same as `qwen3_vl` of 4B, of whose 36 layers Krea 2 reads twelve
    qwen25_vl       Qwen2.5-VL 7B, known by 512 biases of keys. Nobody reads its output matrix
    gemma3          Gemma 3 12B with SigLIP's tower, known by layer 47's norms of heads

Of the last four stock has the tower's sizes in its code: `narrow` opens that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ..weights import Table, Tree, conv, gain, linear, norm, normal, tree
from .decoders import GEMMA3_4B, MANY, QWEN3, QWEN25, SMALL, LlamaSize, llama
from .towers import clip_layer

# Widths of heads, which no file tells.
QWEN3_VISION_HEAD, QWEN25_VISION_HEAD, SIGLIP_HEAD = 72, 80, 72
FULL = 8  # the eighth of each eight blocks of Qwen2.5-VL's tower sees more than a window
GEMMA_PATCH = 14


@dataclass(frozen=True)
class Qwen3VLSize:
    """The language model's sizes, and the vision tower's. All published ones have 16 heads."""

    language: LlamaSize = field(default_factory=lambda: replace(QWEN3, width=256, ffn=256))
    vision: int = 128
    ffn: int = 192
    blocks: int = 4
    told: int = 3  # how many of the first layers the vision tower adds to
    places: int = 16


QWEN3_VL = Qwen3VLSize()
MINIMAX_H3_TE = Qwen3VLSize(
    language=replace(QWEN3, width=64, ffn=64, layers=50, final_norm=False, adds=MANY),
    vision=2 * QWEN3_VISION_HEAD,
    blocks=6,
)
KREA2_TE = Qwen3VLSize(
    language=replace(QWEN3, width=160, ffn=96, layers=36, adds=MANY),
    vision=2 * QWEN3_VISION_HEAD,
    blocks=6,
)


def qwen3_vl(size: Qwen3VLSize) -> Table:
    """Every tensor of one model."""
    language = llama(size.language)
    # Of size one, the table that also writes would write the last token over and over.
    language["model.embed_tokens.weight"] = replace(language["model.embed_tokens.weight"], std=0.1)
    named = {name.replace("model.", "model.language_model.", 1): spec for name, spec in language.items()}
    return named | tree({"model.visual": _qwen3_vision(size)})


def minimax_h3_te(size: Qwen3VLSize) -> Table:
    """Every tensor of one model, whose names have no prefix for the vision tower."""
    return llama(size.language) | tree({"visual": _qwen3_vision(size)})


def _qwen3_vision(size: Qwen3VLSize) -> Tree:
    vision, four = size.vision, 4 * size.vision  # a merger takes four neighbours as one
    merge = {"linear_fc1": linear(four, four), "linear_fc2": linear(size.language.width, four)}
    return {
        "patch_embed.proj": conv(vision, 3, 2, 16, 16, fp8=False),
        "pos_embed.weight": normal(0.3, size.places, vision),  # of a square
        f"blocks.[{size.blocks}]": {
            "attn.qkv": linear(3 * vision, vision),
            "attn.proj": linear(vision, vision, SMALL),
            "mlp.linear_fc1": linear(size.ffn, vision),
            "mlp.linear_fc2": linear(vision, size.ffn, SMALL),
            "(norm1|norm2)": norm(vision),
        },
        "merger": {"norm": norm(vision), **merge},
        f"deepstack_merger_list.[{size.told}]": {"norm": norm(four), **merge},
    }


@dataclass(frozen=True)
class Qwen25VLSize:
    """The language model's sizes, and the vision tower's."""

    language: LlamaSize = field(
        default_factory=lambda: replace(QWEN25, width=64, ffn=64, heads=8, key_heads=4, own_words=True)
    )
    vision: int = 2 * QWEN25_VISION_HEAD
    ffn: int = 92  # as the published 3420, no multiple of 16
    blocks: int = FULL


QWEN25_VL = Qwen25VLSize()


def qwen25_vl(size: Qwen25VLSize) -> Table:
    """Every tensor of one model."""
    vision, four = size.vision, 4 * size.vision
    return llama(size.language) | tree(
        {
            "visual": {
                "patch_embed.proj": conv(vision, 3, 2, 14, 14, fp8=False, bias=False),
                f"blocks.[{size.blocks}]": {
                    "attn.qkv": linear(3 * vision, vision),
                    "attn.proj": linear(vision, vision, SMALL),
                    "mlp.(gate|up)_proj": linear(size.ffn, vision),
                    "mlp.down_proj": linear(vision, size.ffn, SMALL),
                    "(norm1|norm2).weight": gain(vision),
                },
                "merger": {
                    "ln_q.weight": gain(vision),
                    "mlp.0": linear(four, four),
                    "mlp.2": linear(size.language.width, four),
                },
            }
        }
    )


@dataclass(frozen=True)
class Gemma3Size:
    """The language model's sizes, and the vision tower's.

    side   of a picture, in patches; stock makes 16x16 tokens of them
    """

    language: LlamaSize = field(default_factory=lambda: replace(GEMMA3_4B, layers=48, adds=MANY))
    vision: int = 2 * SIGLIP_HEAD
    ffn: int = 208
    blocks: int = 4
    side: int = 32


GEMMA3 = Gemma3Size()


def gemma3(size: Gemma3Size) -> Table:
    """Every tensor of one model but the tokenizer."""
    vision = size.vision
    return llama(size.language) | tree(
        {
            "vision_model": {
                "embeddings.patch_embedding": conv(vision, 3, GEMMA_PATCH, GEMMA_PATCH, fp8=False),
                "embeddings.position_embedding.weight": normal(0.3, size.side**2, vision),
                f"encoder.layers.[{size.blocks}]": clip_layer(vision, size.ffn),
                "post_layernorm": norm(vision),
            },
            "multi_modal_projector.mm_input_projection_weight": normal(
                1 / math.sqrt(vision), vision, size.language.width
            ),
            "multi_modal_projector.mm_soft_emb_norm.weight": normal(0.1, vision),
        }
    )
