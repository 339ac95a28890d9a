"""Which calls are captured, when they are replayed, and what ends that: over a recorder that tapes torch's operations."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import comfy.ldm.modules.attention
import comfy.model_management
import pytest
import torch
from taped import NBYTES, Model, TapingRecorder, refusals
from torch import Tensor

from fusestream.fusion.graphs import calls
from fusestream.fusion.graphs.calls import Graphs
from fusestream.gpu import capture
from fusestream.gpu.call_key import put_together, taken_apart
from fusestream.gpu.capture_check import (
    NotRecordable,
    Rehearsal,
    _untold,
    _waits_told,
)
from fusestream.gpu.graphs import NotRecorded
from fusestream.gpu.replay import STRAYS
from fusestream.kernels_cuda import LEDGER, KernelPolicy
from fusestream.kernels_cuda.tune import selection

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def recorder() -> TapingRecorder:
    LEDGER.clear()
    return TapingRecorder()


@pytest.fixture
def measured() -> list[int]:
    return [0]


@pytest.fixture
def graphs(model: Model, recorder: TapingRecorder, measured: list[int]) -> Graphs:
    return Graphs(model, model.net, recorder, lambda: measured[0])


def same(graphs: Graphs, model: Model, x: Tensor, *others: Any) -> None:
    want = Model.body(model, x, *others)
    model.ran -= 1
    assert torch.equal(graphs.call(model.body, (x, *others)), want)


def warm(graphs: Graphs, model: Model, *shape: int, calls: int = 3) -> None:
    for _ in range(calls):
        same(graphs, model, torch.randn(*(shape or (2, 4))))


# ------------------------------------------------------------------------------------------------------- captured, replayed


def test_two_calls_run_the_third_is_captured_the_others_are_replayed(graphs: Graphs, model: Model) -> None:
    warm(graphs, model)
    assert (graphs.captured, graphs.replayed, graphs.count, model.ran) == (1, 0, 1, 4), "watched, and recorded"
    warm(graphs, model, calls=5)
    assert (graphs.captured, graphs.replayed, model.ran, model.as_graph) == (1, 5, 4, 5)
    assert model.notes["CUDA graphs"] == "1, 0.00 GiB" and "5 calls were replayed" in graphs.words()


def test_only_what_may_be_captured_is_in_a_hurry_to_choose(graphs: Graphs, model: Model) -> None:
    """A call that is not replayed yet; and one of a model that settles before long, but not of one that streams for good."""
    hurries: list[bool] = []

    def body(x: Tensor) -> Tensor:
        hurries.append(selection._now.is_hurried)
        return model.body(x)

    def calls(number: int) -> list[bool]:
        del hurries[:]
        for _ in range(number):
            graphs.call(body, (torch.randn(2, 4),))
        return hurries

    model.generation = None
    assert calls(2) == [False, False]
    model.comes = True
    assert calls(1) == [True]
    model.generation, model.comes = 0, False
    assert calls(2) == [True, True] and graphs.captured == 0
    assert calls(3) == [False, False] and graphs.captured == 1, (
        "watched and recorded, of chosen kernels; and then replayed"
    )
    assert not selection._now.is_hurried


def test_what_comes_out_is_the_callers(graphs: Graphs, model: Model) -> None:
    warm(graphs, model)
    xs = [torch.randn(2, 4) for _ in range(3)]
    kept = [graphs.call(model.body, (x,)) for x in xs]
    for x, out in zip(xs, kept, strict=True):
        assert torch.equal(out, x @ model.weight)
    assert graphs.replayed == 3


@pytest.mark.parametrize("other", ["shape", "strides", "type", "value", "key"])
def test_another_call_is_captured_anew(graphs: Graphs, model: Model, other: str) -> None:
    warm(graphs, model)
    model.weight = model.weight.double() if other == "type" else model.weight
    x = {
        "shape": torch.randn(3, 4),
        "strides": torch.randn(4, 2).t(),
        "type": torch.randn(2, 4, dtype=torch.float64),
    }.get(other, torch.randn(2, 4))
    given: tuple[Any, ...] = (x, 2.0) if other == "value" else (x,)
    for i in range(4):
        out = graphs.call(model.body, given, "another" if other == "key" else ())
        assert torch.equal(out, Model.body(model, *given)) and graphs.captured == (1 if i < 2 else 2)
    assert graphs.replayed == 1


def test_gaps_and_overlaps_of_inputs_are_kept(graphs: Graphs, model: Model) -> None:
    for make in (lambda: torch.randn(2, 9)[:, 1:5], lambda: torch.randn(1, 4).expand(3, 4)):
        before = graphs.replayed
        for _ in range(4):
            same(graphs, model, make())
        assert graphs.replayed == before + 1


def test_what_the_host_counts_is_counted_at_each_replay(graphs: Graphs, model: Model) -> None:
    seen: list[int] = []

    def body(x: Tensor) -> Tensor:
        capture.each_time(lambda: seen.append(1))
        return x + 1

    for i in range(6):
        graphs.call(body, (torch.randn(2),))
        assert len(seen) == i + 1
    assert graphs.replayed == 3


def test_measuring_kernels_is_no_call(graphs: Graphs, model: Model, measured: list[int]) -> None:
    def measures(x: Tensor) -> Tensor:
        measured[0] += 1
        return x + 1

    for _ in range(6):
        graphs.call(measures, (torch.randn(2),))
    assert graphs.captured == 0
    for _ in range(3):
        graphs.call(lambda x: x + 1, (torch.randn(2),))
    assert graphs.captured == 1


def test_what_waits_for_the_card_is_never_captured(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    recorder.bound = "card"
    warm(graphs, model, calls=6)
    assert (graphs.captured, model.ran) == (0, 6)
    assert "the card takes" in model.notes["CUDA graphs"] and not refusals(), "which is as it should be"


# ------------------------------------------------------------------------------------------------------- memory beside


class Room:
    """Rows that calls write to, one after the other."""

    def __init__(self) -> None:
        self.rows, self.at = torch.zeros(32, 4), torch.zeros(1, dtype=torch.long)
        self.ran = 0

    def body(self, x: Tensor) -> Tensor:
        self.ran += 1
        self.rows.index_copy_(0, self.at, x)
        return self.rows.sum(0)


def written(graphs: Graphs, room: Room, calls: int) -> None:
    """As many, each seeing all rows before."""
    for _ in range(calls):
        x, before = torch.randn(1, 4), room.rows.sum(0)
        torch.testing.assert_close(graphs.call(room.body, (x,), memory=room), before + x[0])
        room.at.add_(1)


def test_memory_beside_is_written_as_ever(graphs: Graphs, recorder: TapingRecorder) -> None:
    room = Room()
    written(graphs, room, 8)
    assert (graphs.captured, graphs.replayed, graphs.tokens, room.ran) == (1, 5, 5, 4)
    assert room.rows[:8].abs().sum(1).all() and not room.rows[8:].any()
    graphs.let_go(room)
    assert not recorder.tapes and graphs.nbytes == 0
    written(graphs, room, 2)
    assert (graphs.captured, graphs.replayed) == (2, 6), "it is still known to pay"


def test_other_memory_is_captured_anew_at_once(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    for i in range(1, 200):
        room = Room()
        written(graphs, room, 5)
        assert graphs.captured == i and len(recorder.tapes) == 1 and len(graphs._calls) == 1
        if i % 2:
            graphs.let_go(room)
            assert not recorder.tapes and model.budget == 8 * NBYTES
    graphs.let_go(Room())
    assert len(recorder.tapes) == 0, "the last one is gone, and another was never there"


def test_letting_go_leaves_other_calls(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    room = Room()
    warm(graphs, model)
    written(graphs, room, 4)
    graphs.let_go(room)
    assert len(recorder.tapes) == 1
    warm(graphs, model, calls=1)
    assert graphs.replayed == 2 and "2 calls were replayed (1 token of text)" in graphs.words()


def test_memory_in_turns(graphs: Graphs, recorder: TapingRecorder) -> None:
    """Two texts at once are not captured from token to token."""
    rooms = Room(), Room()
    for _ in range(30):
        for room in rooms:
            written(graphs, room, 1)
    assert recorder.recorded < 6


def test_no_room_for_one_may_be_room_for_another(graphs: Graphs, model: Model) -> None:
    model.budget, first, second = 0, Room(), Room()
    written(graphs, first, 5)
    model.budget = 8 * NBYTES
    written(graphs, first, 2)
    assert refusals() == [calls.NO_ROOM] and graphs.captured == 1 and graphs.replayed == 0
    written(graphs, second, 2)
    assert graphs.captured == 2 and graphs.replayed == 1


def test_kernels_that_other_memory_is_chosen_for(graphs: Graphs, measured: list[int]) -> None:
    """It has another size: until they are, nothing is watched."""
    first, second = Room(), Room()
    written(graphs, first, 4)
    attempts = graphs.attempts

    def measures(x: Tensor) -> Tensor:
        measured[0] += second.ran < 5
        return second.body(x)

    for _ in range(9):
        graphs.call(measures, (torch.randn(1, 4),), memory=second)
        second.at.add_(1)
    assert graphs.attempts == attempts + 2 and graphs.captured == 2 and graphs.replayed == 3


# -------------------------------------------------------------------------------------------------------- what ends it


def test_what_moved_is_captured_anew_at_once(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    warm(graphs, model, calls=4)
    model.weight, model.generation = torch.randn(4, 4), 1
    warm(graphs, model, calls=1)
    assert (graphs.captured, len(recorder.tapes)) == (2, 1), "it is known to pay"
    warm(graphs, model, calls=2)
    assert graphs.replayed == 3


def test_a_model_that_streams_runs_as_ever(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    warm(graphs, model, calls=4)
    budget = model.budget
    model.generation = None
    warm(graphs, model, calls=4)
    assert not recorder.tapes and graphs.nbytes == 0 and model.budget > budget
    assert model.notes["CUDA graphs"] == "none: part of it streams" and not refusals()


def test_released_graphs_come_back(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    warm(graphs, model, calls=4)
    held = graphs.nbytes
    assert held > NBYTES and graphs.release() == held and not recorder.tapes and graphs.nbytes == 0
    assert model.budget == 8 * NBYTES
    warm(graphs, model, calls=2)
    assert (graphs.captured, graphs.replayed) == (2, 2)


def test_two_hundred_captures_leave_nothing(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    warm(graphs, model)
    for generation in range(1, 200):
        warm(graphs, model, calls=1)
        model.generation = generation
        warm(graphs, model, calls=1)
    assert graphs.captured == recorder.recorded == 200
    assert len(recorder.tapes) == 1 and graphs.release() and model.budget == 8 * NBYTES


def test_what_moves_from_call_to_call_is_not_captured_each_time(graphs: Graphs, model: Model) -> None:
    """Two prompts with LoRAs of their own, in turns: to capture takes longer than a call."""
    warm(graphs, model)
    for generation in range(1, 100):
        model.weight, model.generation = torch.randn(4, 4), generation
        warm(graphs, model, calls=1)
    assert graphs.captured == 2 and graphs.replayed == 0
    warm(graphs, model, calls=4)
    assert (graphs.captured, graphs.replayed) == (3, 2), "once it stays"
    model.generation = "another"
    warm(graphs, model, calls=1)
    assert graphs.captured == 4


def test_more_sizes_in_turns_than_there_may_be_graphs(graphs: Graphs, model: Model) -> None:
    for _ in range(60):
        for rows in range(1, calls.MOST_GRAPHS + 2):
            warm(graphs, model, rows, 4, calls=1)
    assert graphs.captured < 60, "of 300 calls"


def test_the_oldest_graph_goes(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    for rows in range(1, calls.MOST_GRAPHS + 2):
        warm(graphs, model, rows, 4)
    assert graphs.count == len(recorder.tapes) == calls.MOST_GRAPHS
    replayed = graphs.replayed
    warm(graphs, model, 2, 4, calls=1)
    assert graphs.replayed == replayed + 1
    warm(graphs, model, 1, 4, calls=1)
    assert graphs.captured == calls.MOST_GRAPHS + 2, "the first was given up"


def test_calls_of_ever_new_sizes_are_forgotten(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    for rows in range(1, calls.MOST_CALLS + 9):
        warm(graphs, model, rows, 4, calls=1)
    assert len(graphs._calls) == calls.MOST_CALLS


def test_a_budget_without_room(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    model.budget = NBYTES // 2
    warm(graphs, model, calls=6)
    assert not recorder.tapes and graphs.replayed == 0 and refusals() == [calls.NO_ROOM]
    model.budget, model.generation = 8 * NBYTES, 1
    warm(graphs, model, calls=2)
    assert graphs.replayed == 1, "with other memory it is tried again"


def test_what_takes_much_is_not_short(graphs: Graphs, model: Model, recorder: TapingRecorder, monkeypatch: Any) -> None:
    monkeypatch.setattr(calls, "MOST_BYTES", NBYTES)
    warm(graphs, model, calls=6)
    assert not recorder.tapes and model.budget == 8 * NBYTES and "GiB of VRAM" in refusals()[0]


@pytest.mark.parametrize("error", [NotRecorded("refused"), torch.OutOfMemoryError("none left")])
def test_what_cannot_be_recorded_runs_as_ever(
    graphs: Graphs, model: Model, recorder: TapingRecorder, error: Exception
) -> None:
    recorder.fails = error
    warm(graphs, model, calls=6)
    assert not recorder.tapes and graphs.captured == 0 and len(refusals()) == 1


def test_unloaded_in_the_meantime(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    model.stands = False
    warm(graphs, model, calls=4)
    assert not recorder.recorded and not refusals()
    model.stands = True
    warm(graphs, model, calls=2)
    assert (graphs.captured, graphs.replayed) == (1, 1)


def test_a_replay_that_finds_no_memory(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    """Under cudaMallocAsync a graph's memory is taken as it is launched."""
    warm(graphs, model, calls=4)
    recorder.tapes[0].fails = torch.OutOfMemoryError("none left")
    ran = model.ran
    warm(graphs, model, calls=3)
    assert not recorder.tapes and model.ran == ran + 3 and refusals() == [calls.NO_ROOM]
    assert model.budget == 8 * NBYTES, "and it is not in the budget any more"


@pytest.mark.parametrize("grows", [3 * NBYTES, 8 * NBYTES])
def test_a_first_replay_that_takes_more(
    graphs: Graphs, model: Model, recorder: TapingRecorder, monkeypatch: pytest.MonkeyPatch, grows: int
) -> None:
    """Than a graph may take, or than is left: what it then holds would be in nobody's budget."""
    if grows < 8 * NBYTES:
        monkeypatch.setattr(calls, "MOST_BYTES", 2 * NBYTES)
    warm(graphs, model)
    recorder.tapes[0].nbytes += grows
    warm(graphs, model, calls=1)
    assert not recorder.tapes and model.budget == 8 * NBYTES and graphs.nbytes == 0 and len(refusals()) == 1
    warm(graphs, model, calls=1)


def test_a_weight_in_another_place(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
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


def test_calls_that_write_to_what_they_are_given(graphs: Graphs, model: Model) -> None:
    """Causal Wan does: its keys and values, and how many of them there are."""

    def body(x: Tensor, cache: dict[str, Any]) -> Tensor:
        at = cache["end"]
        cache["k"][at : at + 1] = x
        return cache["k"][: at + 1].sum(0)

    def counts(x: Tensor, cache: dict[str, Any]) -> Tensor:
        cache["end"] += 1
        return x * cache["end"]

    for work, reason in ((body, True), (counts, False)):
        LEDGER.clear()
        cache = {"k": torch.zeros(3, 4), "end": 0}
        for _ in range(6):
            x, cache["end"] = torch.randn(1, 4), 0
            out = graphs.call(work, (x, cache), reason)
            assert torch.equal(out, x[0] if reason else x) and cache["end"] == (0 if reason else 1)
            assert not reason or torch.equal(cache["k"][:1], x), "the caller's own"
        assert refusals() == ["it changes what it is given"]
    assert graphs.captured == 0


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


def test_what_comes_out_of_a_captured_call_lies_apart_from_its_inputs(graphs: Graphs, model: Model) -> None:
    xs = [torch.randn(2, 4) for _ in range(6)]
    kept = [graphs.call(lambda x: x, (x.clone(),)) for x in xs]
    assert graphs.replayed == 3 and all(torch.equal(out, x) for out, x in zip(kept, xs, strict=True))


def test_who_is_given_much_is_not_short(graphs: Graphs, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_BYTES", 16)
    warm(graphs, model, calls=4)
    assert graphs.captured == 0 and "it is given" in refusals()[0] and model.ran == 4


@pytest.mark.parametrize("switch", [*calls.SWITCHES, "autocast", "attention"])
def test_what_torch_computes_with_is_part_of_a_call(
    graphs: Graphs, model: Model, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    warm(graphs, model, calls=4)
    replayed = graphs.replayed
    if switch == "autocast":
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    elif switch == "attention":
        monkeypatch.setattr(comfy.ldm.modules.attention, "optimized_attention", lambda *_: None)
    else:
        before = getattr(torch.backends.cuda.matmul, switch)
        monkeypatch.setattr(calls.torch.backends.cuda, "matmul", SimpleNamespace(**{switch: not before}))
    warm(graphs, model, calls=1)
    monkeypatch.undo()
    assert graphs.replayed == replayed
    warm(graphs, model, calls=1)
    assert graphs.replayed == replayed + 1


# ------------------------------------------------------------------------------------------------------------- interrupts


def test_an_interrupt_comes_before_a_replay(graphs: Graphs, model: Model) -> None:
    warm(graphs, model)
    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        graphs.call(model.body, (torch.randn(2, 4),))
    warm(graphs, model, calls=1)
    assert graphs.replayed == 1


def test_an_interrupted_capture_is_tried_again(graphs: Graphs, model: Model, recorder: TapingRecorder) -> None:
    recorder.fails = comfy.model_management.InterruptProcessingException()
    warm(graphs, model, calls=2)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        graphs.call(model.body, (torch.randn(2, 4),))
    assert not recorder.tapes
    warm(graphs, model, calls=2)
    assert (graphs.captured, graphs.replayed) == (1, 1)


# ----------------------------------------------------------------------------------------------------- arguments, rehearsals


@dataclasses.dataclass(frozen=True)
class Shared:
    tokens: int
    mask: Tensor | None


def test_arguments_are_taken_apart_and_put_together() -> None:
    x, y = torch.randn(2), torch.randn(3)
    value = [{"a": (x, 1), "b": [y, x]}, Shared(3, y), Shared(4, None), "word", torch.float16]
    tensors: list[Tensor] = []
    form = taken_apart(value, tensors, CPU)
    assert tensors == [x, y] and hash(form) == hash(taken_apart(value, [], CPU))
    own = [t.clone() for t in tensors]
    made = put_together(value, iter(own))
    assert made[0]["a"][0] is made[0]["b"][1] is own[0] and made[1].mask is own[1] and made[2] is value[2]
    for policy in (
        KernelPolicy(),
        KernelPolicy.of("on", attention="off", linear="auto"),
    ):  # with what is made of its fields
        assert put_together(policy, iter(())) == policy
    aliased = [{"a": (x, 1), "b": [y, y]}, *value[1:]]
    assert taken_apart(aliased, [], CPU) != form


class Own(dict[str, Any]):
    """Somebody's, with more than items."""


class Row(list[Any]):
    """Likewise."""


@dataclasses.dataclass
class Mutable:
    tokens: int


@pytest.mark.parametrize(
    "value", [object(), lambda: None, torch.nn.Linear(1, 1), Own(a=1), Row([1]), {"in": [Own()]}, Mutable(1)]
)
def test_other_arguments_are_handed_back(graphs: Graphs, model: Model, value: Any) -> None:
    for _ in range(4):
        assert graphs.call(lambda x, _: x + 1, (torch.zeros(1), value)) == 1
    assert graphs.captured == 0 and len(refusals()) == 1 and "it is given a" in refusals()[0]


@pytest.mark.parametrize(
    "reads", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: torch.equal(x, x)]
)
def test_who_waits_for_the_card_is_handed_back(graphs: Graphs, reads: Any) -> None:
    for _ in range(4):
        with torch.inference_mode():
            assert graphs.call(lambda x: reads(x) is not None, (torch.ones(3),))
    assert graphs.captured == 0 and "waits for the card" in refusals()[0]


def test_what_comes_from_the_cpu_is_a_constant() -> None:
    """The device is `meta`: what is brought to it has no numbers."""
    rehearsal = Rehearsal(torch.device("meta"))
    size = [4]

    def work() -> Tensor:
        frequencies = torch.arange(size[0]).to("meta", torch.float32)
        return torch.ones(size[0], device="meta") * frequencies

    with torch.inference_mode():
        with rehearsal.watched():
            work()
        assert rehearsal.nbytes == 16
        with rehearsal.recalled():
            assert work().shape == (4,)
        size[0] = 5
        with pytest.raises(NotRecordable, match="same twice"), rehearsal.recalled():
            work()


class Card:
    """Torch's word on whether it lets the host wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode = 0
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set)

    def set(self, mode: int | str) -> None:
        self.mode = {"default": 0, "warn": 1}.get(mode, mode)  # type: ignore[arg-type, assignment]
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)

    def waits(self) -> None:
        if self.mode:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)


def test_who_asks_for_a_wait_is_handed_back(graphs: Graphs) -> None:
    """Even where it came to nothing."""

    def body(x: Tensor) -> Tensor:
        with contextlib.suppress(Exception):  # no card is here
            torch._C._cuda_synchronize()
        return x + 1

    before = sys.getprofile()
    for _ in range(5):
        assert torch.equal(graphs.call(body, (torch.zeros(2),)), torch.ones(2))
    assert graphs.captured == 0 and refusals() == ["it waits for the card (synchronize)"]
    assert sys.getprofile() is before


def test_waits_that_no_mode_sees_are_told_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.tensor(numbers, device="cuda")` copies within torch."""
    card, device = Card(monkeypatch), torch.device("cuda")
    with pytest.raises(NotRecordable, match="waits for the card"), _waits_told(device):
        card.waits()
    with pytest.warns(UserWarning, match="of somebody's"), _waits_told(device):
        with _untold(device):
            card.waits()
        warnings.warn("of somebody's", UserWarning, stacklevel=1)
    with pytest.raises(ZeroDivisionError), _waits_told(device):
        card.waits()
        raise ZeroDivisionError
    assert card.mode == 0


@pytest.mark.parametrize("work", [lambda x: x.to("cpu"), lambda x: torch.empty(3).copy_(x), lambda x: x.cpu()])
def test_who_reads_from_the_card_is_handed_back(work: Any) -> None:
    x = torch.empty(3, device="meta")
    with pytest.raises(NotRecordable, match="reads from the card"), Rehearsal(x.device).watched():
        work(x)


def test_who_may_launch_elsewhere_is_handed_back() -> None:
    """As torchvision's deformable convolution does. The device is `meta`: an operation of another library, on made-up tensors."""
    library = torch.library.Library("somebodys", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", torch.empty_like, "Meta")
    x = torch.empty(3, device="meta")
    with pytest.raises(NotRecordable, match="somebodys::double"), Rehearsal(x.device).watched():
        torch.ops.somebodys.double(x)


def test_what_a_recording_does_not_see_is_found_at_the_first_replay(
    graphs: Graphs, model: Model, recorder: TapingRecorder
) -> None:
    """Here numpy writes to a tensor; on a card a kernel that somebody launches on another stream."""

    def body(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.numpy()[:] = x.numpy() + 1
        return y * 2

    for _ in range(6):
        assert torch.equal(graphs.call(body, (torch.ones(3),)), torch.full((3,), 4.0))
    assert graphs.captured == 1 and graphs.replayed == 0 and not recorder.tapes
    assert refusals() == [STRAYS]


def test_random_numbers_may_differ_at_the_first_replay(graphs: Graphs) -> None:
    for _ in range(6):
        graphs.call(lambda x: x + torch.rand_like(x), (torch.zeros(8),))
    assert graphs.captured == 1 and graphs.replayed == 3
