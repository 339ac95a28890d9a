"""The denoised latents of a sampling, foretold from the last two that were computed.

    denoised(at)  =  last  +  share * ahead * slope

The slope is the change from the last but one to the last, in steps. Taken whole it overshoots, and
not taken at all it lags: how much of it still holds is the share. Its value is measured each time an
evaluation is computed, as the part of the true change that lay along the slope (the scaling factor of
ScalingCache, which is calibrated there once for a model). What was left beside it is the error.

Both are measured over one distance and asked for over another. The slope wanders like a random
walk: what two slopes have in common falls with the distance of their middles, and the error grows
with the way ahead and with the root of that distance. On trained weights this describes spans and
ways of one to three steps (docs/how-it-works.md).

The denoised latents, not the network's output: along a straight trajectory they stand still, while
the output minus the input moves with the noise. And a sampler that adds noise leaves them alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Computed(NamedTuple):
    """An evaluation that was computed. at: its step; denoised: [batch, ...], the model's x0."""

    at: float
    denoised: Tensor


class Forecast:
    """One sampling's. Waits for the device once for each evaluation that is computed.

    LEAST, MOST  bounds of the share: 0 holds the last result, 1 follows the line through both
    """

    LEAST, MOST = 0.0, 1.0

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: what comes has nothing to do with what was."""
        self._computed: list[Computed] = []
        # The share of the slope that held, over how long a way between the middles of two slopes, in
        # steps; and the error over one step.
        self._share, self._apart, self._rate = 0.0, 1.0, math.inf

    def fits(self, x: Tensor) -> bool:
        """Whether what was computed is of this shape. Some samplers enlarge the latents midway."""
        return all(one.denoised.shape == x.shape for one in self._computed)

    def error(self, at: float) -> float:
        """The estimated error of `denoised`, relative to it. Infinite: not known yet."""
        if len(self._computed) < 2:
            return math.inf
        return self._rate * self._growth(at)

    def denoised(self, at: float) -> Tensor:
        """The denoised latents at a step after those that were computed."""
        first, last = self._computed
        share = 1 - (1 - self._share) * self._distance(at) / self._apart
        return torch.lerp(first.denoised, last.denoised, 1 + self._bounded(share) * self._ahead(at))

    def add(self, at: float, denoised: Tensor) -> None:
        """Learn from an evaluation that was computed, and copy it, because a sampler may write into
        it. What was computed at this step or later, as by a sampler that goes back, gives way."""
        self._computed = [one for one in self._computed if one.at < at]
        if len(self._computed) == 2:
            self._learn(at, denoised)
        self._computed = [*self._computed[-1:], Computed(at, denoised.clone())]

    def _learn(self, at: float, denoised: Tensor) -> None:
        first, last = self._computed
        line, moved = self._ahead(at) * (last.denoised - first.denoised), denoised - last.denoised
        found = torch.stack([(line * moved).sum(), line.square().sum(), moved.square().sum(), denoised.square().sum()])
        along, line_square, moved_square, square = found.tolist()
        self._share = self._bounded(along / line_square if line_square else 0.0)
        left = moved_square - 2 * self._share * along + self._share**2 * line_square
        self._apart = self._distance(at)
        self._rate = math.sqrt(max(left, 0.0) / square) / self._growth(at) if square else math.inf

    def _ahead(self, at: float) -> float:
        """The way from the last one to this step, in spans between the two that were computed."""
        first, last = self._computed
        return (at - last.at) / (last.at - first.at)

    def _distance(self, at: float) -> float:
        """Twice the way between the middles of the two slopes, in steps."""
        return at - self._computed[0].at

    def _growth(self, at: float) -> float:
        return (at - self._computed[1].at) * math.sqrt(self._distance(at))

    def _bounded(self, share: float) -> float:
        return min(self.MOST, max(self.LEAST, share))
