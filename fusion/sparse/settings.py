"""The settings that a user chooses, checked for every caller."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["top-k", "radial", "bounded"]
METHODS: tuple[Method, ...] = get_args(Method)
LEAST_SHARE = 0.05  # with less a block of queries sees little more than its neighbours


@dataclass(frozen=True)
class Settings:
    """How an attention is made sparse, and which ones stay dense.

    method        top-k: the key blocks whose means match each query block's best, and the means of
                  the others. radial: always the same blocks, fewer the further apart two frames
                  are. bounded: as top-k, as many as it takes in each row and head
    share         of the key blocks that top-k visits for each query block, including neighbours,
                  the first block and a short last one
    dense_steps   share of a sampler's first steps that stay dense
    dense_layers  number of first attentions of each model call that stay dense
    least_tokens  attentions of fewer tokens stay dense, because there is little to gain
    left_out      share of the softmax's weight that bounded leaves to means at most, as the means
                  tell it
    """

    method: Method = "top-k"
    share: float = 0.5
    dense_steps: float = 0.25
    dense_layers: int = 1
    least_tokens: int = 12000
    left_out: float = 0.1

    def __post_init__(self) -> None:
        fault = next(self._faults(), None)
        if fault is not None:
            raise ValueError(f"FuseStream Sparse Attention: {fault}.")

    def _faults(self) -> Iterator[str]:
        if self.method not in METHODS:
            yield f"method is {self.method!r}; choose {' or '.join(METHODS)}"
        if not LEAST_SHARE <= self.share <= 1:  # NaN is in no range
            yield f"share is {self.share}; choose {LEAST_SHARE} to 1"
        if not 0 <= self.dense_steps <= 1:
            yield f"dense_steps is {self.dense_steps}; choose 0 (none) to 1 (all)"
        if not 0 <= self.left_out <= 1:
            yield f"left_out is {self.left_out}; choose 0 (dense) to 1"
        for name in ("dense_layers", "least_tokens"):
            count = getattr(self, name)
            if not math.isfinite(count) or count < 0 or count != int(count):
                yield f"{name} is {count}; choose a whole number, 0 or more"

    def words(self) -> str:
        """The report's words."""
        if self.method == "radial":
            return self.method
        if self.method == "bounded":
            return f"{self.method}, at most {self.left_out:.0%} of the weight left to means"
        return f"{self.method}, {self.share:.0%} of the key blocks"
