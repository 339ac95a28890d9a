"""A MODEL whose steps are cached, and the samplings with it.

    a sampling ─ StepCache ─ hangs `Evaluations`, made for this sampling, around its evaluations
    an evaluation of the model ─ first or last? a step back? other prompts? error too large?
          ├─ yes ─── the network, for all prompts; the forecast learns
          └─ no ──── the forecast: no block runs, so none is brought

The state hangs on the sampling's own copy of the MODEL's options, and goes away with it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key
from torch import Tensor

from ..base.format import counted
from ..base.hooks import STEP_CACHE
from .forecast import Forecast
from .schedule import Conds, Schedule, taking_part
from .settings import Settings

NEARLY = 1e-3  # steps by which a computed noise level may miss the schedule's
POST_CFG = "sampler_post_cfg_function"  # stock's option, and the list behind it

NO_FALL = "the noise levels do not fall step by step"
READS_PROMPTS = "the sampler reads the results of single prompts (CFG++)"

log = logging.getLogger("fusestream.step_cache")


@dataclass
class Tally:
    """What was done in a sampling.

    computed, foretold  evaluations of the model
    error               the largest estimated error of one that was foretold
    obstacle            why all were computed; empty: nothing was in the way
    """

    computed: int = 0
    foretold: int = 0
    error: float = 0.0
    obstacle: str = ""

    def words(self) -> str:
        every = counted(self.computed + self.foretold, "evaluation")
        words = f"{self.computed} of {every} were computed, {self.foretold} foretold"
        if self.foretold:
            words += f" with an estimated error of {self.error:.1%} at most"
        return f"{words}; {self.obstacle}" if self.obstacle else words


def step_cached(model: Any, settings: Settings, forecast: type[Forecast] = Forecast) -> Any:
    """A clone of a stock MODEL with a step cache. These settings replace those it had. forecast: another
    one, which the bench holds against this."""
    clone = model.clone()
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, STEP_CACHE)
    if not settings.is_off:
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, STEP_CACHE, StepCache(settings, forecast))
    return clone


def step_cache_of(model: Any) -> StepCache | None:
    """The step cache of a MODEL; None: it has none."""
    found: list[StepCache] = model.get_wrappers(WrappersMP.OUTER_SAMPLE, STEP_CACHE)
    return found[0] if found else None


class StepCache:
    """Wraps a sampling, as stock's wrappers do. One for each MODEL that comes out of the node.

    last  of the last sampling
    """

    def __init__(self, settings: Settings, forecast: type[Forecast]) -> None:
        self.settings, self._kind = settings, forecast
        self.last: Tally | None = None

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        guider = executor.class_obj
        evaluations = Evaluations(self.settings, self._kind())
        add_wrapper_with_key(
            WrappersMP.PREDICT_NOISE, STEP_CACHE, evaluations, guider.model_options, is_model_options=True
        )
        try:
            return executor(*args, **kwargs)
        finally:
            self.last = evaluations.tally
            log.info("FuseStream Step Cache: %s.", self.last.words())


class Evaluations:
    """Wraps the evaluations of the model in one sampling, as stock's wrappers do."""

    def __init__(self, settings: Settings, forecast: Forecast) -> None:
        self._settings, self._forecast = settings, forecast
        self._schedule: Schedule | None = None
        self._at = -1.0  # the latest step that was asked for
        self._error = 0.0  # of those that were foretold since one was computed
        self._prompts: tuple[int, ...] = ()
        self.tally = Tally()

    def __call__(self, executor: Any, x: Tensor, timestep: Tensor, options: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The denoised latents at x, [batch, ...] as x. timestep: the noise level, [batch]; options:
        the sampler's model_options."""
        guider = executor.class_obj
        if self._schedule is None:
            self._schedule = _schedule(guider, options)
            self.tally.obstacle = _obstacle(self._schedule, guider, options)
        level = float(timestep.flatten()[0])
        if not self.tally.obstacle and self._may_foretell(self._schedule, level, x, guider.conds):
            error = self._error + self._forecast.error(self._at) * self._schedule.share(level)
            if error < self._settings.error:
                self._error = error
                self.tally.foretold += 1
                self.tally.error = max(self.tally.error, error)
                return self._forecast.denoised(self._at)
        found: Tensor = executor(x, timestep, options, *args, **kwargs)
        self.tally.computed += 1
        if not self.tally.obstacle:
            self._error = 0.0
            self._forecast.add(self._at, found)
        return found

    def _may_foretell(self, schedule: Schedule, level: float, x: Tensor, conds: Conds) -> bool:
        """Whether a step begins here, after those before and with the same prompts, which is none of
        the first steps and not the last one."""
        before, self._at = self._at, schedule.place(level)
        prompts = taking_part(conds, level)
        if prompts != self._prompts or not self._forecast.fits(x):
            self._forecast.forget()
            self._prompts = prompts
        first, last = self._settings.first_steps * schedule.steps, schedule.steps - 1
        begins = abs(self._at - round(self._at)) < NEARLY
        return begins and before + NEARLY < self._at and first - NEARLY <= self._at < last - NEARLY


def _schedule(guider: Any, options: Any) -> Schedule:
    levels = options["transformer_options"].get("sample_sigmas")
    signal = partial(_signal, guider.model_patcher.get_model_object("model_sampling"))
    return Schedule([] if levels is None else levels.tolist(), signal)


def _obstacle(schedule: Schedule, guider: Any, options: Any) -> str:
    """Why no evaluation of this sampling is foretold, in words for a user; empty: some may be."""
    if not schedule.falls:
        return NO_FALL
    return READS_PROMPTS if options.get(POST_CFG) != guider.model_options.get(POST_CFG) else ""


def _signal(model_sampling: Any, level: float) -> float:
    """How much of the picture is in the latents of a model of this kind at a noise level."""
    sigma, nothing, picture = torch.tensor([level]), torch.zeros(1, 1), torch.ones(1, 1)
    return float(model_sampling.noise_scaling(sigma, nothing, picture))
