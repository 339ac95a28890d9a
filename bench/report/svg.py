"""A canvas of SVG, axes, and labels that keep apart: just what the bench's plots need. The same input gives the same bytes.

Colours are classes, each given twice: an image in a page follows the reader's light or dark scheme.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

STYLE = """
 text { font: 12px system-ui, sans-serif; fill: #57606a } .t { font-size: 13px; font-weight: 600; fill: #24292f }
 .s { font-size: 11px } .e { text-anchor: end } .m { text-anchor: middle } path { fill: none; stroke-width: 2 }
 .grid { stroke: #d8dee4; stroke-width: 1 } .l-ours { stroke: #0969da } .l-stock { stroke: #bc4c00; stroke-dasharray: 6 4 }
 .l-bound { stroke: #6e7781; stroke-width: 1.5; stroke-dasharray: 2 3 } .f-ours { fill: #0969da } .f-stock { fill: #bc4c00 }
 .f-bound { fill: #6e7781 } text.f-ours, text.f-stock { font-weight: 600 }
 @media (prefers-color-scheme: dark) {
  text { fill: #9da7b3 } .t { fill: #e6edf3 } .grid { stroke: #30363d } .l-ours { stroke: #58a6ff } .l-stock { stroke: #f0883e }
  .l-bound { stroke: #8b949e } .f-ours { fill: #58a6ff } .f-stock { fill: #f0883e } .f-bound { fill: #8b949e }
 }
"""
Point = tuple[float, float]
LABEL_GAP = 14.0


@dataclass
class Canvas:
    """Shapes in the order in which they are drawn; pixels, from the upper left."""

    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def line(self, one: Point, other: Point, kind: str = "grid") -> None:
        self.path([one, other], kind)

    def path(self, points: Sequence[Point], kind: str) -> None:
        self.parts.append(f'<path class="{kind}" d="M{" ".join(f"{num(x)} {num(y)}" for x, y in points)}"/>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        size = f'width="{num(width)}" height="{num(height)}"'
        self.parts.append(f'<rect class="{kind}" x="{num(x)}" y="{num(y)}" {size} rx="2"/>')

    def dot(self, at: Point, kind: str, radius: float = 3.5) -> None:
        self.parts.append(f'<circle class="{kind}" cx="{num(at[0])}" cy="{num(at[1])}" r="{num(radius)}"/>')

    def cross(self, at: Point, kind: str, size: float = 5) -> None:
        (x, y), d = at, size
        self.parts.append(f'<path class="{kind}" style="stroke-dasharray: none" d="{num_path(x, y, d)}"/>')

    def text(self, at: Point, words: str, kind: str = "") -> None:
        known = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{known} x="{num(at[0])}" y="{num(at[1])}">{escape(words)}</text>')

    def svg(self, title: str) -> str:
        """The whole file. title: what one who cannot see it is told."""
        box = (
            f'viewBox="0 0 {num(self.width)} {num(self.height)}" width="{num(self.width)}" height="{num(self.height)}"'
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
        return "\n".join([head, *self.parts, "</svg>", ""])


@dataclass(frozen=True)
class Scale:
    """Values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        to: Callable[[float], float] = math.log if self.log else float
        return self.start + (self.end - self.start) * (to(value) - to(self.low)) / (to(self.high) - to(self.low))

    def ticks(self) -> list[float]:
        """Round values within: 1, 2 and 5 of each power of ten, or about six even steps from zero."""
        if self.log:
            found = [m * 10.0**e for e in range(-4, 6) for m in (1, 2, 5)]
        else:
            rough = (self.high - self.low) / 6
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
            found = [round(n * step, 10) for n in range(int(self.high / step) + 1)]
        return [tick for tick in found if self.low <= tick <= self.high]

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool = False) -> Scale:
        """With some air around the values; a plain one begins at zero."""
        if log:
            return cls(min(values) / 1.3, max(values) * 1.3, start, end, log)
        return cls(0.0, max(values) * 1.08, start, end)


def grid(canvas: Canvas, x: Scale, y: Scale, at: Sequence[float] | None = None) -> None:
    """Lines and figures of both axes. at: where the horizontal one has its figures, instead of round ones."""
    for tick in y.ticks():
        canvas.line((x.start, y(tick)), (x.end, y(tick)))
        canvas.text((x.start - 6, y(tick) + 4), f"{tick:g}", "s e")
    for tick in x.ticks() if at is None else at:
        canvas.line((x(tick), y.start), (x(tick), y.start + 4))
        canvas.text((x(tick), y.start + 17), f"{tick:g}", "s m")


def apart(places: Sequence[float], gap: float = LABEL_GAP) -> list[float]:
    """The same places, pushed as far down as keeps them `gap` apart, then back as a whole by half of that."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    found = list(places)
    for before, after in itertools.pairwise(order):
        found[after] = max(found[after], found[before] + gap)
    moved = [a - b for a, b in zip(found, places, strict=True)]
    return [place - max(moved, default=0.0) / 2 for place in found]


def num(value: float) -> str:
    """A tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")


def num_path(x: float, y: float, d: float) -> str:
    """A cross."""
    return f"M{num(x - d)} {num(y - d)}L{num(x + d)} {num(y + d)}M{num(x - d)} {num(y + d)}L{num(x + d)} {num(y - d)}"
