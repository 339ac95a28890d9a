"""Text encoders, and CLIP's picture tower: tensor names of the published files.

    umt5      Comfy-Org's repackaging, with the tokenizer inside the file. Stock knows it by block
              23 having an FFN of 10240, so 24 layers and that FFN must stay; or a file has a matrix
              of that name and height and no other of block 23 (`umt5_mark`)
    t5xxl     T5 v1.1 XXL: the same with one table of relative places for all layers. Alone or with
              CLIP-L, by CLIPType
    qwen3     CLIPType.LUMINA2 (Z-Image) and FLUX2 (klein). Stock knows the 4B by its width of 2560.
              klein reads layers 9, 18 and 27, more than there are here: `narrow`, or a class in the
              model options
    gemma2    CLIPType.LUMINA2, by its fourth norm. The tokenizer is in the file
    qwen3_vl  a Qwen3 under another prefix, and eyes. Stock has sizes for 4B and 8B; FuseStream
              hands it a class for another
    clip_l    SD 1.5's encoder, one of Flux's and of SD 3's. Stock knows it by layer 0, and that
              there is no layer 22
    clip_vision   Wan I2V's ViT-H. Stock goes by the number of layers alone: `clip_vision_config` is
                  for its class

Where the tokenizer is stock's own, its ids lie far beyond the small vocabulary: encode from ids.
Other sizes reach stock through `load_clip`'s model options (`options.py` makes them from a file).
Other spellings of these encoders are in `spellings.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from .weights import Spec, Table, Tree, conv, gain, linear, norm, normal, tree

T5_WIDTH = 16  # what the FP8 products of newer cards can take at least
BUCKETS = 32
T5_SMALL = 0.4  # what a layer adds to the residual: with gains of one, 24 of them amplify a rounding error twentyfold
SMALL = 0.5  # the same of four layers

# ----------------------------------------------------------------------------------------------- T5


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


# ---------------------------------------------------------------------------------- Qwen3 and Gemma


@dataclass(frozen=True)
class LlamaSize:
    """The sizes of one encoder. Stock fixes a head's width: 128 for Qwen3, 256 for Gemma."""

    width: int
    ffn: int
    heads: int
    key_heads: int
    head_width: int
    layers: int
    vocabulary: int
    gemma: bool = False


QWEN3 = LlamaSize(width=2560, ffn=32, heads=2, key_heads=1, head_width=128, layers=4, vocabulary=256)
GEMMA2 = LlamaSize(width=64, ffn=128, heads=2, key_heads=1, head_width=256, layers=4, vocabulary=512, gemma=True)


def llama(size: LlamaSize) -> Table:
    """Every tensor but the tokenizer. Queries share a key. Gemma adds one to its norms' weights."""
    width, query, key = size.width, size.heads * size.head_width, size.key_heads * size.head_width

    def rms(factor: float = 1.0) -> Spec:
        return normal(0.1, width, mean=factor - 1.0 if size.gemma else factor)

    # In Gemma a norm ends a branch, so its gain is what the branch adds.
    branch = rms(SMALL if size.gemma else 1.0)
    return tree(
        {
            "model.embed_tokens.weight": normal(1 / math.sqrt(width) if size.gemma else 1.0, size.vocabulary, width),
            f"model.layers.[{size.layers}]": {
                "self_attn.q_proj": linear(query, width, bias=False),
                "self_attn.(k|v)_proj": linear(key, width, bias=False),
                "self_attn.o_proj": linear(width, query, SMALL, bias=False),
                "mlp.(gate|up)_proj": linear(size.ffn, width, bias=False),
                "mlp.down_proj": linear(width, size.ffn, SMALL, bias=False),
                "input_layernorm.weight": rms(),
                "post_attention_layernorm.weight": branch,
                "pre_feedforward_layernorm.weight": rms() if size.gemma else None,
                "post_feedforward_layernorm.weight": branch if size.gemma else None,
                "self_attn.(q|k)_norm.weight": None if size.gemma else gain(size.head_width),
            },
            "model.norm.weight": rms(),
        }
    )


@dataclass(frozen=True)
class Qwen3VLSize:
    """The language model's sizes, and the eyes', which have 16 heads."""

    language: LlamaSize = field(default_factory=lambda: replace(QWEN3, width=256, ffn=256))
    eyes: int = 128
    ffn: int = 192
    blocks: int = 4
    told: int = 3  # how many of the first layers the eyes speak to
    places: int = 16


QWEN3_VL = Qwen3VLSize()


def qwen3_vl(size: Qwen3VLSize) -> Table:
    """Every tensor of one model."""
    eyes, four = size.eyes, 4 * size.eyes  # a merger takes four neighbours as one
    language = llama(size.language)
    # Of size one, the table that also writes would write the last token over and over.
    language["model.embed_tokens.weight"] = replace(language["model.embed_tokens.weight"], std=0.1)
    merge = {"linear_fc1": linear(four, four), "linear_fc2": linear(size.language.width, four)}
    return {name.replace("model.", "model.language_model.", 1): spec for name, spec in language.items()} | tree(
        {
            "model.visual": {
                "patch_embed.proj": conv(eyes, 3, 2, 16, 16, fp8=False),
                "pos_embed.weight": normal(0.3, size.places, eyes),  # of a square
                f"blocks.[{size.blocks}]": {
                    "attn.qkv": linear(3 * eyes, eyes),
                    "attn.proj": linear(eyes, eyes, SMALL),
                    "mlp.linear_fc1": linear(size.ffn, eyes),
                    "mlp.linear_fc2": linear(eyes, size.ffn, SMALL),
                    "(norm1|norm2)": norm(eyes),
                },
                "merger": {"norm": norm(eyes), **merge},
                f"deepstack_merger_list.[{size.told}]": {"norm": norm(four), **merge},
            }
        }
    )


# --------------------------------------------------------------------------------------------- CLIP

CLIP_WIDTH = 64
CLIP_HEAD = 32  # 64 in the published models; no size in the file tells
CLIP_LAYERS = 4
CLIP_G_FFN, CLIP_G_LAYERS = 128, 32  # stock knows a CLIP-G by layer 30


def clip(width: int = CLIP_WIDTH, ffn: int = 4 * CLIP_WIDTH, layers: int = CLIP_LAYERS) -> Table:
    """A text tower in transformers' names. The vocabulary is fixed, and most of the file."""
    return tree(
        {
            "text_model.embeddings.token_embedding.weight": normal(0.5, 49408, width),
            "text_model.embeddings.position_embedding.weight": normal(0.5, 77, width),
            f"text_model.encoder.layers.[{layers}]": _clip_layer(width, ffn),
            "text_model.final_layer_norm": norm(width),
            "text_projection": linear(width, width, bias=False),  # for the pooled output; Flux and SD 1.5 do without
        }
    )


def _clip_layer(width: int, ffn: int) -> Tree:
    return {
        "self_attn.(q|k|v|out)_proj": linear(width, width),
        "(layer_norm1|layer_norm2)": norm(width),
        "mlp.fc1": linear(ffn, width),
        "mlp.fc2": linear(width, ffn),
    }


@dataclass(frozen=True)
class ClipVisionSize:
    """The sizes of one picture tower. Wan's img_emb fixes the width."""

    width: int = 1280
    ffn: int = 256
    layers: int = 2
    projection: int = 64


CLIP_VISION, CLIP_VISION_H = ClipVisionSize(), ClipVisionSize(ffn=5120, layers=32, projection=1024)
VISION_PATCH, VISION_SIDE, VISION_HEADS = 14, 224, 16


def clip_vision(size: ClipVisionSize) -> Table:
    """Every tensor of one picture tower, in transformers' spelling."""
    width, patch = size.width, VISION_PATCH
    return tree(
        {
            "vision_model": {
                "embeddings.class_embedding": normal(0.5, width),
                "embeddings.position_embedding.weight": normal(0.5, (VISION_SIDE // patch) ** 2 + 1, width),
                "embeddings.patch_embedding.weight": normal((3 * patch * patch) ** -0.5, width, 3, patch, patch),
                "pre_layrnorm": norm(width),  # sic
                f"encoder.layers.[{size.layers}]": _clip_layer(width, size.ffn),
                "post_layernorm": norm(width),
            },
            "visual_projection": linear(size.projection, width, bias=False),
        }
    )
