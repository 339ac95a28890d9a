"""What is no VRAM budget is refused by the functions that load, as it is by their nodes before the queue."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fusestream import fusion
from fusestream.fusion.base import vram_budget
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model

NO_BUDGETS = [math.nan, math.inf, -math.inf, -0.5, -2.0, -1e-9, 1024.5, 1e300]


@pytest.mark.parametrize("given", NO_BUDGETS)
def test_the_functions_refuse_it_before_they_look_at_the_file(given: float) -> None:
    for load in (
        lambda: fusion.load_diffusion_model("nowhere.safetensors", vram_budget=given),
        lambda: fusion.load_text_encoder("nowhere.safetensors", [], vram_budget=given),
    ):
        with pytest.raises(ValueError, match=r"^vram_budget is .*: give -1 \(what is free\), 0 "):
            load()


def test_the_function_for_streams_alone_refuses_it(tmp_path: Any) -> None:
    from fusestream import checkpoints

    path = str(checkpoints.write("wan_t2v", tmp_path))
    for given in (math.nan, -0.5):
        with pytest.raises(ValueError, match="vram_budget is"):
            load_streamed_diffusion_model(path, given)


@pytest.mark.parametrize("given", [-1.0, -1, 0, 0.0, 0.05, 7.5, 1024.0])
def test_what_is_one(given: float) -> None:
    assert vram_budget.refusal(given) is None
