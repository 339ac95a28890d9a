"""What a piece of work costs, whatever computes it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Operations in matrix products (or convolutions) and in attention, and bytes of weights in blocks."""

    gemm: float
    attention: float
    weights: float = 0.0
