"""The interface between captured calls and their owner: the model or the network that they run."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch


class Settled(NamedTuple):
    """Whether everything that calls read lies at addresses that stay.

    generation   changes whenever anything of the owner moved, was patched or given back;
                 None: not settled
    why          if not settled: the reason, in words for a user
    comes        if not settled: whether it will become so without a change by the user
    """

    generation: Hashable
    why: str = ""
    comes: bool = False


class NotCaptured(Exception):
    """Why a call is not captured. is_for_now: it may be captured once the owner's memory
    changes."""

    def __init__(self, reason: str, *, is_for_now: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_for_now = reason, is_for_now


class Owner:
    """An owner of captured calls. A subclass sets `device` and defines `settled` and `refused`. The
    rest has defaults for an owner without a budget, whose generation shows every change.

    device: where it computes.
    """

    device: torch.device

    def settled(self) -> Settled:
        """Whether the owner is settled. Asked before each replay, so it must be quick."""
        raise NotImplementedError

    def refused(self, reason: str) -> None:
        """A call is not captured, for a reason that a user who misses speed may want to know."""
        raise NotImplementedError

    def note(self, words: str) -> None:
        """Note the number of graphs, or why there are none, for a report."""

    def room(self, nbytes: int) -> bool:  # noqa: ARG002
        """Take bytes of the owner's budget or, if negative, give them back. Returns whether they
        were left."""
        return True

    def watch(self) -> tuple[Container[int], Callable[[], str | None]]:
        """Called before a call that is watched. Returns addresses of memory that outlasts the call,
        and a function that tells after it why the next call may depend on this one. Raises
        NotCaptured if no call may be captured."""
        return (), lambda: None

    def standing_still(self) -> AbstractContextManager[bool]:
        """A context for a recording, in which nothing moves. Gives False if the owner is not
        settled any more."""
        return nullcontext(True)

    def before_replay(self) -> None:
        """Called before a replay. May raise, to end the work that the call is a part of."""

    def replayed(self) -> None:
        """Called when a graph was launched, even if its results are dropped."""
