"""Finds blocks of a network that stock built unlike any specimen: with a switch that no specimen
has, or another child.

ComfyUI's networks grow in this way: a constructor gets a keyword that is off, a forward gets a
branch for it, and a new model turns it on. The specimens have it off, and agree. So each fused
block's switches (attributes that are true, false, a word or None) and its children's names are
compared with those of the specimens. A block with others is left to stock.
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
# Prefixes of attributes that torch, stock's loader and we add.
NOT_OF_THE_CLASS = ("_", "fusestream", "comfy_", "training")


class Known:
    """Switch values and children's names of stock's classes, in all specimens of a family."""

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
        """A switch or child of a block, or of a module in it, that no specimen has, in words for a
        user; None: there is none."""
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


_known: dict[str, tuple[str, Known]] = {}  # by family, with the fingerprint of its specimens' code


def known_of(family: Family) -> Known:
    """The family's `Known`, made anew when stock's code changes."""
    specimens = family.specimens() if family.specimens is not None else ()
    code = fingerprint(thing for specimen in specimens for thing in specimen.code)
    before = _known.get(family.name)
    if before is None or before[0] != code:
        before = _known[family.name] = code, Known(family)
    return before[1]


def leave_unknown(family: Family, net: nn.Module) -> int:
    """Leave fused blocks to stock for good if no specimen is like them. Returns their number."""
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
    """Name of the stock class of a module, fused or not; None for torch's own classes and stock's
    operations."""
    kind = type(module)
    is_stocks = kind.__module__.startswith("comfy.") and not kind.__module__.startswith("comfy.ops")
    return kind.__qualname__ if is_stocks else None


def _switches_of(module: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if isinstance(value, SWITCHES) and not name.startswith(NOT_OF_THE_CLASS):
            yield name, value
