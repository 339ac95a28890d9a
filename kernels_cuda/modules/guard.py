"""Whether a network is still what it was when a call of it was captured.

A graph runs no Python, and reads weights at their old addresses. So everything that decides what a
network computes is noted, and compared before each replay: its modules, their hooks and attributes,
the address of each parameter and buffer and the number of writes to it, and what our modules made
of their weights. The comparison takes about as long as launching ten kernels.

Parameters and buffers are not kept alive by it, so that moving them frees their memory. Attributes
are kept alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .derived_weights import Kept, marks_of
from .slots import Step

TENSORS = ("_parameters", "_buffers")  # of each module, compared by themselves
LOOKED_AT = (*TENSORS, "_modules", "_forward_hooks", "_forward_pre_hooks")  # compared even if empty
# attributes of a place (slots.py) that hold what computes for it
COMPUTES, STEPS = "_fused", "_steps"


class Standing:
    """The state of one network, which is not kept alive. beside: the name of the attribute that
    this is kept in, which is left out."""

    def __init__(self, net: nn.Module, beside: str) -> None:
        modules: list[Any] = list(net.modules())
        self._beside = beside
        self._values = self._own(net)
        inner = [(d, tuple(d.values())) for module in modules[1:] for d in (module.__dict__,)]
        self._rows = inner + [(d, tuple(d.values())) for module in modules for d in _dictionaries(module)]
        self._lists = [(one, tuple(one)) for module in modules for one in module.__dict__.values() if type(one) is list]
        self._tensors = [held for module in modules for name in TENSORS if (held := module.__dict__.get(name))]
        found = self._found()
        self._marks = marks_of(found)
        # Otherwise a new storage could have the name of one that is gone.
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in found if t is not None]  # type: ignore[no-untyped-call]
        self._kept = [(kept, kept.turns) for module in modules for kept in _made_of_weights(module)]

    def holds(self, net: nn.Module) -> bool:
        """Whether the network is as it was."""
        if not _same(self._own(net), self._values):
            return False
        for d, values in self._rows:
            if len(d) != len(values) or not all(map(is_, d.values(), values)):
                return False
        if any(kept.turns != turns for kept, turns in self._kept):
            return False
        return all(_same(tuple(one), items) for one, items in self._lists) and marks_of(self._found()) == self._marks

    def _own(self, net: nn.Module) -> tuple[Any, ...]:
        return tuple(value for name, value in net.__dict__.items() if name != self._beside)

    def _found(self) -> list[Tensor | None]:
        return [t for held in self._tensors for t in held.values()]


def unfit(net: nn.Module) -> str | None:
    """Why no call of a network can be captured in its present state, in words for a user; None if
    one can."""
    for module in net.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return "a part of it is compiled by torch.jit, and does not tell what it computes with"
        if module.training:
            return "a part of it is in training mode"
        # The network's own hooks run around its forward, as ever.
        if module is not net and (module._forward_hooks or module._forward_pre_hooks):
            return "a part of it has hooks, which a graph would not call"
        if module is not net and "forward" in module.__dict__:
            return "the forward of a part of it was replaced"
    return None


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _dictionaries(module: Any) -> Iterator[dict[Any, Any]]:
    """A module's dictionaries: its parts, its hooks, and its other attributes that are
    dictionaries. Dictionaries of tensors are among them only if empty, because the tensors in the
    others are compared by their marks."""
    for name, value in module.__dict__.items():
        if isinstance(value, dict) and (name not in TENSORS or not value) and (value or name in LOOKED_AT):
            yield value


def _made_of_weights(module: Any) -> Iterator[Kept[Any]]:
    """Values made of weights by a module of ours, or by one that computes in a place without being
    a child."""
    own = module.__dict__
    steps = own.get(STEPS)
    within = [step.fused for step in steps if isinstance(step, Step)] if isinstance(steps, tuple) else []
    for one in (module, own.get(COMPUTES), *within):
        kept = one.__dict__.get("_kept") if isinstance(one, nn.Module) else None
        if isinstance(kept, Kept):
            yield kept
