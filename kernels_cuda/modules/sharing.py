"""Makes a module of ours that shares another's parameters and parts in place of copies."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def sharing(made: type[M], source: nn.Module, known: type[nn.Module]) -> M:
    """A `made`, a class over `known`, with the same dictionaries in which source keeps parameters,
    buffers, parts and hooks: loading into one, moving or replacing acts on both. Raises TypeError
    for another class, because its forward is not known."""
    if type(source) not in (known, made):
        raise TypeError(f"{made.__name__}.of takes torch's {known.__name__}, not a {type(source).__name__}")
    module = made.__new__(made)
    module.__dict__.update(source.__dict__)
    return module
