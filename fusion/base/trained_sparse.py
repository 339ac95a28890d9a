"""The sparse attention that a checkpoint was trained with, as its family tells it from the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainedSparse:
    """How a model's attention was trained to be sparse.

    method   SLA: the best blocks, and linear attention over all keys beside them. VSA: the best
             cubes of 64 tokens, and attention over the means of all cubes beside them
    share    of the key blocks that each block of queries visits
    is_own   whether that is the share of its authors, and not one that a user asked for
    """

    method: Literal["SLA", "VSA"]
    share: float
    is_own: bool = True

    def words(self) -> str:
        """The report's words."""
        return f"{self.method}, as {'trained' if self.is_own else 'asked for'}, {self.share:.0%} of the key blocks"
