"""The Comfy Compiler's recording of memory is paused while weights arrive, and nothing is captured within it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy
import family_scenes
import in_halves
import pytest
import torch
from scenes import sample
from taped import Model, TapingRecorder

from fusestream import checkpoints
from fusestream.fusion.base import malloc_graphs
from fusestream.fusion.graphs.calls import Graphs
from fusestream.fusion.stream.block_stream import BlockStream

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


class Recording:
    """What newer ComfyUIs have: a graph for each thread, and a pause, which must not be within another one."""

    def __init__(self) -> None:
        self.is_paused, self.pauses = False, 0
        self._comfy_active = True

    def pause_malloc_graph(self) -> Any:
        return self

    def __enter__(self) -> None:
        assert not self.is_paused, "a pause within a pause would end the outer one"
        self.is_paused, self.pauses = True, self.pauses + 1

    def __exit__(self, *_: Any) -> None:
        assert self.is_paused
        self.is_paused = False


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """This thread is within a graph from now on."""
    found = Recording()
    prefetch = SimpleNamespace(MALLOC_GRAPHS={threading.get_ident(): found})
    monkeypatch.setattr(malloc_graphs, "_prefetch", prefetch)
    monkeypatch.setattr(malloc_graphs, "_pause", found.pause_malloc_graph)
    return found


def test_weights_arrive_in_a_pause_and_blocks_compute_outside_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recording: Recording
) -> None:
    path = checkpoints.write("z_image", tmp_path, "fp16")
    seen: dict[str, set[bool]] = {"weights": set(), "blocks": set()}
    enter, linear = BlockStream.enter, torch.nn.functional.linear

    def entering(self: BlockStream, i: int) -> Any:
        seen["weights"].add(recording.is_paused)
        return enter(self, i)

    def computing(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen["blocks"].add(recording.is_paused)
        return linear(*args, **kwargs)

    with checkpoints.narrow.opened(comfy):
        model, scene = in_halves.load(path, in_halves.OFF), family_scenes.inputs("z_image")
        wanted = sample(in_halves.load(path, in_halves.OFF), scene)
        monkeypatch.setattr(BlockStream, "enter", entering)
        monkeypatch.setattr(torch.nn.functional, "linear", computing)
        assert torch.equal(sample(model, scene), wanted)
    assert seen == {"weights": {True}, "blocks": {False}} and recording.pauses > 0 and not recording.is_paused


def test_an_interrupt_ends_the_pause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recording: Recording) -> None:
    path = checkpoints.write("z_image", tmp_path, "fp16")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with checkpoints.narrow.opened(comfy):
        model, scene = in_halves.load(path), family_scenes.inputs("z_image")
        monkeypatch.setattr(BlockStream, "enter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sample(model, scene)
    assert not recording.is_paused and malloc_graphs.is_recording()


def test_another_thread_is_not_recorded(recording: Recording) -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(malloc_graphs.is_recording()))
    thread.start()
    thread.join()
    assert found == [False] and malloc_graphs.is_recording()
    recording._comfy_active = False
    assert not malloc_graphs.is_recording()
    with malloc_graphs.paused():
        assert not recording.is_paused, "there is nothing to pause"


def test_nothing_is_captured_within_a_recording(recording: Recording) -> None:
    """Its addresses would be given to somebody else; behind it, calls are captured as ever."""
    model = Model()
    graphs = Graphs(model, model.net, TapingRecorder(), lambda: 0)

    def calls(number: int) -> int:
        for _ in range(number):
            x = torch.randn(2, 4)
            assert torch.equal(graphs.call(model.body, (x,)), x @ model.weight)
        return graphs.captured

    assert calls(5) == 0
    recording._comfy_active = False
    assert calls(5) == 1
