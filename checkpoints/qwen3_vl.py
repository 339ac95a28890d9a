"""Qwen3-VL in little, in its authors' names: a language model as `llama.py` has it, and eyes.

    model.language_model.…                                       Qwen3's, under this prefix
    model.visual.patch_embed.proj.{weight,bias}                  [eyes, 3, 2, 16, 16]
    model.visual.pos_embed.weight                                [places, eyes], of a square
    model.visual.blocks.{i}.attn.{qkv,proj}.{weight,bias}        16 heads
    model.visual.blocks.{i}.mlp.{linear_fc1,linear_fc2}.…        GELU by tanh
    model.visual.blocks.{i}.{norm1,norm2}.…                      LayerNorm
    model.visual.merger.{norm,linear_fc1,linear_fc2}.…           four neighbours as one; normalised before they are
    model.visual.deepstack_merger_list.{i}.…                     the same, normalised after; one for each of the first layers

Stock has sizes for 4B and 8B. Another width is of a size of its own, as the 2B, and FuseStream hands stock a class for it: load
with `fusestream.fusion.families.qwen3_vl.sizes.options`. Stock takes such a file for an 8B, so prompts go by "qwen3vl_8b". The
tokenizer is stock's, with ids far beyond this vocabulary; encode from ids instead:

    clip.encode_from_tokens({"qwen3vl_8b": [[(5, 1.0), ({"type": "image", "data": picture}, 1.0), (17, 1.0)]]})
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from . import llama
from .llama import SMALL, LlamaSize
from .weights import Spec, Table, conv, layer_norm, linear

HEADS = 16  # stock fixes it


@dataclass(frozen=True)
class Qwen3VLSize:
    """The language model's sizes, and the eyes'."""

    language: LlamaSize = field(
        default_factory=lambda: LlamaSize(
            width=256, ffn=256, heads=2, key_heads=1, head_width=128, layers=4, vocabulary=256
        )
    )
    eyes: int = 128
    ffn: int = 192
    blocks: int = 4
    told: int = 3
    places: int = 16


SIZE = Qwen3VLSize()


def table(size: Qwen3VLSize) -> Table:
    """Every tensor of one model."""
    out = {
        name.replace("model.", "model.language_model.", 1): spec for name, spec in llama.table(size.language).items()
    }
    words = "model.language_model.embed_tokens.weight"
    out[words] = replace(
        out[words], std=0.1
    )  # or it would write the last token over and over: its words are this table
    eyes, root = size.eyes, "model.visual"
    out |= conv(f"{root}.patch_embed.proj", eyes, 3, (2, 16, 16), fp8=False)
    out[f"{root}.pos_embed.weight"] = Spec((size.places, eyes), 0.3)
    for i in range(size.blocks):
        block = f"{root}.blocks.{i}"
        out |= linear(f"{block}.attn.qkv", 3 * eyes, eyes) | linear(f"{block}.attn.proj", eyes, eyes, gain=SMALL)
        out |= linear(f"{block}.mlp.linear_fc1", size.ffn, eyes)
        out |= linear(f"{block}.mlp.linear_fc2", eyes, size.ffn, gain=SMALL)
        out |= layer_norm(f"{block}.norm1", eyes) | layer_norm(f"{block}.norm2", eyes)
    out |= _merger(f"{root}.merger", size, eyes)
    for i in range(size.told):
        out |= _merger(f"{root}.deepstack_merger_list.{i}", size, 4 * eyes)
    return out


def _merger(name: str, size: Qwen3VLSize, normed: int) -> Table:
    four = 4 * size.eyes
    first = linear(f"{name}.linear_fc1", four, four)
    return layer_norm(f"{name}.norm", normed) | first | linear(f"{name}.linear_fc2", size.language.width, four)


STORAGES = llama.STORAGES
