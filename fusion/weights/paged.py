"""The parameter of a model that the pager has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .scales import PagedScale
from .storage import stored


@dataclass(frozen=True)
class Paged:
    """One parameter that lives in the pager.

    name      its name within its block
    key       its name in the model's state_dict
    stand_in  held by the module while the block does not run: shape and dtype on the meta device
    scales    of a quantised weight's groups, which live there, too
    """

    name: str
    key: str
    module: nn.Module
    attribute: str
    stand_in: nn.Parameter
    scales: tuple[PagedScale, ...] = ()

    @property
    def storage(self) -> Tensor:
        """The tensor whose bytes are paged: the data of a quantised weight."""
        return stored(self.stand_in)

    @property
    def names(self) -> tuple[str, ...]:
        """Of its own and of its scales."""
        return self.name, *(one.name for one in self.scales)
