"""CLIP's text tower, and its picture tower, in transformers' names.

clip_l        SD 1.5's encoder, one of Flux's and of SD 3's. Stock knows it by layer 0, and that
              there is no layer 22
clip_vision   Wan I2V's ViT-H. Stock goes by the number of layers alone: `clip_vision_config` is
              for its class
"""

from __future__ import annotations

from dataclasses import dataclass

from ..weights import Table, Tree, linear, norm, normal, tree

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
            f"text_model.encoder.layers.[{layers}]": clip_layer(width, ffn),
            "text_model.final_layer_norm": norm(width),
            "text_projection": linear(width, width, bias=False),  # for the pooled output; Flux and SD 1.5 do without
        }
    )


def clip_layer(width: int, ffn: int) -> Tree:
    """A layer of the text tower, of the picture tower, and of SigLIP."""
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
                f"encoder.layers.[{size.layers}]": clip_layer(width, size.ffn),
                "post_layernorm": norm(width),
            },
            "visual_projection": linear(size.projection, width, bias=False),
        }
    )
