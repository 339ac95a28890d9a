"""What the kernel system decided and why: refusals and winners, for the log (once each) and the report (always)."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

log = logging.getLogger("fusestream.kernels")


@dataclass
class Refusal:
    """A candidate that could not serve. `example` is the first input that met this reason."""

    op: str
    candidate: str
    reason: str
    example: str
    served_by: str = ""
    times: int = 1


@dataclass
class Choice:
    """The candidate kept for one (op, shape class). `seconds` is empty where nothing had to be measured."""

    op: str
    shape: str
    winner: str
    why: str
    seconds: dict[str, float] = field(default_factory=dict)


class Ledger:
    """A record of reasons. Written only when an op meets a new signature, never on the hot path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refusals: dict[tuple[str, str, str], Refusal] = {}
        self._choices: dict[tuple[str, str], Choice] = {}
        self._said: set[str] = set()

    def refused(self, op: str, candidate: str, reason: str, example: str, served_by: str) -> None:
        with self._lock:
            known = self._refusals.get((op, candidate, reason))
            if known is not None:
                known.times += 1
                return
            self._refusals[op, candidate, reason] = Refusal(op, candidate, reason, example, served_by)
        log.info("%s: %s cannot serve %s: %s. %s serves it.", op, candidate, example, reason, served_by or "nothing")

    def knows(self, op: str, candidate: str, reason: str) -> bool:
        """Whether this refusal was told. Takes no lock: for hot paths, which tell a thing once."""
        return (op, candidate, reason) in self._refusals

    def chose(self, choice: Choice) -> None:
        with self._lock:
            self._choices[choice.op, choice.shape] = choice

    def say_once(self, message: str, level: int = logging.WARNING) -> None:
        """Log a message about the system itself, the first time it is said."""
        with self._lock:
            if message in self._said:
                return
            self._said.add(message)
        log.log(level, "%s", message)

    @property
    def refusals(self) -> list[Refusal]:
        with self._lock:
            return list(self._refusals.values())

    @property
    def choices(self) -> list[Choice]:
        with self._lock:
            return list(self._choices.values())

    @property
    def messages(self) -> list[str]:
        with self._lock:
            return sorted(self._said)

    def clear(self) -> None:
        with self._lock:
            self._refusals.clear()
            self._choices.clear()
            self._said.clear()


LEDGER = Ledger()
