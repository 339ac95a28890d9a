"""What the lab asks, predicts and finds: one case is one technique at one shape, beside what is shipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..measure import device_seconds, sets_for
from .device import Lab

Inputs = Sequence[Sequence[Any]]
CLOSE = 4e-3  # of fp16 results: rounding once is 2e-4
MOST_WORDS = 300  # characters of what a way failed with


@dataclass(frozen=True)
class Predicted:
    """Written before the run. ratio: the quickest shipped way's time over the technique's; above 1 the technique wins."""

    ratio: float
    why: str


@dataclass
class Found:
    """Seconds of each way, in one run on one card.

    shipped  names of the ways that are shipped, or are torch's; the others are the technique's
    bounds   names of those that do not compute the result: they read and multiply what one that did would have to at least
    parts    names of those that are a part of others
    errors   ||result - exact|| / ||exact||, by way
    """

    shipped: tuple[str, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    bounds: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def time(
        self, name: str, run: Callable[..., Any], inputs: Inputs, by: Callable[..., float] = device_seconds
    ) -> None:
        """Time a way. One that fails says why, and the others go on."""
        self.attempt(name, lambda: self.seconds.__setitem__(name, by(run, inputs)))

    def check(
        self, name: str, run: Callable[..., Tensor], inputs: Sequence[Any], exact: Tensor, most: float = CLOSE
    ) -> bool:
        """Note a way's error on these inputs. One that is farther off than `most` has failed."""

        def look() -> None:
            self.errors[name] = error(run(*inputs), exact)
            if self.errors[name] > most:
                raise ValueError(f"off by {self.errors[name]:.2g}")

        return self.attempt(name, look)

    def attempt(self, name: str, step: Callable[[], None]) -> bool:
        """Do one step of a way, unless one failed before; whether it was done."""
        if name in self.failed:
            return False
        try:
            step()
        except Exception as failure:  # a library's, of whatever kind: the others go on
            self.failed[name] = f"{type(failure).__name__}: {failure}"[:MOST_WORDS]
            self.seconds.pop(name, None)
            return False
        return True

    def quickest(self, side: str) -> str | None:
        """The name of the quickest way that is `shipped`, of the `technique`, or a `bound`."""
        able = [name for name in self.seconds if self.side(name) == side]
        return min(able, key=lambda name: self.seconds[name], default=None)

    def side(self, name: str) -> str:
        if name in self.shipped:
            return "shipped"
        if name in self.bounds:
            return "bound"
        return "part" if name in self.parts else "technique"

    def ratio(self, side: str = "technique") -> float | None:
        """The quickest shipped way's time over the quickest of the technique, or of its bounds."""
        ours, theirs = self.quickest("shipped"), self.quickest(side)
        return None if ours is None or theirs is None else self.seconds[ours] / self.seconds[theirs]

    def as_json(self) -> dict[str, Any]:
        return {
            "us": {name: s * 1e6 for name, s in self.seconds.items()},
            "sides": {name: self.side(name) for name in self.seconds},
            "errors": self.errors,
            "failed": self.failed,
            **{
                f"shipped / {side}": ratio for side in ("technique", "bound") if (ratio := self.ratio(side)) is not None
            },
        }


@dataclass(frozen=True)
class Case:
    """technique: the file's that has it. units: of the lab's device code that it asks for."""

    technique: str
    label: str
    predicted: Predicted
    measure: Callable[[Lab], Found]
    units: tuple[str, ...] = ()


def error(result: Tensor, exact: Tensor) -> float:
    """||result - exact|| / ||exact||; a result that is not finite has none, and fails."""
    found = float((result.double() - exact).norm() / exact.norm())
    if not math.isfinite(found):
        raise ValueError("the result is not finite")
    return found


def several(make: Callable[[], Sequence[Any]], size: int) -> list[Sequence[Any]]:
    """As many sets of inputs, of `size` bytes each, as leave none of them in the L2."""
    torch.manual_seed(0)
    return [make() for _ in range(sets_for(size))]
