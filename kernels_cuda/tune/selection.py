"""A plan whose candidate is not chosen yet: each call is served by the one whose turn it is
(rounds.py), until one is chosen.

If a candidate cannot prepare, or its plan raises, it loses its place and the next one serves the
same call. That is sound because a plan that raises has not written to anything that it reads
(call.py).

As a rule nothing is computed twice and nothing copied. But a model's call that is to be captured as
a CUDA graph waits until the last of its kernels is chosen, and some are called once in it. In such
a call (`hurried`) more turns may follow a short one (`Turns.more`). Their results are dropped, and
operands that they would overwrite are copied for them.
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

MOST_COPIED = 64 << 20  # bytes: limit of the overwritten operands for turns that follow a call


class _OfThread(threading.local):
    """State of one thread. timed: number of turns being timed now, because a candidate may call ops
    that choose too."""

    timed = 0
    is_hurried = False


_now = _OfThread()


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Hurry: this thread's calls in the block wait for their kernels to be chosen."""
    before, _now.is_hurried = _now.is_hurried, True
    try:
        yield
    finally:
        _now.is_hurried = before


class Lap(Protocol):
    """A time that is known later; see event_timer.py."""

    host: float
    waited: bool

    def end(self) -> None: ...

    def seconds(self) -> float | None: ...


class Sweeper(Protocol):
    def begin(self, laps: int) -> None: ...

    def sweep(self) -> None:
        """Called before each lap."""


@dataclass(frozen=True)
class Failure:
    """A candidate's failure at a call that another could serve. Holds words, because the error
    itself would keep its frames and their tensors."""

    name: str
    words: str
    ran_out: bool  # of memory

    @staticmethod
    def of(name: str, error: RuntimeError) -> Failure:
        lines = str(error).splitlines()
        return Failure(name, lines[0] if lines else type(error).__name__, isinstance(error, torch.OutOfMemoryError))


class Choosing:
    """Belongs to one signature and one thread, as plans do.

    writes   places of the operands that the op overwrites
    lap      begins to time work on a device; given the host's seconds when the device last waited
    sweep    prepares a device for several laps on the same operands
    elsewhere  the name chosen meanwhile for this shape class, at another signature
    served   told of each turn, before it is taken
    lost     told of each candidate that failed where another could serve
    chosen   told once, when one is chosen
    settle   given the plan that serves from now on
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
        # the host's seconds for a candidate when the device waited for it
        self._waited: dict[str, float] = {}
        self._sweeper: Sweeper | None = None
        # once chosen, because callers bound to this object keep calling it
        self._plan: Plan | None = None

    def __call__(self, *tensors: Tensor | None) -> Any:
        if self._plan is not None:
            return self._plan(*tensors)
        if capturing():  # recorded work takes no time now, and asking for times is forbidden
            best = self._turns.best
            # tells the recorder that another candidate may be chosen later
            self._served(Turn(best, is_timed=False))
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
                if not self._turns.are_left:  # then it is not this candidate's fault
                    self._turns.forgive()
                    raise
                failures.append(Failure.of(turn.name, error))
            except BaseException:
                self._turns.dropped(turn)
                raise
            # Here, behind the `except`, the failed frames and their tensors are gone.
        failures += self._more(tensors)
        for failure in failures:
            self._lost(self._call(tensors), failure)
        return result

    def _more(self, tensors: Tensors) -> list[Failure]:
        """Take turns that follow a call that was served. Returns the failures in them."""
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
            pass  # for the copies; the turns then wait for calls of their own
        finally:
            for turn in turns:
                self._turns.dropped(turn)
        return failures

    def _tried(self, turns: deque[Turn], tensors: Tensors) -> list[Failure]:
        """Take the first of these turns. If it fails, drop the same candidate's other turns too."""
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
        """The operands, with copies of those that are overwritten; one operand in two places stays
        one. None: they are too large."""
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
        """Report times that are known by now, in the order of their turns."""
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
        """Made anew each time, because a kept call would keep the first call's tensors."""
        return Call(self._op, tensors, self._options, self._policy)
