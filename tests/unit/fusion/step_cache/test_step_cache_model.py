"""A real Wan of stock's classes with a step cache: streamed or loaded by stock, with guidance, and beside other nodes.

Its weights are random, so its results leap from step to step: the error that is allowed is the largest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.utils
import pytest
import tiny_wan
import torch
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_context_windows import WanContextWindowsManualNode
from comfy_extras.nodes_custom_sampler import Guider_DualModel
from comfy_extras.nodes_easycache import LazyCacheNode
from scenes import distance
from tiny_wan import prompts

from fusestream import checkpoints
from fusestream.fusion import report
from fusestream.fusion.base.hooks import STEP_CACHE
from fusestream.fusion.report.data import Foretold
from fusestream.fusion.sampling import measured
from fusestream.fusion.sampling.step_timer import pace_of
from fusestream.fusion.step_cache.model import Tally, step_cache_of
from fusestream.fusion.step_cache.settings import Settings
from fusestream.nodes.kernels import ModelKernels
from fusestream.nodes.sparse import SparseAttentionNode
from fusestream.nodes.step_cache import StepCacheNode

pytestmark = [pytest.mark.usefixtures("as_comfyui_runs"), pytest.mark.usefixtures("one_thread")]

LATENT = (1, 16, 1, 8, 8)
STEPS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def stocks(folder: Path) -> Any:
    return tiny_wan.by_stock(folder)


@pytest.fixture(scope="module")
def streamed(folder: Path) -> Any:
    return tiny_wan.streamed(folder)


def cached(model: Any, error: float = 1.0, first_steps: float = 0.2) -> Any:
    return StepCacheNode.execute(model, error, first_steps).result[0]


def tally(model: Any) -> Tally:
    found = step_cache_of(model)
    assert found is not None and found.last is not None
    return found.last


def sample(
    model: Any, guidance: float = 3.0, sampler: str = "euler", given: Any = None, latent: Any = LATENT, **how: Any
) -> torch.Tensor:
    return tiny_wan.sample(model, latent, STEPS, guidance, sampler, given, **how)


def calls_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch of each run of the network from here on."""
    found: list[int] = []
    forward = type(model.model.diffusion_model).forward

    def counted(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(x.shape[0])
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(type(model.model.diffusion_model), "forward", counted)
    return found


@pytest.fixture(scope="module")
def whole(stocks: Any) -> torch.Tensor:
    """All steps computed, with guidance."""
    return sample(stocks)


# -------------------------------------------------------------------------------------------------------------- the node


def test_the_node_takes_what_settings_are() -> None:
    inputs = {item.id: item for item in StepCacheNode.GET_SCHEMA().inputs}
    assert {name: item.default for name, item in inputs.items() if name != "model"} == vars(Settings())
    for edge in ("min", "max"):
        Settings(**{name: getattr(item, edge) for name, item in inputs.items() if hasattr(item, edge)})


def test_off_is_the_model_without_it(stocks: Any, whole: torch.Tensor) -> None:
    for off in (cached(stocks, error=0.0), cached(cached(stocks), error=0.0), cached(stocks, first_steps=1.0)):
        assert step_cache_of(off) is None and off.wrappers.get(WrappersMP.OUTER_SAMPLE, {}).keys() == set()
    assert torch.equal(sample(off), whole)
    nothing_left_out = cached(stocks, error=1e-9)
    assert torch.equal(sample(nothing_left_out), whole) and tally(nothing_left_out) == Tally(computed=STEPS)


def test_wrong_settings_end_the_run(stocks: Any) -> None:
    with pytest.raises(ValueError, match="FuseStream Step Cache: error is 2"):
        cached(stocks, error=2.0)


# ----------------------------------------------------------------------------------------------------------- the latents


def test_steps_are_left_out_for_all_prompts_and_the_callback_still_hears(
    stocks: Any, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, heard = cached(stocks), []
    calls = calls_of(stocks, monkeypatch)
    found = sample(model, callback=lambda step, denoised, *_: heard.append((step, denoised.shape)))
    done = tally(model)
    assert sum(calls) == 2 * done.computed and done.computed + done.foretold == STEPS and done.foretold >= 2
    assert heard == [(step, LATENT) for step in range(STEPS)]
    assert 0 < distance(found, whole) < 0.5 and 0 < done.error < 1
    assert torch.equal(sample(model), found) and torch.equal(sample(stocks), whole)


def test_the_first_steps_and_the_last_are_computed(stocks: Any) -> None:
    model = cached(stocks, first_steps=0.9)
    sample(model, 1.0)
    assert tally(model) == Tally(computed=STEPS)


def test_two_models_in_turn_begin_anew(stocks: Any, folder: Path) -> None:
    """As Wan 2.2: the second sampler goes on where the first one stopped. The same MODEL forgets between two samplings."""
    high, low = cached(stocks), cached(stocks)
    half = sample(high, 1.0, last_step=5)
    first, again = tally(high), sample(high, 1.0, last_step=5)
    assert torch.equal(half, again) and tally(high) == first
    sample(low, 1.0, start_step=5)
    assert [tally(model).computed + tally(model).foretold for model in (high, low)] == [5, 5]
    assert tally(low).computed >= 4, "the last one, and three to learn from"


def test_prompts_that_come_later_are_computed(stocks: Any) -> None:
    """Just after they came nothing is known: three evaluations are computed."""
    (words, _), others = prompts()[0][0], prompts()[1]
    ranges = [
        [words, {"start_percent": 0.0, "end_percent": 0.5}],
        [words * -1, {"start_percent": 0.5, "end_percent": 1.0}],
    ]
    plain, split = cached(stocks), cached(stocks)
    sample(plain)
    sample(split, given=(ranges, others))
    assert tally(split).computed > tally(plain).computed


def test_an_error_and_an_interrupt_leave_nothing_behind(stocks: Any, whole: torch.Tensor) -> None:
    model = cached(stocks)
    right = sample(model)

    def stop(step: int, *_: Any) -> None:
        if step == 6:
            raise comfy.model_management.InterruptProcessingException

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(model, callback=stop)
    assert tally(model).computed + tally(model).foretold == 7
    assert model.get_wrappers(WrappersMP.PREDICT_NOISE, STEP_CACHE) == []
    options = model.model_options["transformer_options"]
    assert not options.get("wrappers", {}).get(WrappersMP.PREDICT_NOISE)
    assert torch.equal(sample(model), right) and torch.equal(sample(stocks), whole)


# ---------------------------------------------------------------------------------------------------------- the samplers


@pytest.mark.every_other
@pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpmpp_2m", "uni_pc", "euler_ancestral", "res_multistep"])
def test_samplers(stocks: Any, sampler: str) -> None:
    """What lies between two steps, or is asked for once more at the same noise level, is computed."""
    model = cached(stocks)
    found, right = (sample(one, 1.0, sampler) for one in (model, stocks))
    done = tally(model)
    assert found.isfinite().all() and distance(found, right) < 1.5
    twice = sampler in ("heun", "dpm_2")
    assert done.computed + done.foretold == (2 * STEPS - 1 if twice else STEPS)
    assert 0 < done.foretold <= STEPS - 3


def test_samplers_that_read_the_prompts_apart_and_noise_that_rises_are_left_alone(stocks: Any) -> None:
    model = cached(stocks)
    assert torch.equal(sample(model, sampler="euler_cfg_pp"), sample(stocks, sampler="euler_cfg_pp"))
    assert tally(model) == Tally(STEPS, 0, 0.0, "the sampler reads the results of single prompts (CFG++)")
    rising = torch.linspace(0.1, 0.9, 6)
    assert torch.equal(sample(model, 1.0, sigmas=rising), sample(stocks, 1.0, sigmas=rising))
    assert tally(model) == Tally(5, 0, 0.0, "the noise levels do not fall step by step")


def test_inpainting(stocks: Any) -> None:
    """What the mask leaves out stays as it was given, in steps that are left out, too."""
    model, mask = cached(stocks), torch.zeros(1, 1, 8, 8)
    mask[..., :4] = 1
    found, right = (sample(one, 1.0, noise_mask=mask) for one in (model, stocks))
    assert tally(model).foretold > 0 and torch.allclose(found[..., 4:], right[..., 4:], atol=1e-5)
    assert not torch.allclose(found[..., :4], right[..., :4], atol=1e-2)


@pytest.mark.every_other
@pytest.mark.parametrize("how", ["regions", "windows"])
def test_regions_and_context_windows(stocks: Any, how: str) -> None:
    """Each is computed piece by piece in a step, and foretold as a whole."""
    (words, _), others = prompts()[0][0], prompts()[1]
    regions = [[words, {"area": (1, 8, 4, 0, 0, 0)}], [words * -1, {"mask": torch.ones(1, 8, 8), "mask_strength": 0.5}]]
    plain, given, latent = stocks, ([[words, {}]], others), LATENT
    if how == "regions":
        given = (regions, others)
    else:
        plain = WanContextWindowsManualNode.execute(
            stocks, 13, 4, "standard_static", 1, False, "pyramid", False
        ).result[0]
        latent = (1, 16, 7, 8, 8)
    model = cached(plain)
    found, right = (sample(one, given=given, latent=latent) for one in (model, plain))
    assert tally(model).foretold > 0 and 0 < distance(found, right) < 0.5


# ------------------------------------------------------------------------------------------------------ beside other nodes


def test_a_step_that_is_left_out_brings_nothing(streamed: Any) -> None:
    """By the pager's ledger, and whatever else is on the model: sparse attention, kernels."""
    model = ModelKernels.execute(cached(SparseAttentionNode.execute(streamed).result[0]), "auto").result[0]

    def brought(one: Any) -> int:
        def so_far() -> int:
            return sum(streamed.stream.residency.ledger.summary()["bytes by route"].values())

        before = so_far()
        sample(one, 1.0)
        return so_far() - before

    brought(streamed)  # what stays comes once
    every, some = brought(streamed), brought(model)
    done = tally(model)
    assert done.foretold > 0 and some / every == pytest.approx(done.computed / STEPS, abs=0.5 / STEPS)


def test_a_lora_before_or_behind(stocks: Any, folder: Path) -> None:
    file = comfy.utils.load_torch_file(str(checkpoints.write("lora_kohya", folder)))

    def with_lora(model: Any) -> Any:
        return comfy.sd.load_lora_for_models(model, None, file, 0.8, 0.0)[0]

    behind, before = with_lora(cached(stocks)), cached(with_lora(stocks))
    found = sample(behind, 1.0)
    assert torch.equal(found, sample(before, 1.0)) and tally(before) == tally(behind)
    assert tally(before).foretold > 0 and distance(found, sample(cached(stocks), 1.0)) > 1e-3


@pytest.mark.every_other
def test_beside_lazycache_and_a_negative_model_of_its_own(stocks: Any) -> None:
    """A step that is left out is none for a cache further in, and for both models of a guider."""
    lazy = LazyCacheNode.execute(cached(stocks), 0.2, 0.0, 1.0, False).result[0]
    assert sample(lazy, 1.0).isfinite().all() and tally(lazy).foretold > 0
    guider = Guider_DualModel(cached(stocks), stocks)
    positive, negative = prompts()
    guider.set_conds(positive, negative)
    guider.set_cfg(3.0)
    sigmas = comfy.samplers.calculate_sigmas(stocks.get_model_object("model_sampling"), "simple", STEPS)
    noise = comfy.sample.prepare_noise(torch.zeros(LATENT), 1)
    euler = comfy.samplers.sampler_object("euler")
    found = guider.sample(noise, torch.zeros(LATENT), euler, sigmas, disable_pbar=True, seed=1)
    assert distance(found, sample(cached(stocks))) < 1e-4


def test_a_second_node_takes_the_place_of_the_first(stocks: Any) -> None:
    model = cached(cached(stocks, error=0.5), error=1.0)
    assert len(model.wrappers[WrappersMP.OUTER_SAMPLE][STEP_CACHE]) == 1
    found = step_cache_of(model)
    assert found is not None and found.settings.error == 1.0


# ----------------------------------------------------------------------------------------------------------- the report


def test_the_report_and_the_times_tell(streamed: Any) -> None:
    model = cached(streamed)
    assert report.gather(model).foretold == Foretold("steps foretold up to an error of 100.0%")
    sample(model, 1.0)
    found, done = report.gather(model), tally(model)
    assert found.foretold is not None and not found.gaps
    text = report.as_text(found)
    assert (
        f"Step cache\n  steps foretold up to an error of 100.0%\n  the last sampling: {done.computed} of 10 evaluations were "
        f"computed, {done.foretold} foretold with an estimated error of "
    ) in text
    assert json.loads(report.as_json(found))["foretold"]["done"] == done.words()
    assert report.gather(streamed).foretold is None and "Step cache" not in report.as_text(report.gather(streamed))
    pace = pace_of(model)
    assert pace is not None and pace.last is not None and pace.last.policy == measured.kernels_key(model)
    assert pace.last.policy == f"{measured.kernels_key(streamed)}; steps foretold up to an error of 100.0%"
    rest = pace.last.spent - pace.last.first
    assert pace.last.seconds == pytest.approx(rest / (STEPS - 1)), "the mean, because some steps take no time"
