"""Attributes of other modules and classes, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Replace = Callable[[Any, str, Any], None]


@contextmanager
def replacing() -> Iterator[Replace]:
    """What replaces an attribute until the end."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        yield replace


def constructed_with(replace: Replace, kind: Any, **sizes: Any) -> None:
    """Constructors of this class get these keyword arguments, whatever else they are given.

    The class stays: who first imports it meanwhile derives from it.
    """
    stock = kind.__init__
    replace(kind, "__init__", lambda self, *args, **options: stock(self, *args, **(options | sizes)))
