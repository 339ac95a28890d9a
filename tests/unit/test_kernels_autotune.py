"""How often `auto` measures a candidate: short ones for some milliseconds, long ones a few times, disturbed ones more often."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusestream.kernels_cuda import autotune
from fusestream.kernels_cuda.call import Call

OP: Any = SimpleNamespace(name="some op", mutates=(), sample=lambda call: call.tensors)
CALL = Call("some op", (torch.zeros(2),), ())


def measured(monkeypatch: pytest.MonkeyPatch, **times: Iterator[float]) -> tuple[dict[str, float], dict[str, int]]:
    """What is found where the clock says so of each candidate, one after another; and how often each was looked at."""
    looks = dict.fromkeys(times, 0)

    def clock(run: Any, _launches: int) -> float:
        looks[run()] += 1
        return next(times[run()])

    monkeypatch.setattr(autotune, "_time", clock)
    candidates: Any = [
        SimpleNamespace(name=name, ours=True, prepare=lambda _, name=name: lambda _: name) for name in times
    ]
    return autotune._in_turns(OP, CALL, candidates), looks


def steady(first: float, *others: float) -> Iterator[float]:
    """The first use, then these; the last of them for ever."""
    yield first
    yield from others
    while True:
        yield others[-1]


def test_long_ones_are_measured_three_times_after_their_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    found, looks = measured(monkeypatch, long=steady(0.5, 0.02), longer=steady(0.1, 0.0301, 0.0300))
    assert found == {"long": 0.02, "longer": 0.03}
    assert looks == {"long": 4, "longer": 4}


def test_short_ones_are_measured_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    found, looks = measured(monkeypatch, short=steady(0.5, 1e-5), beside=steady(0.5, 2e-4))
    assert found == {"short": 1e-5, "beside": 2e-4}
    assert set(looks.values()) == {2 + autotune.ROUNDS}


def test_a_disturbed_one_is_measured_until_two_times_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    found, looks = measured(
        monkeypatch,
        disturbed=steady(0.5, 0.09, 0.05, 0.06, 0.02, 0.07, 0.0201),
        never=(0.01 * (20 - i) for i in range(20)),
        steady=steady(0.5, 0.03),
    )
    assert found["disturbed"] == 0.02 and looks["disturbed"] == 7
    assert looks["never"] == 2 + autotune.ROUNDS
    assert found["steady"] == 0.03 and looks["steady"] == 4


def test_what_cannot_run_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[float]:
        raise torch.OutOfMemoryError
        yield

    found, _ = measured(monkeypatch, broken=broken(), works=steady(0.5, 0.02))
    assert found == {"broken": math.inf, "works": 0.02}
