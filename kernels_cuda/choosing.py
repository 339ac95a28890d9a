"""A plan that is not one candidate's yet: each call is served by the one whose turn it is (turns.py), until one is chosen.

Nothing is computed twice and nothing copied. A candidate that cannot prepare, or whose plan raises, loses its place and the next
one serves the same call: that is sound because a plan that raises has written to nothing that it reads (call.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..gpu.capture import capturing
from .call import Call, Candidate, Plan
from .turns import Turn, Turns


class Lap(Protocol):
    """A time that is known later: see stopwatch.py."""

    host: float
    waited: bool

    def end(self) -> None: ...

    def seconds(self) -> float | None: ...


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

    lap      begins to time work on a device, which waited so long for the host before, if it did
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
        lap: Callable[[torch.device, float | None], Lap],
        elsewhere: Callable[[], str | None],
        served: Callable[[Turn], None],
        lost: Callable[[Call, Failure], None],
        chosen: Callable[[Turns], None],
        settle: Callable[[Plan], None],
    ) -> None:
        self._op, self._options, self._policy, self._device = call.op, call.options, call.policy, call.device
        self._able = {candidate.name: candidate for candidate in able}
        self._turns = turns
        self._lap, self._elsewhere = lap, elsewhere
        self._served, self._lost, self._chosen, self._settle = served, lost, chosen, settle
        self._plans: dict[str, Plan] = {}
        self._pending: deque[tuple[Turn, Lap]] = deque()
        self._waited: dict[str, float] = {}  # seconds that the host was at a candidate, where the device waited for it
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
        for failure in failures:
            self._lost(self._call(tensors), failure)
        return result

    def _serve(self, turn: Turn, tensors: tuple[Tensor | None, ...]) -> Any:
        plan = self._prepared(turn.name, tensors)
        if not turn.is_timed:
            return plan(*tensors)
        lap = self._lap(self._device, self._waited.get(turn.name))
        result = plan(*tensors)
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
