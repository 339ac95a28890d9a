"""A plan that is not one candidate's yet: each call is served by the one whose turn it is (rounds.py), until one is chosen.

A candidate that cannot prepare, or whose plan raises, loses its place and the next one serves the same call: that is sound because
a plan that raises has written to nothing that it reads (call.py).

As a rule nothing is computed twice and nothing copied. But a model's call that is to be captured as a CUDA graph waits for the last
of its kernels to be chosen, and some are called once in it. In such a call (`hurried`) more turns may follow behind a short one
(`Turns.more`): what they write goes nowhere, and of operands that they would write over they get copies.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...gpu.capture import capturing
from ..call import (
    Call,
    Candidate,
    Plan,
    Tensors,
    place,
)
from .rounds import Turn, Turns

MOST_COPIED = 64 << 20  # bytes, of operands that are written over, for turns behind a call


class _OfThread(threading.local):
    """timed: how many turns are being timed now. A candidate may call ops that choose themselves."""

    timed = 0
    is_hurried = False


_now = _OfThread()


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """For this time this thread's calls wait for their kernels to be chosen."""
    before, _now.is_hurried = _now.is_hurried, True
    try:
        yield
    finally:
        _now.is_hurried = before


class Lap(Protocol):
    """A time that is known later: see event_timer.py."""

    host: float
    waited: bool

    def end(self) -> None: ...

    def seconds(self) -> float | None: ...


class Sweeper(Protocol):
    def begin(self, laps: int) -> None: ...

    def sweep(self) -> None:
        """Before each lap."""


@dataclass(frozen=True)
class Failure:
    """Of a candidate, at a call that another one could serve. The error itself would keep its frames, and their tensors."""

    name: str
    words: str
    ran_out: bool  # of memory

    @staticmethod
    def of(name: str, error: RuntimeError) -> Failure:
        lines = str(error).splitlines()
        return Failure(name, lines[0] if lines else type(error).__name__, isinstance(error, torch.OutOfMemoryError))


class Choosing:
    """Belongs to one signature and one thread, as plans do.

    writes   which of the operands the op writes over
    lap      begins to time work on a device, which waited so long for the host before, if it did
    sweep    what makes a device ready for several laps on the same operands
    elsewhere  who was chosen for this class of shapes meanwhile, at another signature
    served   is told of each turn, before it is taken
    lost     is told of each candidate that failed where another could serve
    chosen   is told when one is, once
    settle   is given the plan that serves from now on
    """

    def __init__(
        self,
        call: Call,
        able: Sequence[Candidate],
        turns: Turns,
        *,
        writes: Sequence[int],
        lap: Callable[[torch.device, float | None], Lap],
        sweep: Callable[[torch.device], Sweeper],
        elsewhere: Callable[[], str | None],
        served: Callable[[Turn], None],
        lost: Callable[[Call, Failure], None],
        chosen: Callable[[Turns], None],
        settle: Callable[[Plan], None],
    ) -> None:
        self._op, self._options, self._policy, self._device = call.op, call.options, call.policy, call.device
        self._able = {candidate.name: candidate for candidate in able}
        self._turns = turns
        self._writes, self._sweep = frozenset(writes), sweep
        self._lap, self._elsewhere = lap, elsewhere
        self._served, self._lost, self._chosen, self._settle = served, lost, chosen, settle
        self._plans: dict[str, Plan] = {}
        self._pending: deque[tuple[Turn, Lap]] = deque()
        self._waited: dict[str, float] = {}  # seconds that the host was at a candidate, where the device waited for it
        self._sweeper: Sweeper | None = None
        self._plan: Plan | None = None  # once chosen: whoever was bound to this keeps calling it

    def __call__(self, *tensors: Tensor | None) -> Any:
        if self._plan is not None:
            return self._plan(*tensors)
        if capturing():  # what is recorded takes no time now, and asking for times is forbidden
            best = self._turns.best
            self._served(Turn(best, is_timed=False))  # whoever records learns that it may not be the one that is chosen
            return self._prepared(best, tensors)(*tensors)
        self._listen()
        winner = self._elsewhere() or self._turns.winner
        if winner is not None:
            self._plan = self._prepared(winner, tensors)
            if self._elsewhere() is None:
                self._chosen(self._turns)
            self._plans.clear()
            self._pending.clear()
            self._sweeper = None
            self._settle(self._plan)
            return self._plan(*tensors)
        failures: list[Failure] = []
        while True:
            turn = self._turns.take()
            self._served(turn)
            try:
                result = self._serve(turn, tensors)
                break
            except RuntimeError as error:  # out of memory, a driver's refusal, a library's
                self._turns.failed(turn)
                if not self._turns.are_left:  # then it is none's fault
                    self._turns.forgive()
                    raise
                failures.append(Failure.of(turn.name, error))
            except BaseException:
                self._turns.dropped(turn)
                raise
            # Here, behind the `except`, the frames that failed are gone, and their tensors with them.
        failures += self._more(tensors)
        for failure in failures:
            self._lost(self._call(tensors), failure)
        return result

    def _more(self, tensors: Tensors) -> list[Failure]:
        """Turns behind a call that was served; and who failed at them."""
        if _now.timed or not _now.is_hurried:
            return []
        turns, failures = deque(self._turns.more()), list[Failure]()
        try:
            if turns and (own := self._copied(tensors)) is not None:
                self._sweeper = self._sweeper or self._sweep(self._device)
                self._sweeper.begin(len(turns))
                while turns:
                    self._sweeper.sweep()
                    failures += self._tried(turns, own)
        except torch.OutOfMemoryError:
            pass  # for the copies: then turns wait for calls of their own
        finally:
            for turn in turns:
                self._turns.dropped(turn)
        return failures

    def _tried(self, turns: deque[Turn], tensors: Tensors) -> list[Failure]:
        """The first of these turns is taken; where that fails, those of the same candidate are dropped too."""
        turn = turns[0]
        try:
            self._serve(turn, tensors)
            turns.popleft()
            return []
        except RuntimeError as error:
            turns.popleft()
            self._turns.failed(turn)
            if not self._turns.are_left:
                self._turns.forgive()
            for other in [one for one in turns if one.name == turn.name]:
                turns.remove(other)
                self._turns.dropped(other)
            return [Failure.of(turn.name, error)]

    def _copied(self, tensors: Tensors) -> Tensors | None:
        """The operands, with copies of those that are written over; the same one twice stays the same. None: they are too large."""
        over = {place(t): t for i, t in enumerate(tensors) if t is not None and i in self._writes}
        if sum(t.untyped_storage().nbytes() for t in over.values()) > MOST_COPIED:
            return None
        copies = {
            at: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for at, t in over.items()
        }
        for at, t in over.items():
            copies[at].copy_(t)
        return tuple(None if t is None else copies.get(place(t), t) for t in tensors)

    def _serve(self, turn: Turn, tensors: tuple[Tensor | None, ...]) -> Any:
        plan = self._prepared(turn.name, tensors)
        if not turn.is_timed:
            return plan(*tensors)
        lap = self._lap(self._device, self._waited.get(turn.name))
        _now.timed += 1
        try:
            result = plan(*tensors)
        finally:
            _now.timed -= 1
        lap.end()
        if lap.waited:
            self._waited[turn.name] = lap.host
        self._pending.append((turn, lap))
        return result

    def _listen(self) -> None:
        """Times that are known by now, in the order of their turns."""
        while self._pending:
            turn, lap = self._pending[0]
            seconds = lap.seconds()
            if seconds is None:
                return
            self._pending.popleft()
            self._turns.heard(turn, seconds, lap.host, waited=lap.waited)

    def _prepared(self, name: str, tensors: tuple[Tensor | None, ...]) -> Plan:
        plan = self._plans.get(name)
        if plan is None:
            plan = self._plans[name] = self._able[name].prepare(self._call(tensors))
        return plan

    def _call(self, tensors: tuple[Tensor | None, ...]) -> Call:
        """Made anew each time: kept, it would keep the first call's tensors."""
        return Call(self._op, tensors, self._options, self._policy)
