"""The prediction for cards that nobody measured: counts of operations and bytes, at rates told one by one.

    python bench report prediction   the tables, the assumptions, and the same sums' error on the card that was measured

`python bench report` writes it into bench/results.md, a part of it into README, and the rates that FuseStream Plan goes
by into fusion/base.

Products, convolutions and attention are operations over a rate, everything else bytes over the bandwidth, weights that do not fit
bytes over the bus; a step is the sum of the first four, or the last if that is longer. On the H200 the rates are those of its
kernels' rows, and what comes out is held against its whole models' rows: that is the error of adding up. On other cards the rates
are shares of the data sheet's peaks, predicted from the machine code (bench/turing). `predicted/` has the parts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from .card_rates import ASSUMED, CARDS, read
from .predicted import without_family
from .predicted.default import default_table
from .predicted.faster import CLEAR, sentences
from .predicted.faster import table as faster_table
from .predicted.held import check, farthest
from .predicted.told import (
    HEADS,
    SHORT_CARDS,
    WHOLE_SIDES,
    Prediction,
    predictions,
    short_table,
    slowed,
    tables,
    whole_table,
)
from .report.tables import markdown

VIDEOS, PICTURES = ("1.3B", "14B"), ("klein", "Z-Image")  # what rows' names begin with


def load() -> dict[str, Any]:
    """The results of the measured card."""
    return read("nvidia-h200.json")


def links() -> str:
    """PCIe of every card, in words."""
    return ", ".join(f"{card.name} {card.pcie}.0 x{card.lanes}" for card in CARDS)


def error_table(results: Mapping[str, Any]) -> str:
    rows = (
        (name, who, f"{predicted:.3g}", f"{measured:.3g}", f"{predicted / measured - 1:+.0%}")
        for name, who, predicted, measured in check(results)
    )
    return markdown(("Work", "Side", "predicted, s", "measured", "error"), rows)


@lru_cache(maxsize=1)
def text() -> str:
    """Everything, as Markdown."""
    results, found = load(), all_predictions()
    assumed = "\n".join(f"- {line}" for line in ASSUMED)
    sides, (low, high) = " / ".join(HEADS[who] for who in WHOLE_SIDES), slowed(found)
    return (
        "All of this is predicted, not measured. Behind the work is how often it is usually done: what all steps take, text and "
        f"frames not counted, is in the last column.\n\n{tables(found)}\n\n"
        "Predicted, of sampling alone, all steps: 81 frames of 832x480 by Wan 1.3B (30 steps) and 14B (20, or 4 without guidance), "
        "121 of 1280x704 by 5B (20), a picture of 1024x1024 by klein (4), and of live video at most so many frames of 512x512 by "
        f"SD-Turbo; {sides}:\n\n{whole_table(found)}\n\n"
        f"Predicted, of stock's time what ours take by default with the same file, on {', '.join(SHORT_CARDS)}. An INT8 file is "
        "held against the newest ComfyUI as it is installed. Unpacking fp8 and GGUF is not counted for stock, so ours take at most "
        f"that part:\n\n{default_table(results, found)}\n\n"
        f"{without_family.table(results)}\n\n"
        "Predicted, how many times as long ours takes as the newest ComfyUI, least and most of the works above; bold where that "
        f"is faster in some of them by more than {CLEAR:.0%}:\n\n{faster_table(found)}\n\n"
        "Should Turing multiply INT8 at half the rate of its sheet, whoever multiplies in it takes "
        f"{low:.3g} to {high:.3g} times as long for videos.\n\nAssumed:\n\n{assumed}\n\n"
        f"PCIe: {links()}.\n\n"
        f"The same sums on the H200, from its kernels' rows, against its whole models:\n\n{error_table(results)}\n\n"
        f"Videos are at most {farthest(results, VIDEOS):.0%} off, where weights come over the bus most of all: there nothing is "
        f"added for copies that do not hide. Pictures are up to {farthest(results, PICTURES):.0%} off, and a text encoder more: "
        "products of few rows do not fill an H200 as they fill a small card, and its blocks are so short that they wait for the "
        "host. U-Nets and live video are not in that comparison.\n\n"
        "That holds the adding up to account, not the shares assumed for other cards: those from the machine code were within 5 % "
        "of what is published for two attention kernels on a T4, and within 9 % on Ampere and Ada where the clock is known "
        "(`bench/turing`).\n"
    )


def short_text() -> str:
    """For README: two works on three cards, and where the newest ComfyUI is faster."""
    found = all_predictions()
    head = (
        "**Predicted, not measured**: minutes for 81 frames of 832x480 by Wan 14B in 20 steps / seconds "
        "for a picture of 1024x1024 by Flux.2 klein 4B in 4. *newest* is the newest ComfyUI, with torch "
        "for CUDA 13; *attention* is its INT8 attention, which is off until you switch it on; W4A4 files "
        "have 4 bits a weight; FuseStream's own products of them are not in this table. On the RTX 2060 Super cuBLAS does "
        "most of its INT8 products: its times there are the least that the fastest of cuBLAS's kernels allows."
    )
    lines = "\n".join(textwrap.fill(f"- {one}", 100, subsequent_indent="  ") for one in sentences(found))
    where = f"Where the newest ComfyUI, at its best, is faster than a quality of ours, in some work by more than {CLEAR:.0%}:"
    return f"{_folded(head)}\n\n{short_table(found)}\n\n{_folded(where)}\n\n{lines}\n"


def _folded(paragraph: str) -> str:
    return textwrap.fill(paragraph, 100, break_long_words=False, break_on_hyphens=False)


@lru_cache(maxsize=1)
def all_predictions() -> tuple[Prediction, ...]:
    """Of every work on every card."""
    return tuple(predictions(load()))


def main(_arguments: Sequence[str] = ()) -> int:
    print(text())
    return 0
