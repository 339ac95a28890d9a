"""The rate at which a text was written, and what a token reads: for the log, and for the page,
which shows it on the node."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ..base import notices
from ..base.format import counted
from ..weights.storage import stored

log = logging.getLogger("fusestream")
_is_asked_for = ContextVar("_is_asked_for", default=True)


@dataclass(frozen=True)
class Pace:
    """The times of one text.

    tokens   number written
    first    seconds to the first one, including the prompt
    seconds  for all others
    nbytes   bytes that a token reads: weights, and the keys and values in the middle of the text
    memory   bandwidth of the card's memory in bytes a second; None: not known
    """

    tokens: int
    first: float
    seconds: float
    nbytes: int
    memory: float | None = None

    @property
    def rate(self) -> float:
        """Tokens a second, without the first."""
        return (self.tokens - 1) / self.seconds if self.seconds > 0 else 0.0

    def words(self) -> str:
        said = f"{counted(self.tokens, 'token')}, the first after {self.first:.2f} s"
        if self.tokens < 2 or self.seconds <= 0:
            return said
        read = f"{self.nbytes / 1e9:.2f} GB a token, {self.nbytes * self.rate / 1e9:.0f} GB/s"
        bound = ""
        if self.memory is not None:
            bound = f"; the card's memory has {self.memory / 1e9:.0f} GB/s, {self.memory / self.nbytes:.0f} tokens a second at most"
        return f"{said}, then {self.rate:.1f} a second: {read}{bound}"


def weight_bytes(modules: Iterable[Any]) -> int:
    """Stored bytes of the modules' weights, streamed ones included."""
    return sum(stored(weight).nbytes for module in modules for weight in module.parameters())


def memory_of(device: torch.device) -> float | None:
    """Bytes a second, by the card's memory clock and the width of its bus."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    clock, width = (getattr(found, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2e3 * clock * width / 8 or None  # kHz, two transfers a cycle


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """Keep texts that no user asked for from log and page."""
    token = _is_asked_for.set(False)
    try:
        yield
    finally:
        _is_asked_for.reset(token)


def tell(pace: Pace) -> None:
    """Tell the log, and the node that asked for the text."""
    if _is_asked_for.get():
        words = pace.words()
        log.info("%s", words)
        notices.write(words)
