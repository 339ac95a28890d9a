"""In which order Wan's blocks run: VACE has a side branch, whose blocks run behind those of the main one that they feed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def in_order(net: Any) -> list[tuple[str, Any]]:
    """The blocks of stock's WanModel by their names in it."""
    return list(_in_order(net))


def _in_order(net: Any) -> Iterator[tuple[str, nn.Module]]:
    side = getattr(net, "vace_blocks", None) or ()
    after = getattr(net, "vace_layers_mapping", None) or {}  # main block -> block of the side branch that follows it
    for i, module in enumerate(net.blocks):
        yield f"blocks.{i}", module
        if i in after:
            yield f"vace_blocks.{after[i]}", side[after[i]]
