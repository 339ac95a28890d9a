"""Which files are Qwen3-VL's, in the names of its authors or as MiniMax H3's encoder has them, the
tensors that they must have, and the sizes that they tell.

model.language_model.layers.{i}.…, or model.layers.{i}.…      as Qwen3's
model.visual.…, or visual.…
    patch_embed.proj.weight                                   [vision's width, 3, 2, 16, 16]
    pos_embed.weight                                          [places, vision's width]
    blocks.{i}.attn.qkv, attn.proj, mlp.linear_fc1, mlp.linear_fc2, norm1, norm2
    merger, deepstack_merger_list.{i}.norm, linear_fc1, linear_fc2
lm_head.weight                                                8B only; others use the embedding
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ....memory import WeightFile
from ...base.family import Expected, Shape
from ...text.layout import Marks, expected_layers, is_language_model, width_of

ROOTS = ("model.language_model.", "model.")
VISION = ("model.visual.", "visual.")
MARK = "deepstack_merger_list.0.norm.weight"  # behind a prefix: stock's mark, too
LAYERS = Marks(has=("self_attn.q_norm.weight", "self_attn.k_norm.weight"))
PARTS = ("blocks", "deepstack_merger_list")
LINEARS = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
HEADS = 16  # of the vision part, in all published models
# Blocks after which the vision part gives its output to deepstack, by the number of blocks. The file does
# not tell.
TOLD_BEHIND = {24: (5, 11, 17), 27: (8, 16, 24)}


def root_of(header: WeightFile) -> str | None:
    """The prefix of the language model's names; None: it is no Qwen3-VL."""
    if vision_of(header) is None:
        return None
    return next((root for root in ROOTS if is_language_model(header, LAYERS, root)), None)


def vision_of(header: WeightFile) -> str | None:
    """The prefix of the vision part's names; None: there is none of this kind."""
    return next((prefix for prefix in VISION if prefix + MARK in header.extents), None)


def is_qwen3_vl(header: WeightFile) -> bool:
    return root_of(header) is not None


@dataclass(frozen=True)
class Sizes:
    """The sizes of a whole model, as in its file.

    width, ffn, layers, heads, key_heads, vocabulary   of the language model
    own_words                          whether the output matrix is separate from the embedding
    vision, vision_ffn, blocks, places  of its vision part
    told_behind                        the blocks whose output deepstack reads
    """

    width: int
    ffn: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    own_words: bool
    vision: int
    vision_ffn: int
    blocks: int
    places: int
    told_behind: tuple[int, ...]


def sizes(header: WeightFile) -> Sizes:
    """The sizes in a file of this family that has everything in `expected`."""
    root, prefix = root_of(header), vision_of(header)
    shapes = {name: extent.shape for name, extent in header.extents.items()}
    first = f"{root}layers.0."
    head = shapes[f"{first}self_attn.q_norm.weight"][0]
    vocabulary, width = shapes[f"{root}embed_tokens.weight"]
    blocks, told = (count(header, f"{prefix}{part}.") for part in PARTS)
    each = max(blocks // (told + 1), 1)
    return Sizes(
        width=width,
        ffn=shapes[f"{first}mlp.gate_proj.weight"][0],
        layers=count(header, f"{root}layers."),
        heads=shapes[f"{first}self_attn.q_proj.weight"][0] // head,
        key_heads=shapes[f"{first}self_attn.k_proj.weight"][0] // head,
        vocabulary=vocabulary,
        own_words="lm_head.weight" in shapes,
        vision=shapes[f"{prefix}pos_embed.weight"][1],
        vision_ffn=shapes[f"{prefix}blocks.0.mlp.linear_fc1.weight"][0],
        blocks=blocks,
        places=shapes[f"{prefix}pos_embed.weight"][0],
        told_behind=TOLD_BEHIND.get(blocks, tuple(each * (i + 1) - 1 for i in range(told))),
    )


def count(header: WeightFile, before: str) -> int:
    """How many numbers follow this in names: the largest, and one."""
    numbered = re.compile(rf"{re.escape(before)}(\d+)\.")
    return max((int(found[1]) + 1 for name in header.extents if (found := numbered.match(name))), default=0)


def expected(header: WeightFile) -> Expected:
    root, prefix = root_of(header), vision_of(header)
    assert root is not None, "it is of this family"
    shapes: dict[str, Shape | None] = dict(expected_layers(header, root))
    places = header.extents.get(f"{prefix}pos_embed.weight")
    vision = places.shape[1] if places is not None and len(places.shape) == 2 else None
    width, merged = width_of(header, root), None if vision is None else 4 * vision
    shapes[f"{prefix}pos_embed.weight"] = (None, vision)
    shapes[f"{prefix}patch_embed.proj.weight"] = (vision, 3, 2, 16, 16)
    shapes[f"{prefix}patch_embed.proj.bias"] = (vision,)
    blocks, told = (count(header, f"{prefix}{part}.") for part in PARTS)
    for i in range(blocks):
        block = f"{prefix}blocks.{i}."
        shapes |= {f"{block}{name}.{part}": None for name in LINEARS for part in ("weight", "bias")}
        shapes |= {f"{block}{name}.{part}": (vision,) for name in ("norm1", "norm2") for part in ("weight", "bias")}
        shapes |= {f"{block}attn.proj.weight": (vision, vision)}
    mergers = [f"{prefix}{PARTS[1]}.{i}." for i in range(told)]
    for merger, normed in ((f"{prefix}merger.", vision), *((each, merged) for each in mergers)):
        shapes |= {f"{merger}norm.weight": (normed,), f"{merger}norm.bias": (normed,)}
        shapes |= {f"{merger}linear_fc1.weight": (merged, merged), f"{merger}linear_fc1.bias": (merged,)}
        shapes |= {f"{merger}linear_fc2.weight": (width, merged), f"{merger}linear_fc2.bias": (width,)}
    return Expected(shapes)
