"""The tensors of the layers of a language model with Qwen3's blocks, which every sound file has.

The output matrix and the last norm are not among them, because files without these are published
for models that read only layers in the middle. If the network that stock builds needs them, that
shows later.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from ...memory import WeightFile
from ..base.family import Shape

# Qwen3 and Gemma 3 have norms of each head; Gemma 3 has `pre_feedforward_layernorm`, too.
MARKS = ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "post_attention_layernorm")
OTHERS = (
    *("pre_feedforward_layernorm.weight", "self_attn.q_proj.bias"),
    # Several matrices as one: left to stock.
    *("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"),
)
# Number of layers of the models that stock builds, by the widths of stream and feed-forward: 0.6B,
# 1.7B or 2B, 4B, 8B.
PUBLISHED = {(1024, 3072): 28, (2048, 6144): 28, (2560, 9728): 36, (4096, 12288): 36}
WIDTHS = frozenset(width for width, _ in PUBLISHED)


def has_these_layers(header: WeightFile, root: str) -> bool:
    """Whether the file has layers of this kind. root: prefix of the model's names, such as
    `model.`."""
    first, names = f"{root}layers.0.", header.extents.keys()
    if not all(f"{first}{name}.weight" in names for name in MARKS):
        return False
    return not any(first + name in names for name in OTHERS)


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

    width, head = rows("input_layernorm.weight"), rows("self_attn.q_norm.weight")
    query, key, ffn = rows("self_attn.q_proj.weight"), rows("self_attn.k_proj.weight"), rows("mlp.gate_proj.weight")
    count = max(max(layers, default=-1) + 1, PUBLISHED.get((width or 0, ffn or 0), 0))
    inside: dict[str, Shape] = {
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (width, query),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (ffn, width),
        "mlp.up_proj.weight": (ffn, width),
        "mlp.down_proj.weight": (width, ffn),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    shapes: dict[str, Shape | None] = {f"{root}embed_tokens.weight": (None, width)}
    for i in range(count):
        shapes.update({f"{root}layers.{i}.{name}": shape for name, shape in inside.items()})
    return shapes


def usual(sizes: Iterable[int]) -> int | None:
    found = Counter(sizes).most_common(1)
    return found[0][0] if found else None
