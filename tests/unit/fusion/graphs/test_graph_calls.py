"""Models as owners of captured calls: what they tell, and what of them is looked at before a replay."""

from __future__ import annotations

from typing import Any

import comfy.ldm.modules.attention
import comfy.model_management
import pytest
import torch
from taped import BUDGET, NBYTES, Model, TapingRecorder, refusals
from torch import Tensor

from fusestream.fusion.graphs.calls import Graphs
from fusestream.gpu.replay import NO_ROOM
from fusestream.kernels_cuda import LEDGER


@pytest.fixture
def model() -> Model:
    LEDGER.clear()
    return Model()


@pytest.fixture
def graphs(model: Model) -> Graphs:
    return Graphs(model, model.net, TapingRecorder(), lambda: 0)


def run(graphs: Graphs, model: Model, times: int, memory: object = None) -> None:
    for _ in range(times):
        x = torch.randn(2, 4)
        assert torch.equal(graphs.call(model.body, (x,), memory=memory), x @ model.weight)


def test_the_report_says_what_there_is(graphs: Graphs, model: Model) -> None:
    assert not graphs.words()
    run(graphs, model, 5)
    run(graphs, model, 1, memory := object())
    run(graphs, model, 1, memory)
    assert graphs.words() == (
        "Short calls run as CUDA graphs: 3 calls were replayed (1 token of text), 2 captured; 1 graph in 0.00 GiB of VRAM now."
    )
    assert model.notes["CUDA graphs"] == "1, 0.00 GiB" and model.as_graph == 3
    assert graphs.nbytes == BUDGET - model.budget > NBYTES
    assert graphs.release() and model.budget == BUDGET


def test_the_report_says_why_there_are_none(graphs: Graphs, model: Model) -> None:
    """What was to be expected is no refusal."""
    model.generation = None
    run(graphs, model, 2)
    graphs.refuse("another node was here")
    assert model.notes["CUDA graphs"] == "none: part of it streams" and not refusals()
    model.generation, model.budget = 0, 0
    run(graphs, model, 4)
    assert model.notes["CUDA graphs"] == f"none: {NO_ROOM}" and refusals() == [NO_ROOM]


def test_a_weight_in_another_place(graphs: Graphs, model: Model) -> None:
    """That nobody told of: it does not stream, and another node has put it there."""
    linear = model.net

    def body(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, linear.weight)

    x = torch.randn(2, 4)
    for change in (
        lambda: setattr(linear, "weight", torch.nn.Parameter(torch.randn(4, 4))),
        lambda: setattr(linear.weight, "data", torch.randn(4, 4)),
        lambda: linear.weight.data.mul_(2),
    ):
        with torch.inference_mode():
            for _ in range(5):
                assert torch.equal(graphs.call(body, (x,)), body(x))
            kept = linear.weight.data  # or the next one may lie there
            change()
            assert torch.equal(graphs.call(body, (x,)), body(x)), kept.shape
    assert graphs.captured == 3, "written to in place it is where it was"


@pytest.mark.parametrize("where", ["attribute", "list", "buffer"])
def test_calls_that_keep_something(graphs: Graphs, model: Model, where: str) -> None:
    """The next call's result may depend on it, and a graph does not change it."""
    net: Any = model.net
    net.kept, net.seen, times = 0, [], []
    net.register_buffer("last", torch.zeros(1))

    def body(x: Tensor) -> Tensor:
        times.append(1)
        if where == "attribute":
            net.kept += 1
        elif where == "list":
            net.seen.append(len(net.seen))
        else:
            net.last = x.new_ones(1)
        return x + net.kept + len(net.seen) + net.last

    results = [graphs.call(body, (torch.zeros(1),)).item() for _ in range(6)]
    assert len(times) == 6 and refusals()[0].startswith("it keeps something")
    assert results == ([1.0] * 6 if where == "buffer" else [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_work_that_adds_to_a_buffer_is_not_replayed_in_vain(graphs: Graphs, model: Model) -> None:
    """Replays write to it, and the host looks before it launches one."""
    model.net.register_buffer("count", torch.zeros(4))

    def call(reason: str | None) -> Tensor:
        before = model.net.count.clone()
        graphs.call(lambda x: x + model.net.count.add_(1), (torch.ones(4),), changed=lambda: reason)
        added: Tensor = model.net.count - before
        return added

    for _ in range(3):
        call(None)
    for reason, launched in ((None, 1), ("another node was here", 1), (None, 2)):
        assert torch.equal(call(reason), torch.ones(4)) and model.as_graph == launched, "once for a call"


def test_attention_is_part_of_a_call(graphs: Graphs, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    run(graphs, model, 4)
    monkeypatch.setattr(comfy.ldm.modules.attention, "optimized_attention", lambda *_: None)
    run(graphs, model, 1)
    monkeypatch.undo()
    assert graphs.replayed == 1
    run(graphs, model, 1)
    assert graphs.replayed == 2


def test_an_interrupt_comes_before_a_replay(graphs: Graphs, model: Model) -> None:
    run(graphs, model, 3)
    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        run(graphs, model, 1)
    run(graphs, model, 1)
    assert graphs.replayed == 1
