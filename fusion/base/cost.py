"""What one forward of a network costs, whatever computes it. Standard library only: the bench reads it beside no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Of one prompt.

    gemm, attention   operations in matrix products (or convolutions), and in attention
    weights           bytes of the blocks' weights in FP16
    own               of attention's operations, those of the latent's tokens among themselves; the rest look at the prompt
    elements, hidden  elements of x that pass through blocks, each counted once a block, and of the feed-forward's hidden values
    width             of x
    """

    gemm: float
    attention: float
    weights: float = 0.0
    own: float = 0.0
    elements: float = 0.0
    hidden: float = 0.0
    width: int = 0
