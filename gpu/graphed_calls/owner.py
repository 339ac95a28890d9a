"""What captured calls ask of their owner: the model or the network that they run."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch


class Settled(NamedTuple):
    """Whether everything that calls read lies at addresses that stay.

    generation   changes whenever anything of the owner moved, was patched or given back; None: not settled
    why          if not settled: the reason, in words a user understands
    comes        if not settled: whether it is only a matter of time
    """

    generation: Hashable
    why: str = ""
    comes: bool = False


class NotCaptured(Exception):
    """Why a call is not captured. is_for_now: it may be once the owner's memory is another."""

    def __init__(self, reason: str, *, is_for_now: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_for_now = reason, is_for_now


class Owner:
    """Whose calls are captured. A subclass sets `device` and says `settled` and `refused`; the rest has
    defaults for an owner without a budget, whose generation shows every change.

    device   where it computes
    """

    device: torch.device

    def settled(self) -> Settled:
        """Asked before each replay, so it has to be quick."""
        raise NotImplementedError

    def refused(self, reason: str) -> None:
        """A call is not captured, for a reason that somebody who misses speed may want to know."""
        raise NotImplementedError

    def note(self, words: str) -> None:
        """How many graphs there are, or why there are none: for a report."""

    def room(self, nbytes: int) -> bool:  # noqa: ARG002
        """Take so many bytes of the owner's budget, or give them back where they are negative. Returns
        whether they were left."""
        return True

    def watch(self) -> tuple[Container[int], Callable[[], str | None]]:
        """Called before a call that is watched. Returns addresses of memory that outlasts the call, and
        a function to be asked after it: why the next call may depend on this one. Raises NotCaptured if
        no call may be captured."""
        return (), lambda: None

    def standing_still(self) -> AbstractContextManager[bool]:
        """A context in which nothing moves, for a recording. Gives False if the owner is not settled any
        more."""
        return nullcontext(True)

    def before_replay(self) -> None:
        """May raise, to end the work that the call is a part of."""

    def replayed(self) -> None:
        """A graph was launched, even if nobody gets its results."""
