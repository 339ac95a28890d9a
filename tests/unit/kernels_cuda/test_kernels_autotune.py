"""What `auto` remembers and of whom it is told: winners, other sizes, times of a device, in-place ops that fail halfway."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.attention.attention import ways as attention_ways
from fusestream.kernels_cuda.ops.conv.conv import ways as conv_ways
from fusestream.kernels_cuda.ops.matmul.linear import ways as linear_ways
from fusestream.kernels_cuda.policy import PRECISIONS
from fusestream.kernels_cuda.registry import StockCandidate
from fusestream.kernels_cuda.tune import (
    autotune,
    event_timer,
    selection,
    warm_up,
)
from fusestream.kernels_cuda.tune.autotune import Tuner
from fusestream.kernels_cuda.tune.nearest_shape import key, nearest
from fusestream.kernels_cuda.tune.time_budget import Purse
from fusestream.kernels_cuda.tune.winners import Winner, WinnersFile

CALL = Call("some op", (torch.zeros(2),), ())


class Process:
    """A tuner of its own on a device where candidates take what `seconds` says."""

    def __init__(self, folder: Path, shape: str = "a class", **seconds: float) -> None:
        self.seconds, self.shape, self.now = seconds, shape, 0.0
        self.late: dict[str, Callable[[], bool]] = {}
        self.swept: list[int] = []  # laps that were announced
        file = WinnersFile(folder / "winners.json")
        self.tuner = Tuner(file, self.lap, lambda _: "a card", Purse(1e9), self.sweep)

    def lap(self, _device: torch.device, _before: float | None) -> Any:
        start, end = self.now, []
        return SimpleNamespace(host=0.0, waited=False, end=lambda: end.append(self.now), seconds=lambda: end[0] - start)

    def sweep(self, _device: torch.device) -> Any:
        return SimpleNamespace(begin=self.swept.append, sweep=lambda: None)

    def runs(self, name: str) -> Callable[..., str]:
        def run(*_: Any) -> str:
            self.now += self.seconds[name]
            return name

        return run

    def serves(self, *names: str, calls: int = 100) -> list[str]:
        """Who served, until one was chosen; and that one."""
        able: Any = [
            SimpleNamespace(
                name=name,
                ours=name != "stock",
                prepare=lambda _, n=name: self.runs(n),
                begin=lambda _, n=name: self.late.get(n),
            )
            for name in names
        ]
        op: Any = SimpleNamespace(name="some op", shape_class=lambda _: self.shape, writes=())
        plans: list[Any] = []
        plan, _ = self.tuner.plan(op, CALL, able, plans.append)
        served = []
        for _ in range(calls):
            before = self.tuner.undecided
            served.append(plan(CALL.tensors[0]))
            if self.tuner.undecided == before:
                return served
        return served


def test_what_was_chosen_is_remembered_by_other_processes_too(tmp_path: Path) -> None:
    first = Process(tmp_path, fast=1.0, stock=2.0)
    served = first.serves("fast", "stock")
    assert served[-1] == "fast" and set(served) == {"fast", "stock"}
    assert first.tuner.undecided == len(served) - 1 and 0 < first.tuner.trials < first.tuner.undecided
    assert first.serves("fast", "stock") == ["fast"]
    other = Process(tmp_path, fast=2.0, stock=1.0)
    assert other.serves("fast", "stock") == ["fast"] and other.tuner.undecided == other.tuner.trials == 0
    assert LEDGER.choices[-1].why == autotune.CHOSEN
    assert LEDGER.choices[-1].seconds == pytest.approx({"fast": 1.0, "stock": 2.0})


def test_who_is_late_is_passed_over_and_not_left_out(tmp_path: Path) -> None:
    """However many calls are made meanwhile: a library takes a second to load, in which a short op is called ten thousand times."""
    some, begun = Process(tmp_path, fast=1.0, late=0.5, stock=2.0), []
    some.late["late"] = lambda: bool(begun)
    served = some.serves("late", "fast", "stock", calls=1000)
    assert len(served) == 1000 and "late" not in served and served[-1] == "fast"
    begun.append(True)
    served = some.serves("late", "fast", "stock")
    assert served[-1] == "late" and {"fast", "stock"} <= set(served)


def test_what_is_begun_is_begun_once_and_beside_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who cannot begin takes part all the same: it fails where another serves the call, and the report says so."""
    cuda: Any = SimpleNamespace(device=lambda _: nullcontext(), stream=lambda _: nullcontext(), Stream=lambda _: None)
    cuda.current_stream = lambda _: SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(warm_up, "_begun", {})
    go, threads = threading.Event(), []

    def work() -> None:
        threads.append(threading.get_ident())
        assert go.wait(10)
        raise RuntimeError("there is no such library")

    asked = [warm_up.begin("a kind", torch.device("cuda", 0), work) for _ in range(3)]
    assert not any(has_begun() for has_begun in asked)
    go.set()
    for thread in threading.enumerate():
        if thread.name == "fusestream begins a kind":
            thread.join(10)
    assert all(has_begun() for has_begun in asked)
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def test_what_is_recorded_before_a_choice_is_told_of_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph would hold whoever served, for good; events of a recording can be asked for nothing."""
    some = Process(tmp_path, fast=1.0, stock=2.0)
    able: Any = [
        SimpleNamespace(name=n, ours=n == "fast", prepare=lambda _, n=n: some.runs(n), begin=lambda _: None)
        for n in ("fast", "stock")
    ]
    op: Any = SimpleNamespace(name="some op", shape_class=lambda _: "a class", writes=())
    settled: list[Any] = []
    plan, _ = some.tuner.plan(op, CALL, able, settled.append)
    for _ in range(4):
        plan(CALL.tensors[0])
    monkeypatch.setattr(selection, "capturing", lambda: True)
    some.lap = None  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(some.tuner, "_lap", None)
    before, asked = some.tuner.undecided, dict(vars(some.tuner.purse))
    assert plan(CALL.tensors[0]) == "fast" and some.tuner.undecided == before + 1
    assert vars(some.tuner.purse) == asked and not settled
    monkeypatch.undo()
    while not settled:
        plan(CALL.tensors[0])
    monkeypatch.setattr(selection, "capturing", lambda: True)
    before = some.tuner.undecided
    assert plan(CALL.tensors[0]) == settled[0](CALL.tensors[0]) == "fast" and some.tuner.undecided == before


def test_a_race_counts_for_those_who_ran_in_it(tmp_path: Path) -> None:
    """A loser that cannot serve today is not missed; a winner that cannot is, and so is a newcomer."""
    some = Process(tmp_path, fast=1.0, slow=3.0, stock=2.0, new=0.5)
    assert some.serves("fast", "slow", "stock")[-1] == "fast"
    assert some.serves("fast", "stock") == ["fast"]
    assert some.serves("slow", "stock")[-1] == "stock"
    again = some.serves("new", "slow", "stock")
    assert again[-1] == "new" and len(again) > 1
    assert some.serves("new", "slow", "stock") == ["new"]


def test_who_won_at_a_near_size_is_tried_first(tmp_path: Path) -> None:
    """And who was slow there is tried last; the card has the last word."""
    some = Process(tmp_path, "float16[1024x64]", fast=3.0, slow=2.0, stock=1.0)
    assert some.serves("fast", "slow", "stock")[-1] == "stock"
    some.shape = "float16[2048x64]"
    served = some.serves("fast", "slow", "stock")
    assert list(dict.fromkeys(served)) == ["stock", "slow", "fast"]
    some.shape, some.seconds["fast"] = "float16[4096x64]", 0.5
    served = some.serves("fast", "slow", "stock")
    assert served[0] == "stock" and served[-1] == "fast"
    some.shape = "float32[4096x64]"
    assert some.serves("slow", "stock")[0] == "slow", "another type is no other size"


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("float16[1024x64] to 64", "float16[1024x64] to 64"),
        ("float16[300x64] to 64", "float16[256x64] to 64"),
        ("float16[1x64] to 64", "float16[256x64] to 64"),
        ("float16[1024x64] to 512", "float16[1024x64] to 256"),
        ("float16[1024x64] to 64 relu", None),
        ("float32[1024x64] to 64", None),
        ("Q4_K[1024x64] to 64", "Q4_K[8x8] to 8"),
        ("Q8_0[1024x64] to 64", None),
    ],
)
def test_the_nearest_size_has_the_same_words(shape: str, wanted: str | None) -> None:
    known = ["float16[1024x64] to 64", "float16[256x64] to 64", "float16[1024x64] to 256", "Q4_K[8x8] to 8"]
    entries = [(key("op", one, "card|x"), Winner(one, {})) for one in known]
    others = [
        (key(op, shape, card), Winner("wrong", {})) for op, card in (("op2", "card|x"), ("op", "card"), ("op", "x"))
    ]
    found = nearest("op", shape, "card|x", [*others, *entries])
    assert (found and found.name) == wanted


def test_where_the_policy_decides_who_may_compute_its_tier_is_in_the_class() -> None:
    """So all that are compared compute in one tier, and a choice in one says nothing of another."""
    x, weight = torch.zeros(1, 64, 64).half(), torch.zeros(64, 64).half()
    heads, image = torch.zeros(1, 64, 2, 64).half(), torch.zeros(1, 8, 1, 16, 16).half()
    calls = {
        "linear": ((x, weight, None, None, None), ("none", 1.0, False, None), linear_ways),
        "attention": ((heads,) * 3 + (None,) * 8, (None, False, -1, -1, 0, 0), attention_ways),
        "conv": (
            (image, torch.zeros(8, 8, 1, 3, 3).half(), None, None, None),
            ("none", 1, 0, 1, 1, 1, 1, 1),
            conv_ways,
        ),
    }
    for name, (tensors, options, ways) in calls.items():
        found: dict[str, set[str]] = {}
        for precision in PRECISIONS:
            call = Call(name, tensors, options, KernelPolicy(precision=precision))
            found.setdefault(OPS[name].shape_class(call), set()).add(str([str(way) for way in ways(call)]))
        assert len(found) > 1 and all(len(several) == 1 for several in found.values()), name


def test_there_is_one_tuner_and_it_keeps_its_winners_in_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "_tuner", None)
    monkeypatch.setattr(autotune.device_code, "cache_folder", lambda: tmp_path)
    made = autotune.tuner()
    assert made is autotune.tuner()
    some = Process(tmp_path, fast=1.0, stock=2.0)
    made._lap, made._card_key, some.tuner = some.lap, lambda _: "a card", made
    some.serves("fast", "stock", calls=200)
    (entry,) = json.loads((tmp_path / autotune.FILE).read_text())["winners"]
    assert entry == "some op|a class|a card"


def test_threads_choose_for_themselves_and_agree(tmp_path: Path) -> None:
    some = Process(tmp_path, fast=1.0, stock=2.0)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(some.serves("fast", "stock")[-1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["fast"] * 4


def test_a_time_belongs_to_a_card_a_driver_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of these is another, the choice is made anew."""
    card, cuda = SimpleNamespace(name="A card", multi_processor_count=30), SimpleNamespace(version=12020)
    source = ["abc"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(autotune, "driver", lambda: cuda)
    monkeypatch.setattr(autotune.matrix, "source_hash", lambda: source[0])
    keys = {autotune.card_key(CALL)}
    for of, field, value in ((card, "name", "B"), (card, "multi_processor_count", 31), (cuda, "version", 12030)):
        setattr(of, field, value)
        keys.add(autotune.card_key(CALL))
    source[0] = "abd"
    keys.add(autotune.card_key(CALL))
    monkeypatch.setattr(torch, "__version__", "99.0")
    keys.add(autotune.card_key(CALL))
    keys.add(autotune.card_key(replace(CALL, policy=KernelPolicy(isa="sm_75"))))
    assert len(keys) == 7
    assert autotune.card_key(CALL) in keys, "and the same is the same"


# ------------------------------------------------------------------------------------------- turns behind short calls


class Short:
    """An op that adds its second operand to its first, by candidates that take what `seconds` says, or fail."""

    def __init__(self, tmp_path: Path, writes: tuple[int, ...] = (0,), **seconds: float) -> None:
        self.process, self.ran, self.given = Process(tmp_path, **seconds), list[str](), list[tuple[Any, ...]]()
        self.failing: dict[str, BaseException] = {}
        self.is_hurried = True
        able: Any = [
            SimpleNamespace(name=n, ours=n != "stock", prepare=lambda _, n=n: self.candidate(n), begin=lambda _: None)
            for n in seconds
        ]
        op: Any = SimpleNamespace(name="some op", shape_class=lambda _: "a class", writes=writes)
        self.settled: list[Any] = []
        self.plan, _ = self.process.tuner.plan(op, CALL, able, self.settled.append)

    def candidate(self, name: str) -> Callable[..., None]:
        run = self.process.runs(name)

        def add(x: torch.Tensor, y: torch.Tensor) -> None:
            if name in self.failing:
                raise self.failing[name]
            self.ran.append(run())
            self.given.append((x, y))
            x += y

        return add

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> list[str]:
        """Who ran, the one that served first."""
        self.ran, self.given = [], []
        with selection.hurried() if self.is_hurried else nullcontext():
            self.plan(x, y)
        return self.ran


def test_of_a_short_op_that_is_called_once_a_step_the_fourth_step_knows_the_fastest(tmp_path: Path) -> None:
    some = Short(tmp_path, stock=1e-4, fast=0.9e-4, slow=1e-3, near=1.05e-4)
    one = torch.ones(2)
    runs = [some(torch.zeros(2), one) for _ in range(4)]
    assert runs[0] == ["stock"], "of which nobody knows yet how short it is"
    assert runs[1] == ["stock"] + 2 * ["fast"] + 2 * ["slow"] + 2 * ["near"]
    assert sorted(runs[2]) == 2 * ["fast"] + 2 * ["near"] + 2 * ["stock"], "and the clear loser no more"
    assert runs[3] == ["fast"] and some.settled and some.process.tuner.undecided == 3


@pytest.mark.parametrize(("stock", "is_hurried"), [(1e-2, True), (1e-4, False)])
def test_calls_that_are_long_or_in_no_hurry_are_made_once(tmp_path: Path, stock: float, is_hurried: bool) -> None:
    some = Short(tmp_path, stock=stock, fast=0.9 * stock)
    some.is_hurried = is_hurried
    while not some.settled:
        assert len(some(torch.zeros(2), torch.ones(2))) == 1


def test_what_follows_a_call_leaves_its_operands_alone(tmp_path: Path) -> None:
    """Each result is of one addition; and an operand that is given twice is the same one in a copy."""
    some = Short(tmp_path, stock=1e-4, fast=0.9e-4)
    while not some.settled:
        x, y = torch.arange(2.0), torch.ones(2)
        some(x, y)
        assert x.tolist() == [1.0, 2.0] and y.tolist() == [1.0, 1.0]
    some = Short(tmp_path / "other", stock=1e-4, fast=0.9e-4)
    strided = torch.zeros(2, 3)[:, 1]
    some(strided, strided)
    some(strided, strided)
    assert len(some.given) == 3
    for mine, theirs in some.given[1:]:
        assert mine is theirs and mine is not strided and mine.stride() == strided.stride()


def test_who_fails_behind_a_call_has_lost_and_the_result_stands(tmp_path: Path) -> None:
    some = Short(tmp_path, stock=1e-4, fast=0.9e-4, odd=0.8e-4)
    some(torch.zeros(2), torch.ones(2))
    some.failing["odd"] = RuntimeError("no such instruction")
    x = torch.zeros(2)
    assert "odd" not in some(x, torch.ones(2)) and x.tolist() == [1.0, 1.0]
    del some.failing["odd"]
    while not some.settled:
        assert "odd" not in some(torch.zeros(2), torch.ones(2))
    assert some.process.serves("stock", "fast") == ["fast"] or some.ran[-1] == "fast"


def test_an_interrupt_behind_a_call_owes_nothing(tmp_path: Path) -> None:
    some = Short(tmp_path, stock=1e-4, fast=0.9e-4)
    some(torch.zeros(2), torch.ones(2))
    balance = some.process.tuner.extra.balance
    some.failing["fast"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        some(torch.zeros(2), torch.ones(2))
    assert some.process.tuner.extra.balance == pytest.approx(balance)
    del some.failing["fast"]
    while not some.settled:
        some(torch.zeros(2), torch.ones(2))
    assert some.ran == ["fast"]


def test_operands_that_are_large_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST_COPIED", 4)
    some = Short(tmp_path, stock=1e-4, fast=0.9e-4)
    balance = some.process.tuner.extra.balance
    while not some.settled:
        assert len(some(torch.zeros(2), torch.ones(2))) == 1
    assert not some.process.swept and some.process.tuner.extra.balance == pytest.approx(balance)


def test_turns_behind_calls_end_with_what_pays_for_them(tmp_path: Path) -> None:
    some = Short(tmp_path, stock=1e-4, fast=0.9e-4)
    some.process.tuner.extra.pay(some.process.tuner.extra.balance)
    while not some.settled:
        assert len(some(torch.zeros(2), torch.ones(2))) == 1
    assert some.ran == ["fast"], "chosen all the same"


def test_a_candidate_that_chooses_itself_takes_no_turns_within_a_time(tmp_path: Path) -> None:
    inner = Short(tmp_path / "inner", stock=1e-4, fast=0.9e-4)
    inner(torch.zeros(2), torch.ones(2))
    outer = Short(tmp_path / "outer", stock=1e-4, fast=0.9e-4)
    as_it_is = outer.candidate

    seen: list[int] = []

    def candidate(name: str) -> Callable[..., None]:
        add = as_it_is(name)

        def both(x: torch.Tensor, y: torch.Tensor) -> None:
            seen.append(len(inner(torch.zeros(2), y)))
            add(x, y)

        return both

    outer.candidate = candidate  # type: ignore[method-assign]
    while not outer.settled:
        outer(torch.zeros(2), torch.ones(2))
    assert set(seen) == {1}


def test_the_cache_is_swept_before_each_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    """By as much memory as the cache has; and the device has something to do while the host asks for the laps."""
    said: list[Any] = []
    properties = SimpleNamespace(L2_cache_size=96)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(event_timer, "_spin", said.append)
    device = torch.device("cpu")
    sweeper, other = event_timer.Sweeper(device), event_timer.Sweeper(device)
    room = sweeper._room.bytes
    assert room.nbytes == 96 and other._room.bytes is room, "it is there once"
    room.fill_(1)
    sweeper.begin(3)
    sweeper.sweep()
    assert said == [cycles(3 * event_timer.QUEUEING)] and not room.any()
    sweeper.begin(1000)
    assert said[-1] == cycles(event_timer.MOST_AHEAD)
    del sweeper, other
    assert not event_timer._rooms, "and goes with the last who sweeps"
    del properties.L2_cache_size  # of older torch
    assert event_timer.Sweeper(device)._room.bytes.nbytes == event_timer.CACHE


# ------------------------------------------------------------------------------------------------- times of a device


class Events:
    """Torch's events on a stream that has work to do or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_idle: bool) -> None:
        self.said: list[str] = []
        events = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing, "without it torch knows no time"
                self.is_over = False

            def record(self, stream: Any) -> None:
                assert stream.device == torch.device("cuda:1")
                events.said.append("mark")

            def query(self) -> bool:
                return self.is_over

            def elapsed_time(self, end: Event) -> float:
                assert end.is_over and end is not self, "an event that is not over is an error"
                return 2.5

        host = iter([10.0, 10.25])
        monkeypatch.setattr(torch.cuda, "Event", Event)
        stream = lambda device: SimpleNamespace(device=device, query=lambda: is_idle)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "current_stream", stream)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(event_timer, "_spin", lambda cycles: self.said.append(f"spin {cycles}"))
        monkeypatch.setattr(event_timer.time, "perf_counter", lambda: next(host))


def test_a_lap_is_known_when_the_device_has_come_so_far_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(monkeypatch, is_idle=False)
    lap = event_timer.Lap(torch.device("cuda:1"))
    lap.end()
    assert events.said == ["mark"] * 2 and lap.host == 0.25
    assert lap.seconds() is None
    end: Any = lap._end
    end.is_over = True
    assert lap.seconds() == pytest.approx(2.5e-3)


@pytest.mark.parametrize("can_spin", [False, True])
def test_a_device_that_is_idle_spins_while_launches_are_queued(monkeypatch: pytest.MonkeyPatch, can_spin: bool) -> None:
    """Or a time would be the host's. That function is private to torch, and may be gone one day."""
    events = Events(monkeypatch, is_idle=True)
    if not can_spin:
        monkeypatch.setattr(event_timer, "_spin", None)
    event_timer.Lap(torch.device("cuda:1")).end()
    assert events.said == [f"spin {cycles(event_timer.QUEUEING)}"] * can_spin + ["mark"] * 2


def cycles(seconds: float) -> int:
    return round(event_timer.CLOCK * seconds)


@pytest.mark.parametrize(("before", "seconds"), [(1e-5, event_timer.QUEUEING), (1e-4, 1.5e-4), (0.1, event_timer.MOST)])
def test_a_device_that_waited_for_the_host_spins_as_long_as_the_host_needs(
    monkeypatch: pytest.MonkeyPatch, before: float, seconds: float
) -> None:
    """Though it has something to do yet. And a lap says whether it waited: then it was at its start before the host was done."""
    events = Events(monkeypatch, is_idle=False)
    lap = event_timer.Lap(torch.device("cuda:1"), before)
    lap.end()
    assert events.said == [f"spin {cycles(seconds)}", "mark", "mark"] and not lap.waited
    start: Any = lap._start
    start.is_over = True
    monkeypatch.setattr(event_timer.time, "perf_counter", lambda: 10.5)
    lap.end()
    assert lap.waited


def test_who_made_the_device_wait_is_given_more_time_ahead(tmp_path: Path) -> None:
    some, asked = Process(tmp_path, fast=1e-5, stock=2e-5), []
    as_it_is = some.lap

    def lap(device: torch.device, before: float | None) -> Any:
        asked.append(before)
        found = as_it_is(device, before)
        found.waited, found.host = before is None, 1e-4
        return found

    some.lap = lap  # type: ignore[method-assign]
    some.tuner._lap = lap
    assert some.serves("fast", "stock")[-1] == "fast"
    assert asked.count(None) == 2 and set(asked) == {None, 1e-4}


# ------------------------------------------------------------------------------------------------ in place, halfway


class FailsAt(TorchDispatchMode):
    """The n-th operation of torch that takes memory gets none. Those in place take none."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= not func._schema.name.endswith("_")
        if self.left < 0:
            raise torch.OutOfMemoryError("full")
        return func(*args, **(kwargs or {}))


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def in_place() -> dict[str, tuple[Any, ...]]:
    """Every op that writes over what it reads: (operands, options)."""
    stream, gate = half(1, 6, 8), half(1, 1, 8)
    q, table = half(1, 6, 2, 8), torch.randn(1, 6, 1, 4, 2, 2)
    return {
        "gated_residual_": ((stream, half(1, 6, 8), gate), (True,)),
        "linear_": ((stream, half(1, 6, 8), half(8, 8), half(8), stream, gate), ("none", 1.0, True)),
        "linear_pair_": ((stream, half(1, 6, 8), half(8, 8), half(8, 8)), ("silu", 1.0, True)),
        "rms_rope_": ((q, half(1, 6, 2, 8), half(16), half(16), table, None), (1e-6, "token", True)),
        "silu_mul_": ((stream, half(1, 6, 8), half(1, 6, 8)), ("silu", "split", 1.0, True)),
    }


def test_no_in_place_op_is_forgotten() -> None:
    """Those that only write are computed anew without harm."""
    only_write = {"to_half_into", "int8_to_half_into", "dequantise_into", "codes_to_int8_into", "rms_rope_keep"}
    writing = {name for name, op in OPS.items() if "(a!)" in op.schema}
    assert writing == {name for name, op in OPS.items() if op.writes}
    assert OPS["linear_"].writes == (0,) and OPS["to_half_into"].writes == (2,)
    # Products and one copy, as linear_ is.
    of_integers = {f"linear_int{bits}{pair}_" for bits in (8, 4) for pair in ("", "_pair")}
    assert writing == set(in_place()) | only_write | of_integers


@pytest.mark.parametrize("name", sorted(in_place()))
def test_a_plan_that_raises_has_written_to_nothing(name: str) -> None:
    """Wherever stock's computation is stopped: what it would have taken the place of is as it was, for the next candidate."""
    (stock,) = (c for c in OPS[name].candidates if isinstance(c, StockCandidate) and c.name == "stock")
    stopped = 0
    for n in range(200):
        torch.manual_seed(0)
        tensors, options = in_place()[name]
        before = [None if t is None else t.clone() for t in tensors]
        plan = stock.prepare(Call(name, tensors, options, KernelPolicy()))
        try:
            with FailsAt(n):
                plan(*tensors)
        except torch.OutOfMemoryError:
            stopped += 1
            assert all(t is None or torch.equal(t, b) for t, b in zip(tensors, before, strict=True)), n  # type: ignore[arg-type]
            continue
        break
    assert stopped > 0 and not torch.equal(tensors[0], before[0])
