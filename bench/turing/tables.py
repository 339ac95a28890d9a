"""README's tables, from the predictions that are kept: of attention, of comfy-kitchen's kernels beside ours, of GTX 10."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..report.tables import markdown
from . import pascal
from .cards import CARDS
from .kernels import CUBLAS, HEADS, KITCHEN, KITCHEN_CARDS, OURS, our_label, stored_label

PAGE = Path(__file__).parent / "README.md"
_BLOCK = re.compile(r"(<!-- (attention|kitchen|pascal|steps):begin ?(\w*) -->\n).*?(<!-- \2:end -->)", re.DOTALL)
_HEADS = ("heads of", "`precise`", "`fast`", "`turbo`, FP32 sums", "`turbo`, half sums", "`turbo`, values in INT8")
Stored = Mapping[str, Mapping[str, Any]]  # by what was compiled for
# The names of ours where theirs are like them: the fastest of these.
BESIDE = {
    "`turbo`, heads of 128": ("attention 128 turbo_int8",),
    "`precise`, heads of 128": ("attention 128 precise",),
    "`turbo`, heads of 64": ("attention 64 turbo_int8",),
    "`precise`, heads of 64": ("attention 64 precise",),
    "`linear_int8`": ("linear_int8 128x128", "linear_int8 128x256", "linear_int8 192x128"),
    "`linear_int4`": ("linear_int4 128x128", "linear_int4 128x256", "linear_int4 192x128"),
}


def rendered(page: str, stored: Stored) -> str:
    """The page with its tables anew."""

    def block(found: re.Match[str]) -> str:
        table = {
            "kitchen": lambda: kitchen(stored),
            "pascal": lambda: pascal.rates_table(stored["sm_61"]),
            "steps": lambda: pascal.steps_table(stored["sm_61"]),
        }.get(found[2], lambda: attention(stored[found[3]]))()
        return f"{found[1]}\n{table}\n\n{found[4]}"

    return _BLOCK.sub(block, page)


def attention(kept: Mapping[str, Any]) -> str:
    """Ours: TFLOP/s on each card, and of the first one the share of the peak of these sums."""

    def told(label: str) -> str:
        found = [p for p in kept[label]["predictions"] if p["as_compiled"]]
        speeds = " / ".join(f"{p['tflops']:.1f}" for p in found)
        return f"{speeds}, {found[0]['share']:.0%}"

    rows = []
    for listed in ("", " listed"):
        for head in sorted(HEADS, reverse=True):
            labels = [our_label(*one) for one in OURS if (one[0], one[2]) == (head, listed)]
            if labels:
                rows.append((f"{head}, blocks of a list" if listed else str(head), *map(told, labels)))
    return markdown(_HEADS, rows)


def kitchen(stored: Stored) -> str:
    """Theirs, cuBLAS' to which theirs go, and ours."""
    names = [CARDS[card].name.removeprefix("GeForce ") for card in KITCHEN_CARDS.values()]
    return markdown(("T/s", *names), _kitchen_rows(stored))


def _kitchen_rows(stored: Stored) -> Iterator[tuple[str, ...]]:
    for label in sorted({kernel.label for kernels in KITCHEN.values() for kernel in kernels}):
        yield f"theirs, {label}", *(_fastest(stored, (stored_label(code, label),), code) for code in KITCHEN_CARDS)
    for name, labels in (("theirs, " + CUBLAS, (CUBLAS,)), *((f"ours, {name}", ones) for name, ones in BESIDE.items())):
        yield name, *(_fastest(stored, labels, code) for code in KITCHEN_CARDS)


def _fastest(stored: Stored, labels: tuple[str, ...], code: str) -> str:
    """T/s, and behind a stroke the fastest at half of the sheet's rate of IMMA."""
    card, known = CARDS[KITCHEN_CARDS[code]].name, [stored[code][label] for label in labels if label in stored[code]]
    found = [p for one in known for p in one["predictions"] if p["as_compiled"] and p["card"].startswith(card)]
    if not found:
        return "-"
    usual = max(p["tflops"] for p in found if p["card"] == card)
    slow = [p["tflops"] for p in found if p["card"] != card]
    return f"{usual:.1f} / {max(slow):.1f}" if slow else f"{usual:.1f}"
