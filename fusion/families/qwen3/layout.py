"""What is in a Qwen3 file, by stock's names: every sound file has at least this of its layers.

Its words' matrix and the last norm are no part of that: who only reads layers in the middle publishes files without them, and what
the network that stock builds needs of them shows then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from ....memory import WeightFile
from ...family import Expected, Shape

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
FIRST = "model.layers.0."
# Norms of each head are Qwen3's and Gemma 3's, of which one has four more norms in a layer.
MARKS = frozenset(
    f"{FIRST}{name}.weight"
    for name in ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "post_attention_layernorm")
)
OTHERS = (f"{FIRST}pre_feedforward_layernorm.weight", f"{FIRST}self_attn.q_proj.bias")
SEEING = ("visual.", "vision_model.", "model.visual.")  # Qwen3-VL: pictures, and positions in three dimensions
# The layers of those that stock builds, by width and by the width of the feed-forward: 0.6B, 1.7B, 4B, 8B.
PUBLISHED = {(1024, 3072): 28, (2048, 6144): 28, (2560, 9728): 36, (4096, 12288): 36}
WIDTHS = frozenset(width for width, _ in PUBLISHED)


def is_qwen3(header: WeightFile) -> bool:
    names = header.extents.keys()
    if not names >= MARKS or any(name in names for name in OTHERS):
        return False
    width = header.extents[f"{FIRST}post_attention_layernorm.weight"].shape
    return len(width) == 1 and width[0] in WIDTHS and not any(name.startswith(SEEING) for name in names)


def expected(header: WeightFile) -> Expected:
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, extent in header.extents.items():
        if (found := LAYER.fullmatch(name)) is not None:
            layers.setdefault(int(found[1]), {})[found[2]] = extent.shape

    def rows(name: str) -> int | None:
        """Of a tensor, in most layers. Packed or not, there are as many rows."""
        return _usual(inside[name][0] for inside in layers.values() if inside.get(name))

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
    shapes: dict[str, Shape | None] = {"model.embed_tokens.weight": (None, width)}
    for i in range(count):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in inside.items()})
    return Expected(shapes)


def _usual(sizes: Iterable[int]) -> int | None:
    found = Counter(sizes).most_common(1)
    return found[0][0] if found else None
