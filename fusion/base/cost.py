"""The cost of one forward of a network, independent of who computes it. Standard library only,
because the bench reads it without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The cost for one prompt.

    gemm, attention   operations in matrix products (or convolutions), and in attention
    weights           bytes of the blocks' weights in FP16
    own               the part of attention's operations that is among the latent's tokens; the rest
                      looks at the prompt
    elements, hidden  elements of x that pass through blocks, counted once for each block, and of
                      the feed-forward's hidden values
    width             of x
    """

    gemm: float
    attention: float
    weights: float = 0.0
    own: float = 0.0
    elements: float = 0.0
    hidden: float = 0.0
    width: int = 0

    @property
    def tokens(self) -> float:
        """About how many tokens look at each other in an attention: it has 4 operations for each
        element of x and each of them."""
        return self.own / (4 * self.elements) if self.elements else 0.0
