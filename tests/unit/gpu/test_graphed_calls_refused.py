"""Calls that are not captured, and why: there is too little of something, or no graph could stand for them."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from taped import BUDGET, NBYTES, Scene
from torch import Tensor, nn

from fusestream.gpu.graphed_calls import NotCaptured, calls
from fusestream.gpu.graphs import NotRecorded
from fusestream.gpu.replay import NO_ROOM, STRAYS


@pytest.fixture
def scene() -> Scene:
    return Scene()


# -------------------------------------------------------------------------------------------------------------- limits


Does = Callable[[Scene, pytest.MonkeyPatch], object]


def limit(nbytes: int) -> Does:
    return lambda _, patch: patch.setattr(calls, "MOST_BYTES", nbytes)


def recorder(error: BaseException) -> Does:
    return lambda scene, _: setattr(scene.recorder, "fails", error)


def tape(name: str, value: Any) -> Does:
    return lambda scene, _: setattr(scene.tapes[0], name, value)


def nothing(*_: Any) -> None: ...


NONE_LEFT, MUCH = torch.OutOfMemoryError("none left"), "what was captured takes 0.00 GiB of VRAM"
# What there is too little of: what happens before the first call and behind the third, and the reason.
TOO_LITTLE: dict[str, tuple[Does, Does, str]] = {
    "of the budget": (lambda s, _: setattr(s, "budget", NBYTES // 2), nothing, NO_ROOM),
    "for a graph": (limit(NBYTES), nothing, MUCH),
    "to be given": (limit(16), nothing, "it is given 0.00 GiB"),
    # Under cudaMallocAsync a graph's memory is taken as it is launched, and what a first launch takes counts.
    "for a launch": (nothing, tape("fails", NONE_LEFT), NO_ROOM),
    "of the budget, for a first launch": (nothing, tape("nbytes", BUDGET + 1), NO_ROOM),
    "for a graph that was launched": (limit(2 * NBYTES), tape("nbytes", 3 * NBYTES), MUCH),
    "to record": (recorder(NONE_LEFT), nothing, NO_ROOM),
    "that CUDA records": (recorder(NotRecorded("CUDA refuses")), nothing, "CUDA refuses"),
}


@pytest.mark.parametrize("what", TOO_LITTLE)
def test_where_there_is_too_little(scene: Scene, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    before, after, reason = TOO_LITTLE[what]
    with monkeypatch.context() as patch:
        before(scene, patch)
        scene.run(3)
        after(scene, patch)
        scene.run(4)
    scene.budget = BUDGET if what == "of the budget" else scene.budget
    assert scene.has_nothing() and scene.refusals == [reason], "it runs as ever"
    replayed = scene.calls.replayed
    scene.move()
    assert (scene.run(2).calls.replayed > replayed) is (reason == NO_ROOM), "with other memory it is tried again"


def test_a_call_that_finds_no_memory_while_it_is_watched_runs_once_more(scene: Scene) -> None:
    """Without what watching it takes."""
    seen: list[int] = []

    def body(x: Tensor) -> Tensor:
        seen.append(1)
        if len(seen) == 3:
            raise torch.OutOfMemoryError("none left")
        return x + 1

    for i in range(5):
        assert torch.equal(scene.calls.call(body, (torch.zeros(2),)), torch.ones(2))
        assert len(seen) == i + 1 + (i >= 2)
    assert scene.has_nothing() and scene.refusals == [NO_ROOM]


def test_what_takes_much_together_goes_for_the_latest(scene: Scene) -> None:
    scene.calls._together = NBYTES * 5 // 2
    for rows in range(1, 4):
        scene.run(3, rows, 4)
        assert scene.calls.count == len(scene.tapes) == min(rows, 2)
    assert scene.run(1, 2, 4).run(1, 3, 4).calls.replayed == 2 and not scene.refusals


def test_moved_away_before_it_is_recorded(scene: Scene) -> None:
    scene.stands = False
    scene.run(4)
    assert not scene.recorder.recorded and not scene.refusals
    scene.stands = True
    assert scene.run(2).counts == (1, 1)


# ------------------------------------------------------------------------------------------------- what is not captured


class Own(dict[str, Any]):
    """Somebody's, with more than items."""


class Row(list[Any]):
    """Likewise."""


def writes(x: Tensor, cache: dict[str, Any]) -> Tensor:
    """As causal Wan, to its keys and values."""
    cache["k"].add_(x.sum(0))
    return cache["k"].sum(0)  # type: ignore[no-any-return]


def counts(x: Tensor, cache: dict[str, Any]) -> Tensor:
    cache["end"] += 1
    return x * cache["end"]


def asks(x: Tensor) -> Tensor:
    """For a wait, even where that comes to nothing."""
    with contextlib.suppress(Exception):  # no card is here
        torch._C._cuda_synchronize()
    return x + 1


def strays(x: Tensor) -> Tensor:
    """Here numpy writes to a tensor; on a card a kernel that somebody launches on another stream."""
    y = torch.zeros_like(x)
    y.numpy()[:] = x.numpy() + 1
    return y * 2


UNFIT = (object(), len, nn.Linear(1, 1), Own(a=1), Row([1]), {"in": [Own()]}, SimpleNamespace(a=1))
REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (writes, ({"k": torch.zeros(4), "end": 0},), "it changes what it is given"),
    (counts, ({"k": torch.zeros(4), "end": 0},), "it changes what it is given"),
    (lambda x: x * x.sum().item(), (), "it waits for the card (_local_scalar_dense)"),
    (lambda x: x[x > 0], (), "it waits for the card ("),
    (lambda x: x.nonzero(), (), "it waits for the card (nonzero)"),
    (lambda x: x + torch.equal(x, x), (), "it waits for the card (equal)"),
    (asks, (), "it waits for the card (synchronize)"),
    (strays, (), STRAYS),
    *((lambda x, _: x + 1, (value,), f"it is given a {type(value).__name__}") for value in UNFIT[:5]),
    *((lambda x, _: x + 1, (value,), "it is given a ") for value in UNFIT[5:]),
]


@pytest.mark.parametrize(("body", "others", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_calls_that_no_graph_could_stand_for(
    scene: Scene, body: Callable[..., Any], others: tuple[Any, ...], reason: str
) -> None:
    profile = sys.getprofile()
    with torch.inference_mode():
        for _ in range(5):
            x = torch.randn(3, 4)
            given, want = (x, *copy.deepcopy(others)), (x, *copy.deepcopy(others))
            assert torch.equal(scene.calls.call(body, given), body(*want))
            assert body not in (writes, counts) or str(given) == str(want), "once, to the caller's own"
    assert scene.has_nothing() and scene.calls.replayed == 0 and sys.getprofile() is profile
    assert scene.refusals and all(said.startswith(reason) for said in scene.refusals), scene.refusals
    assert len(scene.refusals) == 1 or reason.startswith("it is given a")


def test_random_numbers_may_differ_at_the_first_replay(scene: Scene) -> None:
    for _ in range(6):
        scene.calls.call(lambda x: x + torch.rand_like(x), (torch.zeros(8),))
    assert scene.counts == (1, 3)


def test_owners_that_keep_something(scene: Scene) -> None:
    """The next call's result may depend on it, and a graph does not change it."""
    scene.keeps = "it keeps something"
    scene.run(6)
    assert scene.ran == 6 and scene.refusals == ["it keeps something"]


def test_owners_of_which_nothing_is_captured_for_now(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch() -> Any:
        raise NotCaptured("it has hooks", is_for_now=True)

    with monkeypatch.context() as patch:
        patch.setattr(scene, "watch", watch)
        scene.run(5)
    assert scene.run(1).ran == 6 and scene.refusals == ["it has hooks"]
    scene.move()
    assert scene.run(2).counts == (1, 1)
