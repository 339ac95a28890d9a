"""What belongs to a noise level: where it lies among the steps of a sampler, what its step is worth,
and which prompts, ControlNets and hooks take part.

Stock has ranges of noise levels for these. Where one comes or goes, what the model gives leaps, and
nothing from before foretells it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

Conds = Mapping[str, Sequence[Mapping[str, Any]]]


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


def taking_part(conds: Conds, level: float) -> tuple[int, ...]:
    """The state of each of a guider's prompts at this noise level. Equal: the same take part."""
    return tuple(state for prompts in conds.values() for prompt in prompts for state in _states(prompt, level))


def _states(prompt: Mapping[str, Any], level: float) -> Iterator[int]:
    yield _is_within(prompt.get("timestep_start"), prompt.get("timestep_end"), level)
    control = prompt.get("control")
    while control is not None:
        start, end = control.timestep_range or (None, None)
        yield _is_within(start, end, level)
        control = control.previous_controlnet
    hooks = prompt.get("hooks")
    for hook in () if hooks is None else hooks.hooks:
        yield sum(float(frame.start_t) >= level for frame in hook.hook_keyframe.keyframes)


def _is_within(start: Any, end: Any, level: float) -> bool:
    return (start is None or level <= float(start)) and (end is None or level >= float(end))
