"""A module of ours in another's stead: one that holds what the other holds, not copies of it."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def sharing(made: type[M], source: nn.Module, known: type[nn.Module]) -> M:
    """A `made`, a class over `known`, with the very dictionaries in which source keeps parameters, buffers, parts and hooks: what
    is loaded into one of them, moved or replaced, is so in both. Raises TypeError for another class: nobody knows its forward."""
    if type(source) not in (known, made):
        raise TypeError(f"{made.__name__}.of takes torch's {known.__name__}, not a {type(source).__name__}")
    module = made.__new__(made)
    module.__dict__.update(source.__dict__)
    return module
