"""How long a graph is looked at: whoever can reach the server may send one of any size and shape.

Walks over a graph ask at each node whether to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OutOfTime(Exception):
    """The graph takes longer than it may, or nobody waits for the answer any more."""


class TimeLimit:
    """Called at each node; raises `OutOfTime`.

    seconds  of looking at the graph, without what is `aside`
    is_over  whether nobody waits any more
    """

    def __init__(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        self._seconds, self._is_over = seconds, is_over
        self._began = time.monotonic()
        self._end = self._until = self._began + seconds

    def __call__(self) -> None:
        if time.monotonic() > self._until or self._is_over():
            raise OutOfTime

    def share(self, parts: int) -> None:
        """Begin the first of so many parts: each has as much of what is left, and what the others
        leave."""
        now = time.monotonic()
        self._until = now + (self._end - now) / parts

    @property
    def is_late(self) -> bool:
        """Whether all of it has taken so long that nothing further should be begun that is `aside`."""
        return time.monotonic() - self._began > self._seconds

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work that has nothing to do with the graph's size, such as the reading of a file."""
        began = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - began
            self._end += spent
            self._until += spent


def endless() -> None:
    """For a graph that was queued: it is looked at to the end."""
