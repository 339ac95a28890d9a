"""A sampling in which kernels were chosen says so: the same seed may give other last bits in the next one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from scenes import Scene, Studio, sample

from fusestream import checkpoints
from fusestream.fusion.load import diffusion
from fusestream.fusion.report import gathering
from fusestream.fusion.sampling import kernel_choices
from fusestream.kernels_cuda.tune.autotune import tuner

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")
BUDGET = 0.02  # GiB


@pytest.fixture
def counted() -> Iterator[None]:
    """What is counted here is taken back."""
    before = tuner().undecided
    yield
    tuner().undecided = before


@pytest.mark.usefixtures("counted")
def test_calls_before_a_choice_are_those_of_the_last_sampling() -> None:
    model: Any = SimpleNamespace()
    assert kernel_choices.words(model) == kernel_choices.words(None) == ""
    with kernel_choices.counting(model):
        tuner().undecided += 3
    assert "3 calls came before a choice" in kernel_choices.words(model)
    with pytest.raises(KeyError), kernel_choices.counting(model):
        tuner().undecided += 1
        raise KeyError
    assert "1 call came before a choice" in kernel_choices.words(model), "also when it was interrupted"
    with kernel_choices.counting(model):
        pass
    assert kernel_choices.words(model) == ""


@pytest.mark.usefixtures("counted")
def test_the_report_says_that_this_run_chose(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    model = diffusion.load_diffusion_model(str(checkpoints.write("wan_t2v", studio.folder)), vram_budget=BUDGET)
    scene: Scene = studio.scene("wan_t2v")
    head = model.model.diffusion_model.head
    forward = head.forward

    def chooses(*args: Any, **kwargs: Any) -> Any:
        tuner().undecided += 1
        return forward(*args, **kwargs)

    sample(model, scene)
    assert "chose" not in gathering.gather(model).state
    monkeypatch.setattr(head, "forward", chooses)
    sample(model, scene)
    state = gathering.gather(model).state
    assert "Its last run chose kernels" in state and "last bits" in state
    monkeypatch.setattr(head, "forward", forward)
    sample(model, scene)
    assert "chose" not in gathering.gather(model).state
