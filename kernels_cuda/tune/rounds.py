"""Assigns turns: candidates serve the calls that are made anyway until the fastest is known.

Numbers in, names out; nothing here knows a GPU. A call asks `take`, runs the candidate that it
names, and tells what the device took for it when that is known, which may be many calls later
(`heard`). No call waits, and none is made twice except by `more`.

    first run      only tells how dear a second would be, because it loads modules and asks
                   libraries how to go about it
    then           three timed runs. Disturbances only add to a time, so the least counts. Seven
                   runs chose no faster candidates, two calls of a U-Net later (H200)
    a clear loser  1.5 times as slow as the best at its one time, or 1.15 times at the least of
                   several: no more turns
    waits          a time in which the device waited for the host tells the host's speed. Up to
                   three of a candidate do not count. Calls that the host is too slow for are
                   captured and replayed without it, as one graph
    late ones      are passed over until they have begun (warm_up.py)
    dear ones      wait until the purse has the likely cost of a turn (time_budget.py)
    short ones     need no call of their own if the caller is in a hurry: if the best takes two
                   milliseconds at most, more turns follow the call at hand, on the same operands
                   (`more`)
    in between     the best so far serves

All candidates can serve and compute in the same tier, because they were asked before, under one
policy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .time_budget import Purse

TIMES = 3  # of each candidate
# Ours must beat stock by more than a race's noise, or stock keeps its place: `auto` promises never
# to be slower.
MARGIN = 0.02
LOST_AT_ONCE = 1.5  # times the best one's median, for a single time
LOST = 1.15  # the same for the least of several times
UNKNOWN = 1.5  # assumed time of an untried candidate, as a multiple of the best
HOSTS = 0.02  # of a time: a smaller share of the host does not matter
MOST_WAITS = 3  # per candidate, that do not count
MOST_CALLS = 256  # then the figures so far decide
SHORT = 2e-3  # seconds of the best
TOO_DEAR = 3.0  # times SHORT: a turn that is likely to take longer waits for a call of its own
LAUNCH = 4e-5  # seconds of the host: the least cost of a turn


@dataclass(frozen=True)
class Turn:
    """One call, served by this candidate. A turn that is not timed is not reported back."""

    name: str
    is_timed: bool
    is_trial: bool = False  # of another candidate than the best so far
    paid: float = 0.0  # seconds that were put aside for it
    # follows a call that another turn has served, so that all of it is a cost
    is_more: bool = False


@dataclass
class _Runner:
    name: str
    handicap: float
    ratio: float | None  # its time over the best one's, at another size
    has_begun: Callable[[], bool] = lambda: True
    runs: int = 0
    waiting: int = 0  # turns whose time is not known yet
    waits: int = 0
    first: float | None = None  # the first run, less the host's time
    times: list[float] = field(default_factory=list)
    has_failed: bool = False
    has_lost: bool = False

    @property
    def figure(self) -> float | None:
        return min(self.times, default=None)

    @property
    def races(self) -> bool:
        """Whether more turns of it would tell something now."""
        return not (self.has_lost or self.is_known) and self.has_begun()

    @property
    def is_known(self) -> bool:
        return len(self.times) >= TIMES


class Turns:
    """The state of one choice.

    names   the candidates, in the order in which they are tried
    ours    those that must beat the others by the margin
    ratios  known times from another size, as multiples of the best one's there
    late    for those that are being warmed up beside the work: whether that is done
    extra   the purse for turns that follow a call; without it there are none
    """

    def __init__(
        self,
        names: Sequence[str],
        ours: frozenset[str],
        purse: Purse,
        ratios: Mapping[str, float] | None = None,
        late: Mapping[str, Callable[[], bool]] | None = None,
        extra: Purse | None = None,
    ) -> None:
        known = ratios or {}
        self._runners = {name: _Runner(name, 1 + MARGIN if name in ours else 1.0, known.get(name)) for name in names}
        for name, has_begun in (late or {}).items():
            self._runners[name].has_begun = has_begun
        self._purse, self._extra = purse, extra
        self._calls = 0
        purse.begin()

    @property
    def best(self) -> str:
        """The fastest so far; before any time is known, the first that has begun and not failed."""
        return self._best.name

    @property
    def are_left(self) -> bool:
        """Whether any candidate has not failed."""
        return bool(self._able)

    @property
    def winner(self) -> str | None:
        """The best, once enough is known or enough calls were made; else None."""
        if not self._able or self._best.figure is None:
            return None
        running = [runner for runner in self._able if not runner.has_lost]
        is_over = len(running) == 1 or all(runner.is_known for runner in running) or self._calls >= MOST_CALLS
        return self.best if is_over else None

    @property
    def seconds(self) -> dict[str, float]:
        """The least time of each. Infinite: it failed, or was too dear to be tried twice."""
        figures = {runner.name: None if runner.has_failed else runner.figure for runner in self._runners.values()}
        return {name: math.inf if figure is None else figure for name, figure in figures.items()}

    @property
    def tried(self) -> int:
        """The number of candidates that have a time."""
        return sum(runner.figure is not None for runner in self._runners.values())

    def take(self) -> Turn:
        """The turn that serves the call at hand."""
        self._calls += all(runner.has_begun() for runner in self._able)
        best = self._best
        if (
            # One run to warm up and one that counts. Until they are known, there is nothing to
            # compare with.
            best.figure is None
        ):
            return self._turn(best, is_timed=best.waiting + len(best.times) + (best.first is not None) < 2)
        # of equals the first, because they are tried in their order
        for runner in sorted(self._able, key=lambda one: one.runs):
            if runner.waiting or not runner.races:
                continue
            if runner is best:
                return self._turn(best, is_timed=True)
            likely = max(0.0, self._likely(runner, best.figure) - best.figure)
            if self._purse.pay(likely):
                runner.runs, runner.waiting = runner.runs + 1, runner.waiting + 1
                return Turn(runner.name, is_timed=True, is_trial=True, paid=likely)
        self._purse.earn(best.figure)
        return self._turn(best, is_timed=False)

    def more(self) -> list[Turn]:
        """Turns that may follow the call at hand, which was served; none unless it was short. A
        candidate without a time gets one turn, and one to warm up; then as many as it needs."""
        best, turns = self._best, list[Turn]()
        took = best.first if best.figure is None else best.figure
        if self._extra is None or took is None or took > SHORT:
            return turns
        for runner in self._able:
            if not runner.races:
                continue
            likely = max(LAUNCH, self._likely(runner, took))
            if likely > TOO_DEAR * SHORT:
                continue
            lacking = TIMES - len(runner.times) if runner.times else 1 + (runner.first is None)
            for _ in range(lacking - runner.waiting):
                if not self._extra.pay(likely):
                    return turns
                runner.runs, runner.waiting = runner.runs + 1, runner.waiting + 1
                turns.append(Turn(runner.name, is_timed=True, is_trial=runner is not best, paid=likely, is_more=True))
        return turns

    def heard(self, turn: Turn, seconds: float, host: float = 0.0, *, waited: bool = False) -> None:
        """Take in a turn's time on the device, in the order of the turns. host: seconds of the
        host. waited: whether the device waited for the host."""
        runner = self._runners[turn.name]
        runner.waiting -= 1
        if runner.first is None:
            seconds = runner.first = max(0.0, seconds - host)
        elif waited and host > HOSTS * seconds and runner.waits < MOST_WAITS:
            runner.waits += 1
            seconds = max(0.0, seconds - host)
        else:
            runner.times.append(seconds)
        if turn.is_more:
            assert self._extra is not None
            self._extra.settle(turn.paid, max(LAUNCH, seconds))
        best = self._best.figure
        if best is None:
            return
        if not turn.is_more:
            self._purse.earn(best)
            self._purse.settle(turn.paid, max(0.0, seconds - best) if turn.is_trial else 0.0)
        self._part_with_losers()

    def failed(self, turn: Turn) -> None:
        """Record that a candidate could not serve: it gets no more turns."""
        runner = self._runners[turn.name]
        runner.waiting -= turn.is_timed
        runner.has_failed = True

    def dropped(self, turn: Turn) -> None:
        """Undo a turn whose call was given up for other reasons, because it says nothing about the
        candidate."""
        self._runners[turn.name].waiting -= turn.is_timed
        purse = self._extra if turn.is_more else self._purse
        assert purse is not None
        purse.settle(turn.paid, 0.0)

    def forgive(self) -> None:
        """Let failed candidates try again, because a failure of all is not their fault."""
        for runner in self._runners.values():
            runner.has_failed = False

    @property
    def _able(self) -> list[_Runner]:
        return [runner for runner in self._runners.values() if not runner.has_failed]

    @property
    def _best(self) -> _Runner:
        known = [runner for runner in self._able if runner.figure is not None]
        if known:
            return min(known, key=_handicapped)
        return next((runner for runner in self._able if runner.has_begun()), self._able[0])

    def _turn(self, best: _Runner, *, is_timed: bool) -> Turn:
        best.runs += 1
        best.waiting += is_timed
        return Turn(best.name, is_timed)

    @staticmethod
    def _likely(runner: _Runner, best: float) -> float:
        """Seconds that a turn of this one is likely to take, if the best one takes `best`."""
        if runner.figure is not None:
            return runner.figure
        if runner.first is not None:
            return runner.first
        return best * (UNKNOWN if runner.ratio is None else runner.ratio)

    def _part_with_losers(self) -> None:
        best = self._best
        median = statistics.median(best.times)
        for runner in self._able:
            if runner is not best and runner.figure is not None:
                limit = LOST_AT_ONCE if len(runner.times) == 1 else LOST
                runner.has_lost = runner.figure > limit * median


def _handicapped(runner: _Runner) -> float:
    assert runner.figure is not None
    return runner.figure * runner.handicap
