"""Which files have the layers of a language model, in stock's names, and the tensors that every sound
one has.

The output matrix and the last norm are not among them, because files without these are published
for models that read only layers in the middle. If the network that stock builds needs them, that
shows later. Vision parts are not either.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...memory import WeightFile
from ..base.family import Shape

ROOT = "model."
# Of every layer, by the sizes of its rows and columns.
MATRICES = {
    "self_attn.q_proj": ("query", "width"),
    "self_attn.k_proj": ("key", "width"),
    "self_attn.v_proj": ("key", "width"),
    "self_attn.o_proj": ("width", "query"),
    "mlp.gate_proj": ("ffn", "width"),
    "mlp.up_proj": ("ffn", "width"),
    "mlp.down_proj": ("width", "ffn"),
}
NORMS = ("input_layernorm", "post_attention_layernorm")
ALWAYS = tuple(f"{name}.weight" for name in (*MATRICES, *NORMS))
# Of some models' layers, by their size.
SOMETIMES = {
    **{f"self_attn.{part}_norm.weight": "head" for part in "qk"},
    **{f"self_attn.{part}_proj.bias": size for part, size in (("q", "query"), ("k", "key"), ("v", "key"))},
    **{f"{part}_feedforward_layernorm.weight": "width" for part in ("pre", "post")},
}
# Number of layers of the models that stock builds, by the widths of stream and feed-forward: Qwen3
# 0.6B, 1.7B or 2B, 4B, 8B; Qwen2.5 3B, 7B; Gemma 2 2B; Gemma 3 4B, 12B; Llama 3.1 8B; Ministral 3B.
PUBLISHED = {
    (1024, 3072): 28, (2048, 6144): 28, (2560, 9728): 36, (4096, 12288): 36, (2048, 11008): 36, (3584, 18944): 28,
    (2304, 9216): 26, (2560, 10240): 34, (3840, 15360): 48, (4096, 14336): 32, (3072, 9216): 26,
}  # fmt: skip


@dataclass(frozen=True)
class Marks:
    """What tells the files of a family.

    has, lacks  names in the first layer
    outside     prefixes that no name has
    widths      of the stream; empty: any
    """

    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()


def is_language_model(header: WeightFile, marks: Marks, root: str = ROOT) -> bool:
    """Whether the file has layers of this kind. root: prefix of the model's names."""
    first, names = f"{root}layers.0.", header.extents.keys()
    if not all(first + name in names for name in (*ALWAYS, *marks.has)):
        return False
    if any(first + name in names for name in marks.lacks) or any(name.startswith(marks.outside) for name in names):
        return False
    return not marks.widths or width_of(header, root) in marks.widths


def width_of(header: WeightFile, root: str) -> int | None:
    """Width of the stream; None: the file does not tell."""
    extent = header.extents.get(f"{root}layers.0.post_attention_layernorm.weight")
    return extent.shape[0] if extent is not None and len(extent.shape) == 1 else None


def expected_layers(header: WeightFile, root: str) -> Mapping[str, Shape | None]:
    """The layers' tensors and the token embedding, with their shapes."""
    layer = re.compile(rf"{re.escape(root)}layers\.(\d+)\.(.+)")
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, extent in header.extents.items():
        if (found := layer.fullmatch(name)) is not None:
            layers.setdefault(int(found[1]), {})[found[2]] = extent.shape

    def rows(name: str) -> int | None:
        """Rows of a tensor in most layers. A packed tensor has as many rows."""
        return usual(inside[name][0] for inside in layers.values() if inside.get(name))

    sizes = {
        "width": rows("input_layernorm.weight"),
        "head": rows("self_attn.q_norm.weight"),
        "query": rows("self_attn.q_proj.weight"),
        "key": rows("self_attn.k_proj.weight"),
        "ffn": rows("mlp.gate_proj.weight"),
    }
    count = max(max(layers, default=-1) + 1, PUBLISHED.get((sizes["width"] or 0, sizes["ffn"] or 0), 0))
    inside: dict[str, Shape] = {
        f"{name}.weight": tuple(sizes[part] for part in parts) for name, parts in MATRICES.items()
    }
    inside |= {f"{name}.weight": (sizes["width"],) for name in NORMS}
    inside |= {
        name: (sizes[size],)
        for name, size in SOMETIMES.items()
        if 2 * sum(name in one for one in layers.values()) > len(layers)
    }
    shapes: dict[str, Shape | None] = {f"{root}embed_tokens.weight": (None, sizes["width"])}
    for i in range(count):
        shapes.update({f"{root}layers.{i}.{name}": shape for name, shape in inside.items()})
    return shapes


def usual(sizes: Iterable[int]) -> int | None:
    found = Counter(sizes).most_common(1)
    return found[0][0] if found else None
