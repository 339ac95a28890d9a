"""Where a noise level lies among the steps of a sampler, and what a step is worth."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise


class Schedule:
    """A sampler's noise levels, from the first step's to the one behind the last step.

    signal: how much of the picture is in the latents at a level; 1 where there is no noise
    """

    def __init__(self, levels: Sequence[float], signal: Callable[[float], float]) -> None:
        self._levels, self._signal = levels, signal
        self._rising = [-level for level in levels]
        self.steps = len(levels) - 1

    @property
    def falls(self) -> bool:
        """Whether noise is taken away step by step."""
        return self.steps > 0 and all(one <= other for one, other in pairwise(self._rising))

    def place(self, level: float) -> float:
        """The number of the step that begins at this level, from 0 on. Between two steps, where
        some samplers evaluate the model once more, it is between their numbers."""
        behind = bisect_right(self._rising, -level)
        if behind == 0:
            return 0.0
        if behind > self.steps:
            return float(self.steps)
        before, after = self._levels[behind - 1], self._levels[behind]
        return behind - 1 + (before - level) / (before - after)

    def share(self, level: float) -> float:
        """How much of the picture that is in the latents after this step comes of what the model
        gives in it: x' = r x + (1 - r) denoised, where r is the ratio of the levels after and
        before. All of it in the first step from pure noise and in the last one, a few hundredths
        halfway."""
        behind = bisect_right(self._rising, -level)
        if not 0 < behind <= self.steps:
            return math.inf
        after = self._levels[behind]
        signal = self._signal(after)
        return (1 - after / level) / signal if signal > 0 else math.inf
