"""Which files are Qwen3-VL's, in the names of its authors, the tensors that they must have, and the
sizes that they tell.

model.language_model.layers.{i}.…, or model.layers.{i}.…      as Qwen3's
model.visual.patch_embed.proj.weight                          [eyes' width, 3, 2, 16, 16]
model.visual.pos_embed.weight                                 [places, eyes' width]
model.visual.blocks.{i}.attn.qkv, attn.proj, mlp.linear_fc1, mlp.linear_fc2, norm1, norm2
model.visual.merger, deepstack_merger_list.{i}.norm, linear_fc1, linear_fc2
lm_head.weight                                                8B only; others use the embedding
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ....memory import WeightFile
from ...base.family import Expected, Shape
from ...text.layout import expected_layers, has_these_layers, width_of

ROOTS = ("model.language_model.", "model.")
EYES = "model.visual."
MARK = f"{EYES}deepstack_merger_list.0.norm.weight"  # stock's mark, too
BLOCK = re.compile(rf"{re.escape(EYES)}blocks\.(\d+)\.")
MERGER = re.compile(rf"{re.escape(EYES)}deepstack_merger_list\.(\d+)\.")
LINEARS = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
HEADS = 16  # of the eyes, in all published models
# Blocks after which the eyes give their output to deepstack, by the number of blocks. The file does
# not tell.
TOLD_BEHIND = {24: (5, 11, 17), 27: (8, 16, 24)}


def root_of(header: WeightFile) -> str | None:
    """The prefix of the language model's names; None: it is no Qwen3-VL."""
    if MARK not in header.extents:
        return None
    return next((root for root in ROOTS if has_these_layers(header, root)), None)


def is_qwen3_vl(header: WeightFile) -> bool:
    return root_of(header) is not None


@dataclass(frozen=True)
class Sizes:
    """The sizes of a whole model, as in its file.

    width, ffn, layers, heads, key_heads, vocabulary   of the language model
    own_words                          whether the output matrix is separate from the embedding
    eyes, eyes_ffn, blocks, places     of its eyes
    told_behind                        the blocks whose output deepstack reads
    """

    width: int
    ffn: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    own_words: bool
    eyes: int
    eyes_ffn: int
    blocks: int
    places: int
    told_behind: tuple[int, ...]


def sizes(header: WeightFile) -> Sizes:
    """The sizes in a file of this family that has everything in `expected`."""
    root, shapes = root_of(header), {name: extent.shape for name, extent in header.extents.items()}
    first = f"{root}layers.0."
    head = shapes[f"{first}self_attn.q_norm.weight"][0]
    vocabulary, width = shapes[f"{root}embed_tokens.weight"]
    blocks, told = count(header, BLOCK), count(header, MERGER)
    each = max(blocks // (told + 1), 1)
    return Sizes(
        width=width,
        ffn=shapes[f"{first}mlp.gate_proj.weight"][0],
        layers=count(header, re.compile(rf"{re.escape(root or '')}layers\.(\d+)\.")),
        heads=shapes[f"{first}self_attn.q_proj.weight"][0] // head,
        key_heads=shapes[f"{first}self_attn.k_proj.weight"][0] // head,
        vocabulary=vocabulary,
        own_words="lm_head.weight" in shapes,
        eyes=shapes[f"{EYES}pos_embed.weight"][1],
        eyes_ffn=shapes[f"{EYES}blocks.0.mlp.linear_fc1.weight"][0],
        blocks=blocks,
        places=shapes[f"{EYES}pos_embed.weight"][0],
        told_behind=TOLD_BEHIND.get(blocks, tuple(each * (i + 1) - 1 for i in range(told))),
    )


def count(header: WeightFile, numbered: re.Pattern[str]) -> int:
    return max((int(found[1]) + 1 for name in header.extents if (found := numbered.match(name))), default=0)


def expected(header: WeightFile) -> Expected:
    root = root_of(header)
    assert root is not None, "it is of this family"
    shapes: dict[str, Shape | None] = dict(expected_layers(header, root))
    places = header.extents.get(f"{EYES}pos_embed.weight")
    eyes = places.shape[1] if places is not None and len(places.shape) == 2 else None
    width, merged = width_of(header, root), None if eyes is None else 4 * eyes
    shapes[f"{EYES}pos_embed.weight"] = (None, eyes)
    shapes[f"{EYES}patch_embed.proj.weight"] = (eyes, 3, 2, 16, 16)
    shapes[f"{EYES}patch_embed.proj.bias"] = (eyes,)
    for i in range(count(header, BLOCK)):
        block = f"{EYES}blocks.{i}."
        shapes |= {f"{block}{name}.{part}": None for name in LINEARS for part in ("weight", "bias")}
        shapes |= {f"{block}{name}.{part}": (eyes,) for name in ("norm1", "norm2") for part in ("weight", "bias")}
        shapes |= {f"{block}attn.proj.weight": (eyes, eyes)}
    mergers = [f"{EYES}deepstack_merger_list.{i}." for i in range(count(header, MERGER))]
    for merger, normed in ((f"{EYES}merger.", eyes), *((each, merged) for each in mergers)):
        shapes |= {f"{merger}norm.weight": (normed,), f"{merger}norm.bias": (normed,)}
        shapes |= {f"{merger}linear_fc1.weight": (merged, merged), f"{merger}linear_fc1.bias": (merged,)}
        shapes |= {f"{merger}linear_fc2.weight": (width, merged), f"{merger}linear_fc2.bias": (width,)}
    return Expected(shapes)
