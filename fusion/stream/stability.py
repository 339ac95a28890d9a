"""Whether a model has come to rest: all blocks have their weights at addresses that stay, and nothing that a call depends on has
changed. Then what was captured of its calls (`graphs/calls.py`) still holds.

The pager knows what it moved itself. The rest is told here: what does not stream moved, other patches, attributes that other nodes
have replaced, other nodes' code that has a part in each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from types import MethodType
from typing import Any, Protocol

from ...gpu.graphed_calls import Settled
from ...memory import Pager


class Captured(Protocol):
    """What was captured of a model's calls, for as long as it is settled: see `graphs/calls.py`."""

    attempts: int  # calls in which it was tried

    @property
    def nbytes(self) -> int: ...

    def release(self, *, waits: bool = True) -> int:
        """Give all of it back; returns the bytes."""

    def words(self) -> str:
        """For the report."""


class Changes:
    """What of a model changed that its pager does not know of."""

    def __init__(self) -> None:
        self._moves = 0
        self._objects = Objects()
        self._disturbances: set[str] = set()  # why it is not settled, whatever the pager says
        self._settled_at: Hashable = None  # the last generation

    def moved(self) -> None:
        """Something of the model lies elsewhere now, or has other numbers."""
        self._moves += 1

    def has_objects(self, objects: Mapping[str, Any]) -> None:
        """Other nodes put these in the place of attributes of the model, by name, until further notice."""
        if self._objects.become(objects):
            self.moved()

    def disturbed(self, why: str, is_so: bool) -> None:
        """Whether another node's code has a part in what the weights or the modules are at each call."""
        self.moved()
        self._disturbances = {*self._disturbances - {why}, *((why,) if is_so else ())}

    def settled(self, pager: Pager, unpatched: Callable[[Pager], str | None]) -> Settled:
        """unpatched: why the weights that the pager has are not all that a product reads; asked once a generation."""
        if self._disturbances:
            return Settled(None, min(self._disturbances))
        standing = pager.standing()
        if standing is None:
            return _not_yet(pager)
        generation = self._moves, standing
        if generation != self._settled_at:
            reason = unpatched(pager)
            if reason is not None:
                return Settled(None, reason)
            self._settled_at = generation
        return Settled(generation)


def _not_yet(pager: Pager) -> Settled:
    if pager.plan.streamed or pager.plan.rare:
        return Settled(None, "part of it streams")
    if pager.is_writable:
        return Settled(None, "its weights are on their way", comes=True)
    return Settled(None, "its weights are in managed memory")


class Objects:
    """What other nodes have put in the place of attributes of a model, by name: the same as the last time, or others?

    None of them is kept alive: some refer to the model.
    """

    def __init__(self) -> None:
        self._marks: dict[str, Any] = {}

    def become(self, objects: Mapping[str, Any]) -> bool:
        """Whether these are others than the last ones."""
        marks = self._marks
        same = marks.keys() == objects.keys() and all(_is_of(marks[name], value) for name, value in objects.items())
        if not same:
            self._marks = {name: _mark(value) for name, value in objects.items()}
        return not same


def _mark(value: Any) -> Any:
    try:
        return weakref.WeakMethod(value) if isinstance(value, MethodType) else weakref.ref(value)
    except TypeError:
        return value  # a number, a word, a list


def _is_of(mark: Any, value: Any) -> bool:
    known = mark() if isinstance(mark, weakref.ref) else mark
    return known is value or (isinstance(value, MethodType | bool | int | float | str) and bool(known == value))
