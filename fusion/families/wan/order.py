"""The order in which Wan's blocks run. The blocks of VACE's side branch run after those of the main
branch that they feed."""

from __future__ import annotations

from typing import Any

from torch import nn


def in_order(net: Any) -> list[tuple[str, nn.Module]]:
    """The blocks of stock's WanModel with their names in it."""
    found: list[tuple[str, nn.Module]] = []
    side = getattr(net, "vace_blocks", None) or ()
    # Block of the main branch -> block of the side branch that follows it.
    after = getattr(net, "vace_layers_mapping", None) or {}
    for i, module in enumerate(net.blocks):
        found.append((f"blocks.{i}", module))
        if i in after:
            found.append((f"vace_blocks.{after[i]}", side[after[i]]))
    return found
