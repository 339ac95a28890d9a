"""`auto`: the fastest candidate for one (op, shape class, card, driver, code), found once and
remembered.

The candidates take turns at calls that are made anyway (selection.py, rounds.py), so choosing costs
hardly anything. Stock's own computation is among them, so an op in `auto` is never slower than
stock once it has chosen. Stock is left out only if it would make large copies and another candidate
can serve (registry.py).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...gpu import driver
from .. import device_code
from ..build import matrix
from ..call import (
    Call,
    Candidate,
    Plan,
    Tunable,
)
from ..ledger import LEDGER, Choice
from .event_timer import Lap, Sweeper
from .nearest_shape import key, nearest
from .rounds import Turn, Turns
from .selection import Choosing, Failure
from .time_budget import EXTRA, Purse
from .winners import Winner, WinnersFile

FILE = "kernel-winners.json"
CHOOSING = "still being chosen, at the calls that are made anyway"
CHOSEN = "chosen"


def card_key(call: Call) -> str:
    """The conditions other than the shape that a time depends on."""
    properties = torch.cuda.get_device_properties(call.device)
    return (
        f"{properties.name}|{properties.multi_processor_count}|driver {driver().version}|torch {torch.__version__}|"
        f"{call.policy.isa or ''}|{matrix.source_hash()}"
    )


class Tuner:
    """The choices that this process has made and is making.

    undecided  calls that were served, or recorded, before a candidate was chosen: later results may
               have other last bits
    trials     those of them that the best so far did not serve: they may have taken more memory
    """

    def __init__(
        self,
        file: WinnersFile,
        lap: Callable[[torch.device, float | None], Any] = Lap,
        card_key: Callable[[Call], str] = card_key,
        purse: Purse | None = None,
        sweep: Callable[[torch.device], Any] = Sweeper,
    ) -> None:
        self._file = file
        self._lap, self._sweep = lap, sweep
        self._card_key = card_key
        self._lock = threading.Lock()
        # bytes of the smallest call at which a candidate ran out of memory
        self._too_large: dict[tuple[str, str], int] = {}
        self.purse, self.extra = purse or Purse(), Purse(EXTRA)
        self.undecided = self.trials = 0

    def plan(
        self, op: Tunable, call: Call, able: Sequence[Candidate], settle: Callable[[Plan], None]
    ) -> tuple[Plan, str]:
        """The winner's plan, if it is known; else a plan that chooses while it serves, and hands
        the winner's plan to `settle`. With it the candidate's name, or words for a choice."""
        shape, card = op.shape_class(call), self._card_key(call)
        here = key(op.name, shape, card)
        known = self._known(here, able)
        if known is None:
            able = self._those_that_fit(call, able)
            known = self._known(here, able)
        if known is None and len(able) > 1:
            return self._choose(op, shape, card, call, able, settle), "what is chosen"
        name = able[0].name if known is None else known.name
        seconds = {} if known is None else dict(known.seconds)
        LEDGER.chose(Choice(op.name, shape, name, "no other has the memory" if known is None else CHOSEN, seconds))
        return next(candidate for candidate in able if candidate.name == name).prepare(call), name

    def _known(self, here: str, able: Sequence[Candidate]) -> Winner | None:
        """The winner among at least these candidates, if one is kept."""
        return _fitting(self._file.get(here), able)

    def _those_that_fit(self, call: Call, able: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates without those that ran out of memory at a call no larger than this,
        because a failure costs time."""
        nbytes = _bytes(call)
        fit = [one for one in able if nbytes < self._too_large.get((call.op, one.name), nbytes + 1)]
        return fit or able

    def _choose(
        self,
        op: Tunable,
        shape: str,
        card: str,
        call: Call,
        able: Sequence[Candidate],
        settle: Callable[[Plan], None],
    ) -> Plan:
        near = nearest(op.name, shape, card, self._file.entries)
        ratios = _ratios(near)
        order = sorted(able, key=lambda candidate: ratios.get(candidate.name, math.inf)) if near else able
        ours = frozenset(candidate.name for candidate in able if candidate.ours)
        late = {candidate.name: begun for candidate in able if (begun := candidate.begin(call)) is not None}
        turns = Turns([candidate.name for candidate in order], ours, self.purse, ratios, late, self.extra)
        LEDGER.chose(Choice(op.name, shape, turns.best, CHOOSING))
        here = key(op.name, shape, card)

        def elsewhere() -> str | None:
            found = _fitting(self._file.at_hand(here), able)
            return None if found is None else found.name

        return Choosing(
            call,
            order,
            turns,
            writes=op.writes,
            lap=self._lap,
            sweep=self._sweep,
            elsewhere=elsewhere,
            served=self._count,
            lost=self._note_failure,
            chosen=partial(self._keep, op.name, shape, here),
            settle=settle,
        )

    def _count(self, turn: Turn) -> None:
        self.undecided += 1
        self.trials += turn.is_trial

    def _note_failure(self, call: Call, failure: Failure) -> None:
        LEDGER.say_once(f"{call.op}: {failure.name} failed while kernels were being chosen: {failure.words}")
        if failure.ran_out:
            at, nbytes = (call.op, failure.name), _bytes(call)
            with self._lock:
                self._too_large[at] = min(nbytes, self._too_large.get(at, nbytes))

    def _keep(self, op: str, shape: str, here: str, turns: Turns) -> None:
        winner = Winner(turns.best, turns.seconds)
        LEDGER.chose(Choice(op, shape, winner.name, CHOSEN, dict(winner.seconds)))
        # running out of memory today is not a property of a candidate
        if all(math.isfinite(s) for s in winner.seconds.values()):
            with self._lock:
                self._file.put(here, winner)


def _fitting(known: Winner | None, able: Sequence[Candidate]) -> Winner | None:
    names = {candidate.name for candidate in able}
    return known if known is not None and known.name in names and names <= known.seconds.keys() else None


def _ratios(near: Winner | None) -> dict[str, float]:
    """Time of each candidate at another size, as a multiple of the winner's there."""
    least = 0.0 if near is None else near.seconds.get(near.name, 0.0)
    return {} if near is None or least <= 0 else {name: s / least for name, s in near.seconds.items()}


def _bytes(call: Call) -> int:
    return sum(t.numel() * t.element_size() for t in call.present)


_tuner: Tuner | None = None
_tuner_lock = threading.Lock()


def tuner() -> Tuner:
    global _tuner  # noqa: PLW0603 - knowledge of this machine, not a toggle
    with _tuner_lock:
        if _tuner is None:
            _tuner = Tuner(WinnersFile(device_code.cache_folder() / FILE))
        return _tuner
