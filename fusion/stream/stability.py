"""Whether a model is settled: all blocks have their weights at addresses that stay, and nothing has
changed that a call depends on. CUDA graphs of its calls hold as long as it is.

The pager knows what it moved itself. Everything else is told here: moves of weights that do not
stream, other patches, attributes that other nodes replaced, code of other nodes that takes part in
each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from types import MethodType
from typing import Any, Protocol

from ...gpu.graphed_calls import Settled
from ...memory import Pager


class Captured(Protocol):
    """The CUDA graphs of a model's calls."""

    attempts: int  # calls in which it was tried

    @property
    def nbytes(self) -> int: ...

    def release(self, *, waits: bool = True) -> int:
        """Give all of it back; returns the bytes."""

    def words(self) -> str:
        """For the report."""


class Changes:
    """Changes of a model that its pager does not know of."""

    def __init__(self) -> None:
        self._moves = 0
        self._objects = Objects()
        self._disturbances: set[str] = set()  # why it is not settled, whatever the pager says
        self._settled_at: Hashable = None  # the last generation

    def moved(self) -> None:
        """Some tensor of the model has another address or other numbers now."""
        self._moves += 1

    def has_objects(self, objects: Mapping[str, Any]) -> None:
        """These objects of other nodes stand in the place of the model's attributes, by name, until
        the next call."""
        if self._objects.become(objects):
            self.moved()

    def disturbed(self, why: str, is_so: bool) -> None:
        """Another node's code takes part in each call (is_so), or does not any more. why: the
        reason to tell a user."""
        self.moved()
        self._disturbances = {*self._disturbances - {why}, *((why,) if is_so else ())}

    def settled(self, pager: Pager, unpatched: Callable[[Pager], str | None]) -> Settled:
        """unpatched: why products read more than the weights in the pager; asked once a generation."""
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
    """Objects that other nodes put in the place of a model's attributes, by name. They are not kept
    alive, because some refer to the model."""

    def __init__(self) -> None:
        self._marks: dict[str, Any] = {}

    def become(self, objects: Mapping[str, Any]) -> bool:
        """Remember these objects. Returns whether they differ from the last ones."""
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
