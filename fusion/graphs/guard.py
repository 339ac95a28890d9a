"""Whether a network is still what it was when a call was captured: the addresses of tensors that do
not stream, and what its modules keep.

A graph reads weights at their old addresses and runs no Python. So code that replaces a weight's
tensor, or keeps something from one call for the next, must be noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from ...gpu.call_key import is_plain
from ..weights import scales
from ..weights.storage import is_quantised, stored

Place = tuple[dict[str, Any], str]
Kept = list[dict[str, Any]]
PLAIN_TENSORS = frozenset((Tensor, nn.Parameter))  # classes whose own memory holds their numbers


class Unchanged:
    """One network, not kept alive. It is looked at between calls, when streamed weights are on the
    meta device."""

    def __init__(self, net: nn.Module) -> None:
        self._net = weakref.ref(net)
        self._held: list[dict[str, Any]] = []  # dictionaries that hold plain tensors
        self._names: list[str] = []
        self._quantised: list[Place] = []

    def look_up(self) -> None:
        """Find the parameters and buffers anew, because they may be in other modules than
        before."""
        found = [
            (held, name, stored(tensor) is tensor)
            for module in self._modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None and not stored(tensor).is_meta
        ]
        self._held = [held for held, _, is_plain in found if is_plain]
        self._names = [name for _, name, is_plain in found if is_plain]
        self._quantised = [(held, name) for held, name, is_plain in found if not is_plain]

    def addresses(self) -> tuple[Hashable, ...]:
        """Addresses of the tensors that do not stream, in the places found; of a quantised one
        those of its scales, too. A replay waits for this, so it uses `map` without a Python step
        for each."""
        plain: list[Any] = [*map(dict.get, self._held, self._names)]
        if not PLAIN_TENSORS.issuperset(map(type, plain)):
            return tuple(map(_address, plain)) + self._others()
        return (*map(Tensor.data_ptr, plain), *self._others())

    def _others(self) -> tuple[Hashable, ...]:
        return tuple(_address(held.get(name)) for held, name in self._quantised)

    def kept(self) -> Kept:
        """Everything that each module keeps, with the contents of its lists and dictionaries. Most
        are empty, and nothing is made for these, or Python's collector would look through all of
        ComfyUI meanwhile."""
        return [{name: _content(value) for name, value in module.__dict__.items()} for module in self._modules()]

    def _modules(self) -> Iterator[Any]:
        net = self._net()
        return iter(()) if net is None else iter(net.modules())


def _address(tensor: Any) -> Hashable:
    if tensor is None or not is_quantised(tensor):
        return None if tensor is None else tensor.data_ptr()
    return stored(tensor).data_ptr(), *(scale.data_ptr() for _, scale in scales.tensors(tensor._params))


def lasting(kept: Kept) -> frozenset[int]:
    """Addresses of the memory behind what modules keep: parameters and buffers that do not stream,
    and other tensors."""
    values = (value for own in kept for content in own.values() for value in _each(content))
    return frozenset(value.untyped_storage().data_ptr() for value in values if type(value) in PLAIN_TENSORS) - {0}


def _each(content: Any) -> tuple[Any, ...]:
    return content if type(content) is tuple else (content,)


def difference(before: Kept, after: Kept) -> str | None:
    """The name of something that a module keeps and did not keep before, or the other way round;
    None: no difference."""
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
    return one is other or (is_plain(type(one)) and bool(one == other))


def own_values(net: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Plain values of the network itself, which are read at each call."""
    return tuple([(name, value) for name, value in net.__dict__.items() if is_plain(type(value))])


class Methods:
    """Whether the methods of a network and of all modules within it are those of their classes.
    Looks anew only if some module keeps more or fewer things than before."""

    def __init__(self, net: nn.Module) -> None:
        """The network itself is not stored, because that would keep both alive."""
        self._modules = [(name, part.__dict__, type(part)) for name, part in net.named_modules() if part is not net]
        self._owns = [own for _, own, _ in self._modules]
        self._sizes, self._found = list[int](), ""
        self._at_first = frozenset(self._shadowed(net))

    def replaced(self, net: nn.Module) -> str | None:
        """The name of a method that was replaced since the beginning; None: none was."""
        sizes = [len(net.__dict__), *map(len, self._owns)]
        if sizes != self._sizes:
            self._sizes = sizes
            self._found = next((name for name in self._shadowed(net) if name not in self._at_first), "")
        return self._found or None

    def _shadowed(self, net: nn.Module) -> Iterator[str]:
        for module, own, kind in (("", net.__dict__, type(net)), *self._modules):
            for name, value in own.items():
                if callable(value) and hasattr(kind, name):
                    yield f"{module}.{name}".lstrip(".")


def _content(value: Any) -> Any:
    """A container with its contents, nothing for an empty one, else the value itself. A tensor
    written to in place needs no more, because a graph writes to it too."""
    if isinstance(value, Mapping):
        return (value, *value.keys(), *value.values()) if value else ()
    if isinstance(value, list | tuple | set | frozenset):
        return (value, *value) if value else ()
    return value
