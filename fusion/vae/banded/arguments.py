"""The tensors among an operation's arguments. torch's own trees know any container; here there are
lists and tuples, thousands of times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among these, also within lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The same with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(change, each) for each in value)
    if isinstance(value, dict):
        return {name: mapped(change, each) for name, each in value.items()}
    return value


def on_meta(value: Tensor) -> Tensor:
    """The tensor without its numbers."""
    return value if value.is_meta else value.to("meta")
