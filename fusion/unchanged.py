"""Whether a network is still what it was when a call of it was captured: where lies what does not stream, what its modules keep.

A graph reads weights at the addresses that they had, and runs no Python. So whoever puts another tensor in a weight's place, or
keeps something from one call for the next, must be seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torch import nn

from .arguments import PLAIN
from .stream.blocks import stored

Place = tuple[dict[str, Any], str]
Kept = list[dict[str, Any]]


class Unchanged:
    """Of one network, which it does not keep alive. What streams is on the meta device whenever this looks: between two calls."""

    def __init__(self, net: nn.Module) -> None:
        self._net = weakref.ref(net)
        self._places: list[Place] = []

    def look_up(self) -> None:
        """Parameters and buffers may be in other modules than before."""
        self._places = [
            (held, name)
            for module in self._modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None and not stored(tensor).is_meta
        ]

    def addresses(self) -> tuple[int | None, ...]:
        """Of what does not stream, in the places that were looked up."""
        found = (held.get(name) for held, name in self._places)
        return tuple(None if tensor is None else stored(tensor).data_ptr() for tensor in found)

    def kept(self) -> Kept:
        """What each module keeps, and what is in its lists and dictionaries. Most of a module's are empty: of these nothing is
        made, or Python's collector would look through all of ComfyUI meanwhile."""
        return [{name: _content(value) for name, value in module.__dict__.items()} for module in self._modules()]

    def _modules(self) -> Iterator[Any]:
        net = self._net()
        return iter(()) if net is None else iter(net.modules())


def difference(before: Kept, after: Kept) -> str | None:
    """The name of something that a module keeps and did not before, or keeps no more."""
    nothing: dict[str, Any] = {}
    for had, has in zip_longest(before, after, fillvalue=nothing):
        for name in (*has, *had):
            if name not in had or name not in has or not _is_same(had[name], has[name]):
                return name
    return None


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_is_same_thing, one, other))
    return _is_same_thing(one, other)


def _is_same_thing(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and bool(one == other))


def own_values(net: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Plain values of a network's own, which are read at each call."""
    return tuple((name, value) for name, value in net.__dict__.items() if isinstance(value, PLAIN))


class Methods:
    """Whether methods of a network and of all within it are their classes'. Looked for only where some module keeps more or fewer
    things than before."""

    def __init__(self, net: nn.Module) -> None:
        """The network itself is not kept, which would keep both alive."""
        self._modules = [(name, part.__dict__, type(part)) for name, part in net.named_modules() if part is not net]
        self._size, self._found = 0, ""
        self._at_first = frozenset(self._shadowed(net))

    def replaced(self, net: nn.Module) -> str | None:
        """What somebody has put another one in the place of."""
        size = len(net.__dict__) + sum(len(own) for _, own, _ in self._modules)
        if size != self._size:
            self._size = size
            self._found = next((name for name in self._shadowed(net) if name not in self._at_first), "")
        return self._found or None

    def _shadowed(self, net: nn.Module) -> Iterator[str]:
        for module, own, kind in (("", net.__dict__, type(net)), *self._modules):
            for name, value in own.items():
                if callable(value) and hasattr(kind, name):
                    yield f"{module}.{name}".lstrip(".")


def _content(value: Any) -> Any:
    """What is in it, and itself; of what is empty nothing; else it alone. A tensor that is written to in place is written to by a
    graph, too."""
    if isinstance(value, Mapping):
        return (value, *value.keys(), *value.values()) if value else ()
    if isinstance(value, list | tuple | set | frozenset):
        return (value, *value) if value else ()
    return value
