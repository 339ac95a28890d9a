"""Blocks of a network that stock built otherwise than any that was tried: with a switch that no specimen has on, or another child.

So ComfyUI's networks grow: a constructor gets a keyword that is off, a forward a branch for it, and a new model turns it on. In the
specimens it is off, and they agree. So each fused block's switches (what it keeps that is true, false, a word or nothing) and the
names of its children are held against those of the specimens, and a block with others is stock's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import comfy.ops
import torch
from torch import nn

from ..base.family import Family
from ..base.hooks import BLOCK_PARTS
from ..base.specimen import SEED, Draw
from .source import fingerprint

META = torch.device("meta")
SWITCHES = (bool, str, type(None))
# How names begin of what torch, stock's loader and we keep there.
NOT_OF_THE_CLASS = ("_", "fusestream", "comfy_", "training")


class Known:
    """What modules of stock's classes have, in all specimens of a family: values of each switch, names of children."""

    def __init__(self, family: Family) -> None:
        self._switches: dict[tuple[str, str], set[Any]] = defaultdict(set)
        self._children: dict[str, set[str]] = defaultdict(set)
        for specimen in family.specimens() if family.specimens is not None else ():
            draw = Draw(META, torch.float16, comfy.ops.manual_cast, torch.Generator().manual_seed(SEED))
            with torch.device(META):
                for module in specimen.build(draw).modules():
                    if (kind := _kind_of(module)) is not None:
                        self._children[kind].update(module._modules)
                        for name, value in _switches_of(module):
                            self._switches[kind, name].add(value)

    def difference(self, block: nn.Module) -> str | None:
        """What no specimen has of a block, or of what is in it, in words that a user understands."""
        for module in block.modules():
            kind = _kind_of(module)
            if kind not in self._children:
                continue
            more = sorted(module._modules.keys() - self._children[kind])
            if more:
                return f"this ComfyUI builds its {kind} with {', '.join(more)}, which FuseStream does not know"
            for name, value in _switches_of(module):
                if value not in self._switches[kind, name]:
                    return f"this ComfyUI builds its {kind} with {name}={value!r}, which FuseStream does not know"
        return None


_known: dict[str, tuple[str, Known]] = {}  # by family, with the code that its specimens were built by


def known_of(family: Family) -> Known:
    """The same, for as long as stock's code is."""
    specimens = family.specimens() if family.specimens is not None else ()
    code = fingerprint(thing for specimen in specimens for thing in specimen.code)
    before = _known.get(family.name)
    if before is None or before[0] != code:
        before = _known[family.name] = code, Known(family)
    return before[1]


def leave_unknown(family: Family, net: nn.Module) -> int:
    """Fused blocks of a network that no specimen is like become stock's for good. Returns how many those are."""
    known: Known | None = None
    left = 0
    for block in net.modules():
        parts = block.__dict__.get(BLOCK_PARTS)
        if parts is not None and not parts.is_stocks:
            known = known or known_of(family)
            reason = known.difference(block)
            if reason is not None:
                parts.leave_to_stock(reason)
                left += 1
    return left


def _kind_of(module: nn.Module) -> str | None:
    """The name of stock's class of a module, fused or not; None: it is torch's own, or one of stock's operations."""
    kind = type(module)
    is_stocks = kind.__module__.startswith("comfy.") and not kind.__module__.startswith("comfy.ops")
    return kind.__qualname__ if is_stocks else None


def _switches_of(module: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if isinstance(value, SWITCHES) and not name.startswith(NOT_OF_THE_CLASS):
            yield name, value
