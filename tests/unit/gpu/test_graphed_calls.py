"""When calls are captured, when they are replayed, and what ends that: over a recorder that tapes torch's operations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from taped import BUDGET, NBYTES, Interrupted, Scene
from torch import Tensor, nn

from fusestream.gpu import capture
from fusestream.gpu.graphed_calls import call_state, calls
from fusestream.gpu.replay import NO_ROOM


@pytest.fixture
def scene() -> Scene:
    return Scene()


# ------------------------------------------------------------------------------------------------------- captured, replayed


def test_two_calls_run_the_third_is_captured_the_others_are_replayed(scene: Scene) -> None:
    scene.run(3)
    assert scene.counts == (1, 0) and scene.ran == 4, "watched, and recorded"
    assert scene.words == "1, 0.00 GiB" and scene.calls.nbytes > NBYTES and scene.budget + scene.calls.nbytes == BUDGET
    kept = [(x, scene.calls.call(scene.body, (x,))) for x in (torch.randn(2, 4) for _ in range(5))]
    assert scene.counts == (1, 5) and scene.ran == 4 and scene.launched == 5
    for x, out in kept:
        assert torch.equal(out, x @ scene.weight), "what comes out is the callers'"


def test_only_what_may_be_captured_is_in_a_hurry_to_choose(scene: Scene) -> None:
    """A call that has no graph yet; and one of an owner that settles before long, but not of one that never does."""

    def hurries(times: int) -> list[bool]:
        seen: list[bool] = []
        for _ in range(times):
            scene.calls.call(lambda x: (seen.append(scene.hurries), x + 1)[1], (torch.randn(2),))
        return seen

    scene.generation = None
    assert hurries(2) == [False, False]
    scene.comes = True
    assert hurries(1) == [True]
    scene.generation, scene.comes = 0, False
    assert hurries(2) == [True, True] and scene.calls.captured == 0
    assert hurries(3) == [False, False] and scene.calls.captured == 1, "watched and recorded, of chosen kernels"
    assert not scene.hurries


def test_the_call_in_which_an_owner_settles_is_the_first(scene: Scene) -> None:
    def settles(x: Tensor) -> Tensor:
        scene.generation = 1
        return x + 1

    scene.generation = None
    for _ in range(3):
        scene.calls.call(settles, (torch.randn(2),))
    assert scene.calls.captured == 1


@pytest.mark.parametrize("other", ["shape", "strides", "type", "value", "key", "inference mode", "autocast"])
def test_another_call_is_captured_anew(scene: Scene, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.run(3)
    scene.weight = scene.weight.double() if other == "type" else scene.weight
    given: tuple[Any, ...] = {
        "shape": (torch.randn(3, 4),),
        "strides": (torch.randn(4, 2).t(),),
        "type": (torch.randn(2, 4, dtype=torch.float64),),
        "value": (torch.randn(2, 4), 2.0),
    }.get(other, (torch.randn(2, 4),))
    if other == "autocast":
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    with torch.inference_mode(other == "inference mode"):
        for i in range(4):
            scene.same(*given, key=other == "key")
            assert scene.calls.captured == (1 if i < 2 else 2)
    assert scene.calls.replayed == 1


@pytest.mark.parametrize("switch", call_state.SWITCHES)
def test_how_torch_multiplies_is_part_of_a_call(scene: Scene, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    scene.run(4)
    before = getattr(torch.backends.cuda.matmul, switch, False)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(**{switch: not before}))
    scene.run(1)
    monkeypatch.undo()
    assert scene.calls.replayed == 1
    scene.run(1)
    assert scene.calls.replayed == 2


@pytest.mark.parametrize("switch", call_state.OF_CUDNN)
def test_how_torch_convolves_is_part_of_a_call(scene: Scene, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    scene.run(4)
    monkeypatch.setattr(torch.backends.cudnn, switch, not getattr(torch.backends.cudnn, switch))
    scene.run(1)
    assert scene.calls.replayed == 1


def test_gaps_and_overlaps_of_inputs_are_kept(scene: Scene) -> None:
    for make in (lambda: torch.randn(2, 9)[:, 1:5], lambda: torch.randn(1, 4).expand(3, 4)):
        before = scene.calls.replayed
        for _ in range(4):
            scene.same(make())
        assert scene.calls.replayed == before + 1


def test_what_comes_out_of_a_captured_call_lies_apart_from_its_inputs(scene: Scene) -> None:
    xs = [torch.randn(2, 4) for _ in range(6)]
    kept = [scene.calls.call(lambda x: x, (x.clone(),)) for x in xs]
    assert scene.calls.replayed == 3 and all(torch.equal(out, x) for out, x in zip(kept, xs, strict=True))


def test_while_kernels_are_chosen_nothing_is_captured(scene: Scene) -> None:
    """Such a call counts as the first."""

    def chooses(x: Tensor) -> Tensor:
        scene.undecided += 1
        return x + 1

    for _ in range(6):
        scene.calls.call(chooses, (torch.randn(2),))
    assert scene.calls.attempts == 0
    for _ in range(2):
        scene.calls.call(lambda x: x + 1, (torch.randn(2),))
    assert scene.calls.captured == 1, "timed, and captured"


def test_what_waits_for_the_card_is_never_captured(scene: Scene) -> None:
    scene.recorder.bound = "card"
    scene.run(6)
    assert scene.calls.captured == 0 and scene.ran == 6
    assert "the card takes" in scene.words and not scene.refusals, "which is as it should be"


def test_threads_get_their_own_results(scene: Scene) -> None:
    xs, found = [torch.randn(2, 4) for _ in range(40)], dict[int, Tensor]()

    def work(numbers: range) -> None:
        for i in numbers:
            found[i] = scene.calls.call(scene.body, (xs[i],))

    threads = [threading.Thread(target=work, args=(range(k, 40, 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], x @ scene.weight) for i, x in enumerate(xs))
    assert len(scene.tapes) == scene.calls.count == 1 and scene.calls.replayed > 0


def test_a_call_within_a_recording_is_recorded(scene: Scene) -> None:
    def outer(x: Tensor) -> Tensor:
        return scene.calls.call(lambda x: x + 1, (x,), "inner") * 2  # type: ignore[no-any-return]

    for _ in range(6):
        assert torch.equal(scene.calls.call(outer, (torch.ones(2),)), torch.full((2,), 4.0))
    assert scene.calls.captured >= 1 and scene.calls.replayed >= 1


# ------------------------------------------------------------------------------------------------- memory besides arguments


class Room:
    """Rows that calls write to, one after the other."""

    def __init__(self) -> None:
        self.rows, self.at = torch.zeros(32, 4), torch.zeros(1, dtype=torch.long)
        self.ran = 0

    def body(self, x: Tensor) -> Tensor:
        self.ran += 1
        self.rows.index_copy_(0, self.at, x)
        return self.rows.sum(0)

    def written(self, scene: Scene, times: int) -> None:
        """So many calls, each of which sees all rows before."""
        for _ in range(times):
            x, before = torch.randn(1, 4), self.rows.sum(0)
            torch.testing.assert_close(scene.calls.call(self.body, (x,), memory=self), before + x[0])
            self.at.add_(1)


def test_memory_is_written_as_ever(scene: Scene) -> None:
    room = Room()
    room.written(scene, 8)
    assert scene.counts == (1, 5) and scene.calls.tokens == 5 and room.ran == 4
    assert room.rows[:8].abs().sum(1).all() and not room.rows[8:].any()
    scene.calls.let_go(room)
    assert scene.has_nothing()
    room.written(scene, 2)
    assert scene.counts == (2, 6), "it is still known to pay"


def test_other_memory_is_captured_anew_at_once(scene: Scene) -> None:
    for i in range(1, 40):
        room = Room()
        room.written(scene, 5)
        assert scene.calls.captured == i and len(scene.tapes) == 1
        if i % 2:
            scene.calls.let_go(room)
            assert scene.has_nothing()
    scene.calls.let_go(Room())
    assert scene.has_nothing(), "the last one is gone, and another was never there"


def test_letting_go_leaves_other_calls(scene: Scene) -> None:
    room = Room()
    scene.run(3)
    room.written(scene, 4)
    scene.calls.let_go(room)
    assert len(scene.tapes) == 1
    scene.run(1)
    assert scene.calls.replayed == 2 and scene.calls.tokens == 1


def test_memory_in_turns(scene: Scene) -> None:
    """Two texts at once are not captured from token to token."""
    rooms = Room(), Room()
    for _ in range(30):
        for room in rooms:
            room.written(scene, 1)
    assert scene.recorder.recorded < 6


def test_no_budget_for_one_may_be_some_for_another(scene: Scene) -> None:
    scene.budget, first, second = 0, Room(), Room()
    first.written(scene, 5)
    scene.budget = BUDGET
    first.written(scene, 2)
    assert scene.refusals == [NO_ROOM] and scene.counts == (1, 0)
    second.written(scene, 2)
    assert scene.counts == (2, 1)


def test_kernels_that_other_memory_is_chosen_for(scene: Scene) -> None:
    """It has another size: until they are chosen, nothing is watched."""
    first, second = Room(), Room()
    first.written(scene, 4)
    attempts = scene.calls.attempts

    def chooses(x: Tensor) -> Tensor:
        scene.undecided += second.ran < 5
        return second.body(x)

    for _ in range(9):
        scene.calls.call(chooses, (torch.randn(1, 4),), memory=second)
        second.at.add_(1)
    assert scene.calls.attempts == attempts + 2 and scene.counts == (2, 3)


# ---------------------------------------------------------------------------------------------------- moves, and patience


def test_what_moved_is_captured_anew_at_once(scene: Scene) -> None:
    scene.run(4).move()
    scene.run(1)
    assert scene.counts == (2, 1) and len(scene.tapes) == 1, "it is known to pay"
    assert scene.run(2).counts == (2, 3)
    scene.calls.moved()
    assert scene.has_nothing(), "at once, and not with the next call"
    assert scene.run(2).counts == (3, 4)


def test_an_owner_that_is_not_settled_runs_as_ever(scene: Scene) -> None:
    scene.run(4).generation = None
    scene.run(4)
    assert scene.has_nothing() and scene.words == "none: part of it streams" and not scene.refusals


def test_where_nothing_can_be_recorded(scene: Scene) -> None:
    scene.run(4).recorder.nothing = "they are switched off"
    scene.run(2)
    assert scene.has_nothing() and scene.calls.replayed == 1
    scene.calls.refuse("another node was here")
    assert not scene.refusals, "where there can be none anyway"


def test_released_graphs_come_back(scene: Scene) -> None:
    held = scene.run(4).calls.nbytes
    assert scene.calls.release() == held and scene.has_nothing() and scene.calls.release() == 0
    assert scene.run(2).counts == (2, 2)


def test_many_captures_leave_nothing(scene: Scene) -> None:
    scene.run(3)
    for _ in range(60):
        scene.run(1).move()
        scene.run(1)
    assert scene.calls.captured == scene.recorder.recorded == 61 and len(scene.tapes) == 1
    assert scene.calls.release() and scene.has_nothing()


def test_what_moves_from_call_to_call_is_not_captured_each_time(scene: Scene) -> None:
    """Two prompts with LoRAs of their own, in turns: to capture takes longer than a call."""
    scene.run(3)
    for _ in range(99):
        scene.move()
        scene.run(1)
    assert scene.counts == (2, 0)
    assert scene.run(4).counts == (3, 2), "once it stays"
    scene.move()
    assert scene.run(1).calls.captured == 4


def test_what_moves_within_each_call_is_not_watched_each_time(scene: Scene) -> None:
    for _ in range(40):
        scene.calls.call(lambda x: (setattr(scene, "generation", object()), x + 1)[1], (torch.ones(2),))
    assert scene.calls.attempts == 2 and scene.calls.captured == 0
    for _ in range(4):
        scene.calls.call(lambda x: x + 1, (torch.ones(2),))
    assert scene.calls.captured == 1, "once it stays"


def test_more_sizes_in_turns_than_there_may_be_graphs(scene: Scene) -> None:
    for _ in range(60):
        for rows in range(1, calls.MOST_GRAPHS + 2):
            scene.run(1, rows, 4)
    assert scene.calls.captured < 60, "of 300 calls"


def test_the_oldest_graph_goes(scene: Scene) -> None:
    most = calls.MOST_GRAPHS
    for rows in range(1, most + 2):
        scene.run(3, rows, 4)
    assert scene.calls.count == len(scene.tapes) == most
    assert scene.run(1, 2, 4).counts == (most + 1, 1)
    assert scene.run(1, 1, 4).counts == (most + 2, 1), "the first was given up"


def test_calls_of_ever_new_sizes_are_forgotten(scene: Scene) -> None:
    scene.run(3, 1, 4)
    for rows in range(2, calls.MOST_CALLS + 2):
        scene.run(1, rows, 4)
    assert scene.has_nothing()
    assert scene.run(2, 1, 4).calls.captured == 1 and scene.run(1, 1, 4).calls.captured == 2, "it begins anew"


# -------------------------------------------------------------------------------------------------------- interrupts


def test_an_interrupt_comes_before_a_replay(scene: Scene) -> None:
    scene.run(3).interrupted = True
    with pytest.raises(Interrupted):
        scene.run(1)
    assert scene.launched == 0 and len(scene.tapes) == 1
    scene.interrupted = False
    assert scene.run(1).calls.replayed == 1


def test_what_fails_within_a_replay_leaves_nothing_half(scene: Scene) -> None:
    scene.run(4).tapes[0].fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        scene.run(1)
    assert scene.has_nothing()
    assert scene.run(2).counts == (2, 2)


def test_an_interrupted_capture_is_tried_again(scene: Scene) -> None:
    scene.run(2).recorder.fails = Interrupted()
    with pytest.raises(Interrupted):
        scene.run(1)
    assert scene.has_nothing()
    assert scene.run(2).counts == (1, 1)


# ----------------------------------------------------------------------------------------------- looked at behind a launch


class Changed:
    """Another node's doing, which is asked for."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.asked = 0

    def __call__(self) -> str | None:
        self.asked += 1
        return self.reason


def test_what_was_changed_is_computed_as_ever(scene: Scene) -> None:
    """A replay is launched in vain once, and nothing is counted for it; then the host looks before, until all is as it was."""
    changed, counted, x = Changed(), list[int](), torch.ones(2, 4)

    def body(x: Tensor) -> Tensor:
        capture.each_time(lambda: counted.append(1))
        return scene.body(x)

    def call() -> Tensor:
        before = changed.asked, len(counted)
        out: Tensor = scene.calls.call(body, (x,), changed=changed)
        assert (changed.asked, len(counted)) == (before[0] + 1, before[1] + 1), "once at each call"
        return out

    want = [call() for _ in range(4)].pop()
    assert scene.launched == scene.calls.replayed == 1
    changed.reason, scene.weight = "another node was here", -scene.weight
    for _ in range(3):
        ran = scene.ran
        assert torch.equal(call(), -want) and scene.ran == ran + 1 and scene.launched == 2
    assert set(scene.refusals) == {"another node was here"} and scene.calls.replayed == 1
    changed.reason, scene.weight = None, -scene.weight
    for replayed in (2, 3):
        assert torch.equal(call(), want) and scene.counts == (1, replayed)
    scene.generation = object()
    call()
    assert scene.launched == 4, "what moved is launched for nobody"


def test_what_was_changed_from_the_beginning_is_not_captured(scene: Scene) -> None:
    changed = Changed()
    changed.reason = "another node was here"
    for _ in range(6):
        scene.calls.call(scene.body, (torch.ones(2, 4),), changed=changed)
    assert scene.calls.attempts == 0 and scene.ran == 6


@pytest.mark.parametrize("leaves", ["random numbers", "dropout", "a sum", "nothing", "attention"])
def test_work_that_leaves_traces_is_not_done_in_vain(scene: Scene, leaves: str) -> None:
    count, changed = torch.zeros(4), Changed()
    scene.lasting = {count.untyped_storage().data_ptr()}
    body: Callable[[Tensor], Tensor] = {
        "random numbers": lambda x: x + torch.rand(4),
        "dropout": lambda x: nn.functional.dropout(x, 0.5, training=True),
        "a sum": lambda x: x + count.add_(1),
        "nothing": lambda x: x.clone().add_(count),
        "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    }[leaves]
    for _ in range(4):
        scene.calls.call(body, (torch.ones(2, 4),), changed=changed)
    assert scene.launched == 1
    changed.reason, before = "another node was here", count.clone()
    scene.calls.call(body, (torch.ones(2, 4),), changed=changed)
    assert scene.launched == (2 if leaves in ("nothing", "attention") else 1)
    assert torch.equal(count, before + (leaves == "a sum")), "once for a call"
