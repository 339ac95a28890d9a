"""Whose turn it is: candidates serve the calls that have to be made anyway, until the fastest is known.

Numbers in, names out; nothing here knows a GPU. A call asks `take`, runs the candidate that it names, and tells what the device
took for it when that is known, which may be many calls later (`heard`). No call waits, and none is made twice but for `more`.

    first run      tells how dear a second would be, and nothing else: it loads modules and asks libraries how to go about it
    then           three times are enough where the two least agree, seven in any case. What disturbs a time only ever adds to it,
                   so the least counts
    a clear loser  1.5 times as slow as the best at its one time, or 1.15 times at the least of several: no more turns
    waits          a time in which the device waited for the host says how quick the host was: it counts for nothing, unless there
                   are no others. Calls that the host is too slow for are captured and replayed without it, as one graph
    late ones      are passed over until they have begun (warm_up.py)
    dear ones      wait until the purse has what a turn is likely to cost (time_budget.py)
    short ones     need not wait for a call of their own, where whoever calls is in a hurry: where the best takes two milliseconds
                   at most, more turns follow the call at hand, on the same operands (`more`)
    in between     the best so far serves

Who is in the race has been asked before whether it can serve, under one policy: all of them compute in the same tier.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .time_budget import Purse

LEAST_TIMES = 3
MOST_TIMES = 7
# Ours must beat stock by more than a race is noisy, or stock keeps its place: `auto` promises never to be slower.
MARGIN = 0.02
TICK = 5e-7  # seconds that times of a card are whole numbers of, more or less
LOST_AT_ONCE = 1.5  # times the best one's median, at the one time that there is
LOST = 1.15  # the same for the least of several
UNKNOWN = 1.5  # times the best: what one is reckoned to take that has not run yet
HOSTS = 0.02  # of a time: less of the host in it is no matter
MOST_WAITS = 3  # of a candidate, that count for nothing
MOST_CALLS = 256  # then what is known by then decides
SHORT = 2e-3  # seconds, of the best
TOO_DEAR = 3.0  # times SHORT: what is likely to take longer waits for a call of its own
LAUNCH = 4e-5  # seconds: what a turn takes at least, for the host


@dataclass(frozen=True)
class Turn:
    """One call, served by this candidate. A turn that is not timed is not told of again."""

    name: str
    is_timed: bool
    is_trial: bool = False  # of another than the best so far
    paid: float = 0.0  # seconds that were put aside for it
    is_more: bool = False  # behind a call that another turn has served: all of it is a cost


@dataclass
class _Runner:
    name: str
    handicap: float
    ratio: float | None  # of its time to the best one's, at another size
    has_begun: Callable[[], bool] = lambda: True
    runs: int = 0
    waiting: int = 0  # turns whose time is not known yet
    waits: int = 0
    first: float | None = None  # the first run, less what the host was at it
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
        """Whether two that were hardly disturbed are among its times: disturbances differ from time to time."""
        if len(self.times) < LEAST_TIMES:
            return False
        least, second = sorted(self.times)[:2]
        return len(self.times) >= MOST_TIMES or second <= (1 + MARGIN) * least + TICK


class Turns:
    """The state of one choice.

    names   who takes part, in the order in which they are tried
    ours    those among them that have to beat the others by the margin
    ratios  what is known of some from another size: their time, in times of the best one's there
    late    of those that are being begun beside the work, whether that is done
    extra   what pays for turns that follow a call; without it there are none
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
        """The fastest so far; before anything is known, the first that has begun and not failed."""
        return self._best.name

    @property
    def are_left(self) -> bool:
        """Whether there is one that has not failed."""
        return bool(self._able)

    @property
    def winner(self) -> str | None:
        """Once enough is known, or enough calls were made."""
        if not self._able or self._best.figure is None:
            return None
        running = [runner for runner in self._able if not runner.has_lost]
        is_over = len(running) == 1 or all(runner.is_known for runner in running) or self._calls >= MOST_CALLS
        return self.best if is_over else None

    @property
    def seconds(self) -> dict[str, float]:
        """The least that each took. Infinite: it failed, or was too dear to be tried twice."""
        figures = {runner.name: None if runner.has_failed else runner.figure for runner in self._runners.values()}
        return {name: math.inf if figure is None else figure for name, figure in figures.items()}

    @property
    def tried(self) -> int:
        """How many have a time."""
        return sum(runner.figure is not None for runner in self._runners.values())

    def take(self) -> Turn:
        """Whose turn the call at hand is."""
        self._calls += all(runner.has_begun() for runner in self._able)
        best = self._best
        if (
            best.figure is None
        ):  # one run to warm up and one that counts; until they are known, there is nothing to compare with
            return self._turn(best, is_timed=best.waiting + len(best.times) + (best.first is not None) < 2)
        for runner in sorted(
            self._able, key=lambda one: one.runs
        ):  # of equals the first: they are tried in their order
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
        """Turns that may follow the call at hand, which was served: none unless all of it is short. Of a candidate whose time is
        not known yet one, and one to warm up; then as many as it takes."""
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
            lacking = max(1, LEAST_TIMES - len(runner.times)) if runner.times else 1 + (runner.first is None)
            for _ in range(lacking - runner.waiting):
                if not self._extra.pay(likely):
                    return turns
                runner.runs, runner.waiting = runner.runs + 1, runner.waiting + 1
                turns.append(Turn(runner.name, is_timed=True, is_trial=runner is not best, paid=likely, is_more=True))
        return turns

    def heard(self, turn: Turn, seconds: float, host: float = 0.0, *, waited: bool = False) -> None:
        """What the device took for a turn, in the order of the turns; how long the host was at it, and whether the device waited
        for it."""
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
        """It could not serve: it gets no more turns."""
        runner = self._runners[turn.name]
        runner.waiting -= turn.is_timed
        runner.has_failed = True

    def dropped(self, turn: Turn) -> None:
        """The call was given up, for reasons of its own: it says nothing about who served it."""
        self._runners[turn.name].waiting -= turn.is_timed
        purse = self._extra if turn.is_more else self._purse
        assert purse is not None
        purse.settle(turn.paid, 0.0)

    def forgive(self) -> None:
        """Those that failed may try again: where all of them do, it is not their fault."""
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
        """Seconds that a turn of this one is likely to take, where the best one's take so long."""
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
