"""How often `auto` measures a candidate: short ones for some milliseconds, long ones a few times, disturbed ones more often."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusestream.kernels_cuda import LEDGER, KernelError, KernelPolicy, autotune
from fusestream.kernels_cuda.autotune import Tuner
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.winners import WinnersFile

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


def test_so_many_launches_that_a_round_takes_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty at most, however short; and one that takes no time at all on this clock is no division by nothing."""
    launched: dict[str, set[int]] = {"none": set(), "short": set(), "middling": set(), "long": set()}
    takes = {"none": 0.0, "short": 1e-5, "middling": 2e-4, "long": 0.02}

    def clock(run: Any, launches: int) -> float:
        launched[run()].add(launches)
        return takes[run()]

    monkeypatch.setattr(autotune, "_time", clock)
    autotune._in_turns(OP, CALL, candidates(*takes))
    assert launched == {"none": {1, 50}, "short": {1, 50}, "middling": {1, 5}, "long": {1}}


def candidates(*names: str) -> Any:
    return [SimpleNamespace(name=name, ours=True, prepare=lambda _, name=name: lambda _: name) for name in names]


@pytest.mark.parametrize(
    ("times", "launches", "known"),
    [
        ([0.03] * 2, 1, False),  # too few
        ([0.03] * 3, 1, True),
        ([0.03, 0.0306, 0.05], 1, True),  # the two least agree within the margin
        ([0.03, 0.0307, 0.05], 1, False),
        ([1e-4] * 6, 10, False),  # agree, and are six milliseconds in all
        ([1e-4] * 7, 10, True),
    ],
)
def test_when_a_candidate_is_known(times: list[float], launches: int, known: bool) -> None:
    assert autotune._is_known(times, launches) is known


def test_who_looks_on_is_told_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From nothing to all of it, a step at a time: a bar may be drawn of it. An error of the observer ends the measurement."""
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(autotune, "_observer", autotune._observer)
    autotune.observe(lambda op, done, of: seen.append((op, done, of)))
    measured(monkeypatch, one=steady(0.5, 0.02), other=steady(0.5, 1e-5))
    of = 2 + autotune.ROUNDS
    assert seen == [("some op", done, of) for done in range(of + 1)]

    def interrupts(_op: str, done: int, _of: int) -> None:
        if done:
            raise KeyboardInterrupt

    autotune.observe(interrupts)
    with pytest.raises(KeyboardInterrupt):
        measured(monkeypatch, one=steady(0.5, 0.02))


def test_a_candidate_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[float]:
        raise KernelError("the moon is full")
        yield

    LEDGER.clear()
    measured(monkeypatch, broken=broken(), works=steady(0.5, 0.02))
    assert LEDGER.messages == ["some op: broken failed while being measured: the moon is full"]


def test_what_is_measured_is_a_sample_and_the_cache_is_emptied_after(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied, met = [], []
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(autotune, "_time", lambda run, _launches: run() or 0.02)
    part = torch.zeros(1)
    op: Any = SimpleNamespace(name="some op", mutates=(), sample=lambda _: (part,))
    some: Any = SimpleNamespace(name="some", prepare=lambda call: lambda x: met.extend([x, *call.tensors]))
    assert autotune.measure(op, CALL, [some]) == {"some": 0.02}
    assert all(tensor is part for tensor in met) and len(emptied) == 1
    monkeypatch.setattr(autotune, "_observer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        autotune.measure(op, CALL, [some])
    assert len(emptied) == 2, "also when it was interrupted"


@pytest.mark.parametrize("make", [
    lambda: torch.arange(24.0).view(4, 6),
    lambda: torch.arange(24.0).view(4, 6)[:, :4],  # with gaps between rows
    lambda: torch.arange(24.0).view(2, 3, 4)[:, 1:, 1:].transpose(0, 2),
    lambda: torch.arange(5.0).expand(3, 5),
    lambda: torch.zeros(0, 3),
    lambda: torch.tensor(7.0),
])  # fmt: skip
def test_a_copy_lies_as_the_original_does(make: Any) -> None:
    t = make()
    copy = autotune._copy(t)
    assert torch.equal(copy, t) and copy.stride() == t.stride() and copy.shape == t.shape
    assert not t.numel() or copy.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()


class Clock:
    """Torch's events and stream, by a clock on which a launch takes two milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[Any] = []
        self.milliseconds = 0.0
        clock = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing, "without it torch knows no time"

            def record(self) -> None:
                clock.said.append("mark")
                self.at = clock.milliseconds

            def synchronize(self) -> None:
                clock.said.append("wait")

            def elapsed_time(self, end: Event) -> float:
                assert clock.said[-1] == "wait"
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: self.say("idle")))
        monkeypatch.setattr(autotune, "_spin", self.say)

    def say(self, what: Any) -> None:
        self.said.append(what)

    def run(self) -> None:
        self.said.append("run")
        self.milliseconds += 2.0


def test_a_time_is_of_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is idle, then spins for as long as the host takes to queue all launches, and only then the time begins."""
    clock = Clock(monkeypatch)
    assert autotune._time(clock.run, 3) == pytest.approx(2e-3)
    assert clock.said == ["idle", autotune.LEAST_CYCLES, "mark", "run", "run", "run", "mark", "wait"]
    clock.said.clear()
    autotune._time(clock.run, 50)
    assert clock.said[1] == 50 * autotune.QUEUE_CYCLES
    monkeypatch.setattr(autotune, "_spin", None)  # private to torch, and may be gone one day
    assert autotune._time(clock.run, 2) == pytest.approx(2e-3)


def test_a_time_belongs_to_a_card_a_driver_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of these is another, the measurement is made anew."""
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


class Measured:
    """A tuner of its own, which is told what each candidate takes."""

    def __init__(self, folder: Path, **seconds: float) -> None:
        self.seconds, self.rounds = seconds, 0
        self.tuner = Tuner(WinnersFile(folder / "winners.json"), self.measure, lambda _: "a card")

    def measure(self, _op: Any, _call: Call, able: Any) -> dict[str, float]:
        self.rounds += 1
        return {candidate.name: self.seconds[candidate.name] for candidate in able}

    def fastest(self, *names: str) -> str:
        able: Any = [SimpleNamespace(name=name, ours=name != "stock") for name in names]
        op: Any = SimpleNamespace(name="some op", shape_class=lambda _: "a class")
        found = self.tuner.fastest(op, CALL, able)
        assert any(found is one for one in able)
        return found.name


def test_what_was_measured_is_remembered_by_other_processes_too(tmp_path: Path) -> None:
    first = Measured(tmp_path, fast=1.0, stock=2.0)
    assert first.tuner.measurings == 0
    assert first.fastest("fast", "stock") == first.fastest("fast", "stock") == "fast"
    assert first.rounds == first.tuner.measurings == 1
    other = Measured(tmp_path, fast=2.0, stock=1.0)
    assert other.fastest("fast", "stock") == "fast" and other.rounds == 0
    assert LEDGER.choices[-1].why == "measured" and LEDGER.choices[-1].seconds == {"fast": 1.0, "stock": 2.0}


def test_a_race_counts_for_those_who_ran_in_it(tmp_path: Path) -> None:
    """A loser that cannot serve today is not missed; a winner that cannot is, and so is a newcomer."""
    some = Measured(tmp_path, fast=1.0, slow=3.0, stock=2.0, new=0.5)
    assert some.fastest("fast", "slow", "stock") == "fast"
    assert some.fastest("fast", "stock") == "fast" and some.rounds == 1
    assert some.fastest("slow", "stock") == "stock" and some.rounds == 2
    assert some.fastest("new", "slow", "stock") == "new" and some.rounds == 3
    assert some.fastest("new", "slow", "stock") == "new" and some.rounds == 3


def test_while_a_graph_is_captured_nothing_is_measured_and_nothing_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = Measured(tmp_path, best=2.0, stock=1.0)
    monkeypatch.setattr(autotune, "capturing", lambda: True)
    assert some.fastest("best", "stock") == "best" and some.rounds == some.tuner.measurings == 0
    assert LEDGER.choices[-1].winner == "best" and "graph is being captured" in LEDGER.choices[-1].why
    monkeypatch.setattr(autotune, "capturing", lambda: False)
    assert some.fastest("best", "stock") == "stock", "measured as soon as that is over"
    monkeypatch.setattr(autotune, "capturing", lambda: True)
    assert some.fastest("best", "stock") == "stock", "what is known serves a capture too"


def test_a_measurement_that_fails_is_counted_and_leaves_nothing(tmp_path: Path) -> None:
    """Whoever measures a step must know that kernels were tried in it, even if that was interrupted."""
    some = Measured(tmp_path, stock=1.0)
    with pytest.raises(KeyError):
        some.fastest("unknown", "stock")
    assert some.tuner.measurings == 1 and not (tmp_path / "winners.json").exists()
    assert some.fastest("stock") == "stock" and some.tuner.measurings == 2


def test_one_that_could_not_run_today_is_tried_again(tmp_path: Path) -> None:
    some = Measured(tmp_path, fast=math.inf, stock=1.0)
    assert some.fastest("fast", "stock") == "stock" and not (tmp_path / "winners.json").exists()
    some.seconds["fast"] = 0.5
    assert some.fastest("fast", "stock") == "fast"


def test_there_is_one_tuner_and_it_keeps_its_winners_in_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "_tuner", None)
    monkeypatch.setattr(autotune.device_code, "cache_folder", lambda: tmp_path)
    made = autotune.tuner()
    assert made is autotune.tuner()
    made._measure, made._card_key = lambda *_: {"stock": 1.0}, lambda _: "a card"
    stock: Any = SimpleNamespace(name="stock", ours=False)
    op: Any = SimpleNamespace(name="some op", shape_class=lambda _: "a class")
    assert autotune.fastest(op, CALL, [stock]) is stock
    assert (tmp_path / autotune.FILE).is_file()
