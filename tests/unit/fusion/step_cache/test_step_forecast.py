"""Steps foretold from those before, on trajectories whose next point is known; the worth of a step; prompts that come and go."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import comfy.model_sampling
import pytest
import torch

from fusestream.fusion.step_cache.forecast import Forecast
from fusestream.fusion.step_cache.model import _signal
from fusestream.fusion.step_cache.schedule import Schedule, taking_part
from fusestream.fusion.step_cache.settings import Settings

SHAPE = (1, 4, 3, 8, 8)
FLOW = [1.0, 0.9, 0.75, 0.5, 0.2, 0.0]


def randn(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def learned(points: dict[float, torch.Tensor], kind: type[Forecast] = Forecast) -> Forecast:
    forecast = kind()
    for at, point in points.items():
        forecast.add(at, point)
    return forecast


def off(forecast: Forecast, at: float, right: torch.Tensor) -> float:
    return float((forecast.denoised(at) - right).norm() / right.norm())


# ------------------------------------------------------------------------------------------------------------ a forecast


def test_nothing_is_foretold_before_three_were_computed() -> None:
    forecast = Forecast()
    for at in range(3):
        assert forecast.error(at) == math.inf
        forecast.add(at, randn(at))
    assert 0 < forecast.error(3) < math.inf
    forecast.forget()
    assert forecast.error(4) == math.inf


def test_a_straight_trajectory_is_foretold_over_any_way() -> None:
    begin, slope = randn(0), randn(1)
    forecast = learned({at: begin + at * slope for at in (0, 1, 3)})
    for at in (4, 6, 9.5):
        assert off(forecast, at, begin + at * slope) < 1e-5 and forecast.error(at) < 1e-3


def test_no_more_than_the_whole_slope_is_followed() -> None:
    """Of one that doubled in each step; and nothing of one that turned round."""
    slope = randn(0)
    doubled, turned = learned({0: 0 * slope, 1: slope, 2: 3 * slope}), learned({0: 0 * slope, 1: slope, 2: 0 * slope})
    assert torch.allclose(doubled.denoised(3), 5 * slope) and doubled.error(3) > 0.3
    assert torch.equal(turned.denoised(3), 0 * slope)


def test_what_stands_still_is_foretold_as_it_is() -> None:
    point = randn(0)
    forecast = learned(dict.fromkeys((0, 1, 2), point))
    assert torch.equal(forecast.denoised(5), point) and forecast.error(5) == 0


def test_slopes_that_wander_are_taken_in_part_and_their_error_is_known() -> None:
    """A random walk of slopes: nearer than the last point and than the whole slope, and off by about what it says."""

    class Held(Forecast):
        MOST = 0.0

    class Whole(Forecast):
        LEAST = 1.0

    far: dict[str, list[float]] = {"ours": [], "held": [], "whole": [], "said": []}
    for seed in range(20):
        slope, points = randn(1000 * seed), [10 * randn(1000 * seed + 1)]
        for step in range(1, 8):
            points.append(points[-1] + slope)
            slope = 0.8 * slope + 0.6 * randn(1000 * seed + 1 + step)
        forecasts = [learned(dict(enumerate(points[:6])), kind) for kind in (Forecast, Held, Whole)]
        for name, forecast in zip(far, forecasts, strict=False):
            far[name].append(off(forecast, 7, points[7]))
        far["said"].append(forecasts[0].error(7))
    ours, held, whole, said = (sum(found) / len(found) for found in far.values())
    assert ours < held and ours < whole and 0.6 < said / ours < 1.6, far


def test_share_and_error_are_carried_over_to_other_ways() -> None:
    """Measured over a way of two steps behind a span of one; asked for over ways behind that of two."""
    along, beside = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    begin, next_one = 0 * along, along
    last = next_one + 0.5 * 2 * along + 0.1 * 2 * math.sqrt(3) * beside  # half of the slope held
    forecast = learned({0: begin, 1: next_one, 3: last})
    rate = 0.1 / float(last.norm())
    for at in (4, 5, 6):
        assert forecast.error(at) == pytest.approx(rate * (at - 3) * math.sqrt(at - 1), rel=1e-5)
        share = max(0.0, 1 - 0.5 * (at - 1) / 3)
        assert torch.allclose(forecast.denoised(at), last + share * (at - 3) / 2 * (last - next_one))
    assert torch.equal(forecast.denoised(8), last), "nothing of the slope is left"


def test_a_sampler_that_goes_back_takes_its_place_anew() -> None:
    begin, slope = randn(0), randn(1)
    forecast = learned({at: begin + at * slope for at in (0, 1, 2)})
    forecast.add(2, begin + 2 * slope)
    forecast.add(1, begin + slope)
    assert forecast.error(2) == math.inf
    forecast.add(2, begin + 2 * slope)
    assert off(forecast, 3, begin + 3 * slope) < 1e-5


def test_what_is_not_finite_or_nothing_at_all_has_no_small_error() -> None:
    for strange in (torch.full(SHAPE, math.nan), torch.zeros(SHAPE)):
        forecast = learned({0: randn(0), 1: randn(1), 2: strange})
        assert not forecast.error(3) < 1e9


def test_latents_of_another_size_do_not_fit() -> None:
    forecast = learned({0: randn(0)})
    assert forecast.fits(randn(1)) and not forecast.fits(torch.zeros(1, 4, 3, 16, 16))


# -------------------------------------------------------------------------------------------------------------- its steps


def test_places_among_the_steps() -> None:
    schedule = Schedule(FLOW, lambda level: 1 - level)
    assert [schedule.place(level) for level in FLOW] == [0, 1, 2, 3, 4, 5]
    assert schedule.place(0.825) == pytest.approx(1.5) and schedule.place(1.5) == 0 and schedule.place(-1) == 5
    assert schedule.falls and Schedule([1.0, 0.5, 0.5, 0.0], abs).falls
    assert not any(Schedule(levels, abs).falls for levels in ([0.0, 0.5, 1.0], [1.0, 0.2, 0.4, 0.0], [1.0], []))


@pytest.mark.parametrize("kind", [comfy.model_sampling.CONST, comfy.model_sampling.EPS])
def test_the_shares_of_steps_are_those_of_eulers_method(kind: Any) -> None:
    """A unit of picture given in one step is in the latents after it as that step's share says."""
    levels = FLOW if kind is comfy.model_sampling.CONST else [14.0, 7.0, 3.0, 1.0, 0.3, 0.0]
    schedule = Schedule(levels, partial(_signal, kind()))
    for step, (now, after) in enumerate(pairwise(levels)):
        given = 1 - after / now  # of x + (x - denoised) / now * (after - now)
        whole = 1 - after if kind is comfy.model_sampling.CONST else 1.0
        assert schedule.share(levels[step]) == pytest.approx(given / whole)
    assert schedule.share(levels[-2]) == 1 and schedule.share(levels[-1]) == math.inf
    assert schedule.share(2 * levels[0]) == math.inf, "before the first step"
    assert all(Schedule(levels, lambda _, weight=weight: weight).share(levels[1]) == math.inf for weight in (0.0, -0.5))


def test_prompts_controls_and_hooks_come_and_go() -> None:
    control = SimpleNamespace(timestep_range=(0.9, 0.4), previous_controlnet=None)
    frames = [SimpleNamespace(start_t=level) for level in (1.0, 0.6)]
    hooks = SimpleNamespace(hooks=[SimpleNamespace(hook_keyframe=SimpleNamespace(keyframes=frames))])
    conds: Any = {
        "positive": [{"timestep_start": 1.0, "timestep_end": 0.5}, {"timestep_start": 0.5, "timestep_end": 0.0}],
        "negative": [{"control": control, "hooks": hooks}],
    }
    levels = (1.0, 0.95, 0.9, 0.8, 0.55, 0.5, 0.45, 0.3)
    states = [taking_part(conds, level) for level in levels]
    leaps = [level for level, before, after in zip(levels[1:], states, states[1:], strict=False) if before != after]
    assert leaps == [0.9, 0.55, 0.5, 0.45, 0.3]
    assert len({taking_part({"positive": [{}]}, level) for level in levels}) == 1


# ------------------------------------------------------------------------------------------------------------ its settings


@pytest.mark.parametrize("wrong", [{"error": -0.1}, {"error": math.nan}, {"error": 2}, {"first_steps": 1.5}])
def test_settings_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"FuseStream Step Cache: {next(iter(wrong))} is"):
        Settings(**wrong)


def test_two_settings_compute_everything() -> None:
    assert Settings(error=0).is_off and Settings(first_steps=1).is_off and not Settings().is_off
