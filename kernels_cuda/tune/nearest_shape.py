"""Winners at other sizes: the fastest candidate there is tried first here.

A shape class is words and numbers. Two with the same words are the same op, types and policy at
other sizes. The nearest is the one whose numbers differ by the least factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from .winners import Winner

# A number by itself, or between the x of a size. Digits of float16, int8 or Q4_K belong to a word.
_NUMBER = re.compile(r"(?<![A-Za-wyz_\d])\d+(?![A-Za-wyz_\d])")


def _words(shape: str) -> str:
    return _NUMBER.sub("#", shape)


def _sizes(shape: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(shape)]


def _distance(one: str, other: str) -> float:
    """Sum over all sizes of the doublings between the two shapes."""
    return sum(abs(math.log2((1 + a) / (1 + b))) for a, b in zip(_sizes(one), _sizes(other), strict=True))


def nearest(op: str, shape: str, card: str, entries: Iterable[tuple[str, Winner]]) -> Winner | None:
    """The winner at the nearest size on this card, if there is any. entries: with keys as `key`
    makes them."""
    found = [(their_shape, winner) for k, winner in entries if (their_shape := _shape_in(k, op, card)) is not None]
    alike = [(_distance(shape, theirs), theirs, winner) for theirs, winner in found if _words(theirs) == _words(shape)]
    return min(alike, key=lambda one: one[:2])[2] if alike else None


def key(op: str, shape: str, card: str) -> str:
    """The key that a winner is kept under."""
    return f"{op}|{shape}|{card}"


def _shape_in(of: str, op: str, card: str) -> str | None:
    begins, ends = f"{op}|", f"|{card}"
    fits = of.startswith(begins) and of.endswith(ends) and len(of) >= len(begins) + len(ends)
    return of[len(begins) : -len(ends)] if fits else None
