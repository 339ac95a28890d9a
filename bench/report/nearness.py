"""The plot of time against nearness: what each way to compute takes, and how near its frames are to FP32's.

Nearness is measured on the longer videos of a trained model. Time is what the same videos took on the card, where that was
measured, and what a Wan 14B is predicted to take on cards that were not at hand.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..card_rates import Who
from ..fidelity.long import LONG_SECTION
from ..fidelity.variants import (
    OFFERED,
    OURS_FAST,
    OURS_PRECISE,
    STOCK_CACHED,
    STOCK_FP16,
    STOCK_INT8,
    STOCK_INT8_ATTENTION,
    STOCK_W4A4_ATTENTION,
    TURBO_HALF_OF_IT,
    TURBO_INT8,
    TURBO_W4A4,
)
from ..predicted.told import Prediction
from .svg import Canvas, Point, Scale, grid

NAME = "bench-nearness.svg"
TITLE = "Time against nearness to FP32"
WORK, STEPS = "Wan 14B 480x832x81", 20
SHOWN = ("RTX 2060 Super", "RTX 3060 Ti")
# What a dot is called, by the way to compute.
CALLED: Mapping[str, str] = {
    STOCK_FP16.name: "stock",
    STOCK_INT8.name: "stock INT8",
    STOCK_INT8_ATTENTION.name: "INT8 + attention",
    STOCK_W4A4_ATTENTION.name: "W4A4 + attention",
    STOCK_CACHED.name: "stock, EasyCache",
    OFFERED["auto", "int8_convrot"].name: "auto INT8",
    OURS_PRECISE.name: "Exact",
    OURS_FAST.name: "Balanced",
    TURBO_INT8.name: "Fastest",
    TURBO_W4A4.name: "Fastest W4A4",
    TURBO_HALF_OF_IT.name: "Fastest, half",
    OFFERED["Draft", "fp16"].name: "Draft",
}
BY_WHO: Mapping[Who, str] = {
    "stock": STOCK_FP16.name,
    "newest": STOCK_INT8.name,
    "newest_attention": STOCK_INT8_ATTENTION.name,
    "newest_w4a4": STOCK_W4A4_ATTENTION.name,
    "stored": OFFERED["auto", "int8_convrot"].name,
    "precise": OURS_PRECISE.name,
    "fast": OURS_FAST.name,
    "turbo": TURBO_INT8.name,
    "sparse": TURBO_HALF_OF_IT.name,
}
LETTER, LINE = 7.0, 13.0  # pixels
MOST_LINES = 8  # between a dot and its name
LEFT, WIDTH, TOP, BOTTOM = 46.0, 352.0, 84.0, 330.0
PANEL = WIDTH + 70


class Dot(NamedTuple):
    """time: in the panel's unit."""

    name: str
    time: float
    decibels: float


class Panel(NamedTuple):
    """lacking: what nearness was not measured of, as it is called."""

    head: str
    unit: str
    dots: Sequence[Dot]
    lacking: Sequence[str] = ()


def rows_of(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of the longest videos that a card's results have."""
    measured = results.get(LONG_SECTION, {}).get("sizes", [])
    return [row for row in measured[-1]["rows"] if "frames dB" in row] if measured else []


def panels(rows: Sequence[Mapping[str, Any]], card: str, predictions: Sequence[Prediction]) -> list[Panel]:
    """rows: of `rows_of`, measured on this card."""
    decibels = {row["name"]: row["frames dB"]["median"] for row in rows if row["frames dB"]["median"] is not None}
    found = []
    for name in SHOWN:
        told = next(one.told for one in predictions if (one.card.name, one.work.name) == (name, WORK))
        dots = [
            Dot(way, told[who].seconds * STEPS / 60, decibels[way])
            for who, way in BY_WHO.items()
            if who in told and way in decibels
        ]
        lacking = [CALLED[way] for who, way in BY_WHO.items() if who in told and way not in decibels]
        found.append(Panel(f"{name}, predicted: {WORK}", f"minutes of {STEPS} steps", dots, lacking))
    taken = [
        Dot(row["name"], row["sampling s"], decibels[row["name"]])
        for row in rows
        if row.get("sampling s") is not None and row["name"] in decibels and row["name"] in CALLED
    ]
    return [Panel(f"{card}, measured: the videos themselves", "seconds a video", taken), *found] if taken else found


def nearness(drawn: Sequence[Panel]) -> str:
    """Up and to the left is better."""
    canvas = Canvas(LEFT + PANEL * len(drawn), BOTTOM + (90 if any(one.lacking for one in drawn) else 44))
    canvas.text((10, 20), TITLE, "t")
    canvas.text((10, 40), "up: frames in dB of the same videos in FP32; left: less time", "s")
    lowest, highest = (f(dot.decibels for one in drawn for dot in one.dots) for f in (min, max))
    for number, one in enumerate(drawn):
        left = LEFT + PANEL * number
        x = Scale.over([dot.time for dot in one.dots], left, left + WIDTH)
        y = Scale(10 * (lowest // 10), highest + 6, BOTTOM, TOP)
        grid(canvas, x, y)
        canvas.text((left, 64), one.head, "t")
        canvas.text((left + WIDTH / 2, BOTTOM + 36), one.unit, "s m")
        told = textwrap.wrap(f"nearness not measured: {', '.join(one.lacking)}", 60) if one.lacking else []
        for line, words in enumerate(told):
            canvas.text((left, BOTTOM + 58 + 14 * line), words, "s")
        taken: list[tuple[float, float, float]] = []
        for dot in sorted(one.dots, key=lambda dot: dot.time):
            kind = "ours" if dot.name.startswith("FuseStream") else "stock"
            at = x(dot.time), y(dot.decibels)
            canvas.dot(at, f"f-{kind}")
            canvas.text(_free(at, CALLED[dot.name], taken, left), CALLED[dot.name], f"s m f-{kind}")
    return canvas.svg(f"{TITLE}: {', '.join(one.head for one in drawn)}")


def _free(dot: Point, words: str, taken: list[tuple[float, float, float]], left: float) -> Point:
    """Where a dot's name lies on no other: above, below, farther up and down. taken: middles and widths, which it joins."""
    width = LETTER * len(words)
    middle = min(max(dot[0], left + width / 2), left + WIDTH + 20 - width / 2)
    places = (dot[1] + away + step * LINE for line in range(MOST_LINES) for away, step in ((-8, -line), (16, line)))

    def is_free(height: float) -> bool:
        return all(abs(height - y) >= LINE or abs(middle - x) >= (width + wide) / 2 for x, y, wide in taken)

    height = next((place for place in places if is_free(place)), dot[1] - 8)
    taken.append((middle, height, width))
    return middle, height
