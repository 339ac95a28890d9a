"""Prompts' embeddings are moved once, before the first step."""

from __future__ import annotations

from typing import Any

import comfy.conds
import pytest
import torch

from fusestream import checkpoints
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.patcher import conditions

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")
THERE = torch.device("meta")  # the only other device there is without a card


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_streamed_diffusion_model(str(checkpoints.write("wan_t2v", tmp_path_factory.mktemp("wan")))).model


def made(model: Any, tokens: int = 20, **more: Any) -> dict[str, Any]:
    words = torch.randn(1, tokens, checkpoints.T5_WIDTH)
    out: dict[str, Any] = model.extra_conds(cross_attn=words, noise=torch.zeros(1, 16, 2, 8, 8), **more)
    assert out["c_crossattn"].size() == list(words.shape)
    return out


def test_embeddings_are_made_where_the_model_samples(model: Any) -> None:
    condition = made(model, device=THERE)["c_crossattn"]
    assert condition.cond.device == THERE and type(condition) is comfy.conds.CONDRegular
    assert condition.process_cond(batch_size=2).cond.device == THERE
    assert made(model, device=torch.device("cpu"))["c_crossattn"].cond.device.type == "cpu"
    assert made(model)["c_crossattn"].cond.device.type == "cpu", "nobody said where"


def test_what_is_large_or_no_tensor_stays(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "MOST_BYTES", 100)
    assert made(model, device=THERE)["c_crossattn"].cond.device.type == "cpu"
    for other in (comfy.conds.CONDConstant([1.0]), comfy.conds.CONDList([torch.zeros(1)])):
        assert conditions._moved(other, THERE) is other


def test_the_nodes_own_condition_is_not_touched() -> None:
    own = comfy.conds.CONDRegular(torch.zeros(1, 2, 3))
    assert conditions._moved(own, THERE) is not own and own.cond.device.type == "cpu"
