"""The tensors of the encoder in a T5 or UMT5 file, by stock's names, which every sound file has."""

from __future__ import annotations

import re
from collections import Counter

from ....memory import WeightFile
from ...base.family import Expected, Shape

BLOCK = re.compile(r"encoder\.block\.(\d+)\.(.+)")
BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"
QUERY = "layer.0.SelfAttention.q.weight"
NORM = "layer.0.layer_norm.weight"
OUT = "layer.1.DenseReluDense.wo.weight"
GATED = ("layer.1.DenseReluDense.wi_0.weight", "layer.1.DenseReluDense.wi_1.weight")
PLAIN = ("layer.1.DenseReluDense.wi.weight",)
# Width of the feed-forward by which stock recognises an XXL, and its number of blocks.
XXL = 10240, 24
# The only tensor of an XXL's last block in a file of a few small blocks, by which stock recognises
# it. No block is built of it.
MARK = ["layer.1.DenseReluDense.wi_1.weight"]
# Numbers of blocks, by width.
PUBLISHED = {512: (6, 8), 768: (12,), 1024: (24,), 1472: (12,), 2048: (24,), 4096: (24,)}


def expected(header: WeightFile) -> Expected:
    blocks: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, extent in header.extents.items():
        if (found := BLOCK.fullmatch(name)) is not None:
            blocks.setdefault(int(found[1]), {})[found[2]] = extent.shape
    if list(blocks.get(XXL[1] - 1, ())) == MARK:
        del blocks[XXL[1] - 1]
    has = Counter(name for inside in blocks.values() for name in inside)
    up = PLAIN if has[PLAIN[0]] else GATED
    # By rows: a packed matrix has as many.
    inner, width, ffn = (_rows(name, blocks) for name in (QUERY, NORM, up[0]))
    count = max(blocks, default=-1) + 1
    if ffn == XXL[0]:
        count = max(count, XXL[1])
    every = has[BIAS] > 1 or (has[BIAS] == 1 and BIAS not in blocks.get(0, {}))

    shapes: dict[str, Shape | None] = {"shared.weight": (None, width), "encoder.final_layer_norm.weight": (width,)}
    for i in range(count):
        here: dict[str, Shape | None] = {
            **{f"layer.0.SelfAttention.{part}.weight": (inner, width) for part in "qkv"},
            "layer.0.SelfAttention.o.weight": (width, inner),
            NORM: (width,),
            "layer.1.layer_norm.weight": (width,),
            **dict.fromkeys(up, (ffn, width)),
            OUT: (width, ffn),
        }
        if every or i == 0:
            here[BIAS] = (None, None)
        shapes.update({f"encoder.block.{i}.{name}": shape for name, shape in here.items()})
    doubts = []
    usual = PUBLISHED.get(width or 0)
    if usual is not None and count not in usual:
        told = " or ".join(map(str, usual))
        doubts.append(
            f"has {count} blocks; the published encoders of its width, {width}, have {told}. If nobody shortened it on purpose, "
            "download it again."
        )
    return Expected(shapes, doubts=doubts)


def _rows(name: str, blocks: dict[int, dict[str, tuple[int, ...]]]) -> int | None:
    """The most frequent number of rows of a tensor in the blocks."""
    found = Counter(inside[name][0] for inside in blocks.values() if inside.get(name))
    return found.most_common(1)[0][0] if found else None
