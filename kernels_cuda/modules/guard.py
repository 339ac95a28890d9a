"""Whether a network is still what it was when a call of it was captured.

A graph runs no Python, and it reads weights at the addresses that they had. So whatever decides what a network computes is noted,
and looked at before each replay: its modules, their hooks and attributes, where each parameter and buffer lies and how often it was
written to, and what our modules made of their weights. To compare it takes about as long as to ask for ten kernels.

Parameters and buffers are not kept alive by that: who moves them to make room gets it. Attributes are.
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

TENSORS = ("_parameters", "_buffers")  # of a module's own, looked at by themselves
LOOKED_AT = (*TENSORS, "_modules", "_forward_hooks", "_forward_pre_hooks")  # even where there is nothing in them
COMPUTES, STEPS = "_fused", "_steps"  # where a place (slots.py) has what computes in its stead


class Standing:
    """Of one network, which is not kept alive. beside: the name of an attribute that is no part of it: where this is kept."""

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
        # Or another storage could have the name of one that is gone.
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in found if t is not None]  # type: ignore[no-untyped-call]
        self._kept = [(kept, kept.turns) for module in modules for kept in _made_of_weights(module)]

    def holds(self, net: nn.Module) -> bool:
        """Whether all of it is as it was."""
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
    """Why no call of a network is captured as it stands, in words a user understands."""
    for module in net.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return "a part of it is compiled by torch.jit, and does not tell what it computes with"
        if module.training:
            return "a part of it is in training mode"
        # What a network's own hooks do happens around its forward, as ever.
        if module is not net and (module._forward_hooks or module._forward_pre_hooks):
            return "a part of it has hooks, which a graph would not call"
        if module is not net and "forward" in module.__dict__:
            return "the forward of a part of it was replaced"
    return None


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _dictionaries(module: Any) -> Iterator[dict[Any, Any]]:
    """Of a module: parts, hooks and what its own dictionaries hold. Of those for tensors the empty ones, the others are marked."""
    for name, value in module.__dict__.items():
        if isinstance(value, dict) and (name not in TENSORS or not value) and (value or name in LOOKED_AT):
            yield value


def _made_of_weights(module: Any) -> Iterator[Kept[Any]]:
    """What our modules made of weights, of a module or of what stands in its place without being a part."""
    own = module.__dict__
    steps = own.get(STEPS)
    within = [step.fused for step in steps if isinstance(step, Step)] if isinstance(steps, tuple) else []
    for one in (module, own.get(COMPUTES), *within):
        kept = one.__dict__.get("_kept") if isinstance(one, nn.Module) else None
        if isinstance(kept, Kept):
            yield kept
