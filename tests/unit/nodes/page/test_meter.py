"""The live meter's server side: what is told, how often, what it costs, and that it cannot spoil a run."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusestream import checkpoints
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.sampling.step_timer import Reading
from fusestream.fusion.stream import segments
from fusestream.nodes.page import meter

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loaded on the CPU: two of its four blocks fit, which are not taken apart."""
    model = load_streamed_diffusion_model(str(checkpoints.write("wan_t2v", tmp_path_factory.mktemp("models"))), 0.008)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "WORTH_IT", 1.0)
        model.load(model.load_device, 1e32)
    found = model.stream
    found.kept_alive_by_the_test = model
    return found


def one_pass(stream: Any) -> None:
    for i in range(len(stream.blocks)):
        with stream.bound(i):
            pass


def test_what_is_told_and_how_often(stream: Any) -> None:
    told: list[dict[str, Any]] = []
    times = iter(x * 0.1 for x in range(100))
    stream.watcher = meter.Meter(stream, "7", CPU, told.append, lambda: next(times))
    for _ in range(3):
        one_pass(stream)
    stream.watcher = None
    assert len(told) == 4, "12 blocks, 0.1 s each: every third"
    for reading in told:
        assert (
            reading["node"] == "7"
            and reading["blocks"] == 4
            and reading["resident"] == sorted(stream.residency.pager.plan.resident)
        )
        assert 0 < reading["held"] <= reading["limit"] and 0 <= reading["waiting"] <= 1 and reading["rate"] >= 0
    assert [reading["block"] for reading in told] == [2, 1, 0, 3] and sum(r["rate"] for r in told) > 0


@pytest.mark.parametrize(("device", "memory"), [("cpu", "RAM"), ("cuda", "VRAM"), ("cuda:1", "VRAM")])
def test_it_names_the_memory_that_the_blocks_are_in(
    stream: Any, monkeypatch: pytest.MonkeyPatch, device: str, memory: str
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(meter, "send", told.append)
    monkeypatch.setattr(meter, "EVERY", 0.0)
    patcher = SimpleNamespace(model=SimpleNamespace(fusestream=stream), load_device=torch.device(device))
    meter.watch(patcher, SimpleNamespace(unique_id="1"))
    one_pass(stream)
    stream.watcher = None
    assert {reading["memory"] for reading in told} == {memory}


def test_a_broken_one_is_off_and_the_run_goes_on(stream: Any) -> None:
    calls = []

    def broken(reading: dict[str, Any]) -> None:
        calls.append(reading)
        raise OSError("no socket")

    times = iter(range(100))
    stream.watcher = meter.Meter(stream, "7", CPU, broken, lambda: next(times))
    one_pass(stream)
    stream.watcher = None
    assert len(calls) == 1


def test_it_costs_next_to_nothing(stream: Any) -> None:
    """Per block that has run: far below half a percent of the shortest, a millisecond."""
    one = meter.Meter(stream, "7", CPU, lambda _: None)
    start = time.perf_counter()
    for _ in range(10_000):
        one(0)
    assert (time.perf_counter() - start) / 10_000 < 5e-6


def test_a_message_costs_next_to_nothing(stream: Any) -> None:
    """Half a percent of the time between two is what all of the meter may take; on an H200 with a 14B it took 0.09 %."""
    texts: list[str] = []
    times = iter(range(1000))
    one = meter.Meter(stream, "7", CPU, lambda reading: texts.append(json.dumps(reading)), lambda: next(times))
    seconds = []
    for _ in range(100):
        start = time.perf_counter()
        one(0)
        seconds.append(time.perf_counter() - start)
    assert len(texts) == 100 and statistics.median(seconds) < 0.005 * meter.EVERY


def test_only_streams_of_a_node_are_watched(stream: Any, tmp_path: Path) -> None:
    patcher = stream.kept_alive_by_the_test
    meter.watch(patcher, None)
    meter.watch(SimpleNamespace(model=object()), SimpleNamespace(unique_id="1"))
    assert stream.watcher is None
    meter.watch(patcher, SimpleNamespace(unique_id="1"))
    assert isinstance(stream.watcher, meter.Meter)
    stream.watcher(0)  # without a server nobody is told
    stream.watcher = None


def test_what_is_left_is_told_beside_the_words_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    sent: list[Any] = []
    monkeypatch.setattr(meter, "write_on", lambda node, words: said.append((node, words)))
    monkeypatch.setattr(meter, "tell", lambda event, told: sent.append((event, told)))
    times = iter(range(100))
    one = meter.ProgressText("7", meter.send_text, lambda: next(times))
    for step, seconds, is_over in ((0, None, False), (1, 2.0, False), (4, 2.0, False), (4, 2.0, True)):
        one(Reading(step, 4, seconds, 0.0, is_over))
    assert [told for event, told in sent if event == meter.LEFT] == [
        {"node": "7", "seconds": left} for left in (None, 6.0, 0.0, None)
    ]
    assert said[1] == ("7", "step 2 of 4, 2 s a step, 6 s left") and len(said) == len(sent) == 4
    monkeypatch.setattr(meter.user_files, "value", lambda name, default: False)
    one(Reading(1, 4, 2.0, 0.0))
    assert len(said) == len(sent) == 4, "switched off"
