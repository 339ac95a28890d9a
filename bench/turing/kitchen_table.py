"""README's table of comfy-kitchen's kernels beside ours, from what is kept of both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .cards import CARDS
from .kitchen_kernels import CARDS as CODES
from .kitchen_kernels import CUBLAS, KERNELS, Product, stored_label

_BLOCK = re.compile(r"(<!-- kitchen:begin -->\n).*?(<!-- kitchen:end -->)", re.DOTALL)
Stored = Mapping[str, Mapping[str, Any]]  # by code, what is kept of its cards
# What ours are called where theirs are like them: the fastest of these.
OURS = {
    "`turbo`, heads of 128": ("attention 128 turbo", "attention 128 turbo_half"),
    "`precise`, heads of 128": ("attention 128 precise",),
    "`turbo`, heads of 64": ("attention 64 turbo", "attention 64 turbo_half"),
    "`precise`, heads of 64": ("attention 64 precise",),
    "`linear_int8`": ("linear_int8 128x128", "linear_int8 128x256", "linear_int8 192x128"),
}


def rendered(page: str, stored: Stored) -> str:
    """The page with its table anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{table(stored)}\n\n{found[2]}", page)


def table(stored: Stored) -> str:
    names = [CARDS[card].name.removeprefix("GeForce ") for card in CODES.values()]
    rows = [("T/s", *names), ("---",) * (1 + len(names)), *_theirs(stored), *_ours(stored)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _theirs(stored: Stored) -> Iterator[tuple[str, ...]]:
    labels = list(dict.fromkeys(kernel.label for kernels in KERNELS.values() for kernel in kernels))
    products = {kernel.label for kernels in KERNELS.values() for kernel in kernels if isinstance(kernel, Product)}
    for label in sorted(labels, key=lambda label: (label in products, label)):
        yield f"theirs, {label}", *(_told(stored[code], (stored_label(code, label),), code) for code in CODES)


def _ours(stored: Stored) -> Iterator[tuple[str, ...]]:
    """And cuBLAS', to which theirs go."""
    yield f"theirs, {CUBLAS}", *(_told(stored[code], (CUBLAS,), code) for code in CODES)
    for name, labels in OURS.items():
        yield f"ours, {name}", *(_told(stored[code], labels, code) for code in CODES)


def _told(kept: Mapping[str, Any], labels: tuple[str, ...], code: str) -> str:
    """The fastest, and behind a stroke the fastest at half of the sheet's rate of IMMA."""
    card, known = CARDS[CODES[code]].name, [kept[label]["predictions"] for label in labels if label in kept]
    found = [[p for p in one if p["as_compiled"] and p["card"].startswith(card)] for one in known]
    if not found:
        return "-"
    usual = max(p["tflops"] for one in found for p in one if p["card"] == card)
    slow = [p["tflops"] for one in found for p in one if p["card"] != card]
    return f"{usual:.1f} / {max(slow):.1f}" if slow else f"{usual:.1f}"
