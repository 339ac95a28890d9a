"""The speed of a sampling: told while it runs, kept when it is over.

A sampler's own callback says when a step's network has run, so a step is timed for any sampler and
any number of calls of the model. The first step brings the weights and may choose kernels, so it
counts only if there is no other. With a step cache some steps take no time: the mean counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import comfy.patcher_extension

from ..base.hooks import PACE, PACE_WRAPPER
from ..step_cache.model import step_cache_of
from .checks import is_one_prompt

MOST = 64  # samplings that are kept


@dataclass(frozen=True)
class Reading:
    """The state after some steps. seconds: of a step; None: none is over. spent: since the
    start."""

    step: int
    steps: int
    seconds: float | None
    spent: float
    is_over: bool = False

    @property
    def left(self) -> float | None:
        return None if self.seconds is None else (self.steps - self.step) * self.seconds


@dataclass(frozen=True)
class Sampled:
    """A sampling that is over, or was stopped.

    card, file, policy   the card, the model's file and its kernels, in words
    shape                of the latent; prompts: how many each step computes
    seconds              of a step; first: of the first one, which brings the weights
    held                 bytes of the blocks on the device
    """

    card: str
    file: str
    policy: str
    shape: tuple[int, ...]
    prompts: int
    steps: int
    seconds: float
    first: float
    spent: float
    held: int


@dataclass
class Pace:
    """The timings of one model, shared by its clones. listener: called at each step; must be quick,
    and not raise."""

    listener: Callable[[Reading], None] | None = None
    last: Sampled | None = None


_kept: deque[Sampled] = deque(maxlen=MOST)


def kept() -> list[Sampled]:
    """The samplings of this process, and those that were read in; the newest last."""
    return list(_kept)


def keep(sampled: Sampled) -> None:
    _kept.append(sampled)


def pace_of(model: Any) -> Pace | None:
    """The timings of a MODEL, if it has any."""
    found: Pace | None = getattr(getattr(model, "model", None), PACE, None)
    return found


def attach(patcher: Any, describe: Callable[[Any], tuple[str, str, str, int]]) -> None:
    """Time the samplings with this streaming patcher's model, and with its clones. describe: gives
    card, file, policy and the bytes that the blocks hold now, for the MODEL that samples."""
    setattr(patcher.model, PACE, Pace())
    patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, PACE_WRAPPER, _Timed(describe))


class _Timed:
    """Wraps a sampling, as stock's wrappers do."""

    def __init__(self, describe: Callable[[Any], tuple[str, str, str, int]]) -> None:
        self._describe = describe

    def __call__(
        self,
        executor: Any,
        noise: Any,
        latents: Any,
        sampler: Any,
        sigmas: Any,
        denoise_mask: Any = None,
        callback: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        guider = executor.class_obj
        patcher = guider.model_patcher
        prompts = 1 if is_one_prompt(guider) else 2
        usual = median if step_cache_of(patcher) is None else mean
        told = _Steps(pace_of(patcher) or Pace(), len(sigmas) - 1, usual=usual)

        def both(step: int, *values: Any) -> None:
            told.step(step + 1)
            if callback is not None:
                callback(step, *values)

        try:
            return executor(noise, latents, sampler, sigmas, denoise_mask, both, *args, **kwargs)
        finally:
            if told.seconds is not None:
                card, file, policy, held = self._describe(patcher)
                told.end(card, file, policy, tuple(latents.shape), prompts, held)


class _Steps:
    """The steps of one sampling. usual: the seconds of one, by those of all."""

    def __init__(
        self,
        pace: Pace,
        steps: int,
        clock: Callable[[], float] = time.monotonic,
        usual: Callable[[Sequence[float]], float] = median,
    ) -> None:
        self._pace, self._steps, self._clock, self._usual = pace, steps, clock, usual
        self._times = [clock()]
        self._tell(is_over=False)

    @property
    def _done(self) -> int:
        return len(self._times) - 1

    @property
    def seconds(self) -> float | None:
        took = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        return self._usual(took[1:] or took) if took else None

    def step(self, done: int) -> None:
        """Note that so many steps are over. Samplers that evaluate a step twice say so twice."""
        if done > self._done:
            self._times.append(self._clock())
            self._tell(is_over=False)

    def end(self, card: str, file: str, policy: str, shape: tuple[int, ...], prompts: int, held: int) -> None:
        seconds, spent = self.seconds, self._times[-1] - self._times[0]
        assert seconds is not None, "no step is over"
        first = self._times[1] - self._times[0]
        self._pace.last = Sampled(card, file, policy, shape, prompts, self._done, seconds, first, spent, held)
        if self._done > 1:
            keep(self._pace.last)
        self._tell(is_over=True)

    def _tell(self, *, is_over: bool) -> None:
        listener = self._pace.listener
        if listener is not None:
            begin, now = self._times[0], self._times[-1]
            listener(Reading(self._done, self._steps, self.seconds, now - begin, is_over))
