"""What other nodes have put in the place of attributes of a model (stock's object patches): the same as before, or others?"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MethodType
from typing import Any


class Objects:
    """The last ones, by name. None of them is kept alive: some refer to the model."""

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
