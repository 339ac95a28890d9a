"""What our wrappers read of a model's call, and in which order they are around it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import comfy.patcher_extension
import pytest
import torch
from comfy.model_base import BaseModel

from fusestream import checkpoints
from fusestream.fusion.base.hooks import CALLS_WRAPPER, PROGRESS, STEP, STREAM
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.stream.model_call import PLACES, ModelCall

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


def test_the_places_are_stocks() -> None:
    of_stock = tuple(inspect.signature(BaseModel.apply_model).parameters)
    assert of_stock[: len(PLACES) + 1] == ("self", *PLACES)


@pytest.mark.parametrize("by_place", range(len(PLACES) + 1))
def test_arguments_are_found_by_place_and_by_name(by_place: int) -> None:
    """In the real chain: whoever calls us next may hand on some by place and the others by name."""
    given = dict(zip(PLACES, (torch.ones(1, 16, 2, 4, 4), 1, 2, 3, 4, {"sigmas": 5}), strict=True))
    model: Any = type("Model", (), {STREAM: object()})()

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        call = ModelCall(executor, args, kwargs)
        assert call.x is given["x"] and call.options is given["transformer_options"]
        assert call.model is model and call.stream is getattr(model, STREAM)
        return call.run(), call.run()

    def apply_model(**arguments: Any) -> Any:
        return arguments

    original: Any = lambda *args, **kwargs: apply_model(**dict(zip(PLACES, args, strict=False)), **kwargs)  # noqa: E731
    chain = comfy.patcher_extension.WrapperExecutor.new_class_executor(original, model, [wrapper])
    values = list(given.values())
    named = {name: given[name] for name in PLACES[by_place:]}
    first, second = chain.execute(*values[:by_place], **named)
    assert first.keys() == second.keys() == given.keys() and all(first[name] is given[name] for name in PLACES)


@pytest.mark.parametrize("options", [{}, {"transformer_options": None}])
def test_a_call_without_options_has_none(options: Any) -> None:
    call = ModelCall(None, (torch.ones(1), 1), options)
    call.set_option("a", 1)
    assert call.options == {}


def test_an_option_is_set_for_this_call() -> None:
    options = {"b": 2}
    call = ModelCall(None, (torch.ones(1), 1), {"transformer_options": options})
    call.set_option("a", 1)
    assert call.options is options and options == {"a": 1, "b": 2}


def test_the_retry_is_around_the_others(tmp_path: Path) -> None:
    model = load_streamed_diffusion_model(str(checkpoints.write("wan_t2v", tmp_path)))
    wrappers = model.wrappers[comfy.patcher_extension.WrappersMP.APPLY_MODEL]
    assert list(wrappers) == [STEP, CALLS_WRAPPER, PROGRESS]
