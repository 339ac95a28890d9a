"""The parameter of a model that the pager has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .storage import stored


@dataclass(frozen=True)
class Paged:
    """One parameter that lives in the pager.

    name      its name within its block
    key       its name in the model's state_dict
    stand_in  held by the module while the block does not run: shape and dtype on the meta device
    """

    name: str
    key: str
    module: nn.Module
    attribute: str
    stand_in: nn.Parameter

    @property
    def storage(self) -> Tensor:
        """The tensor whose bytes are paged: the data of a quantised weight."""
        return stored(self.stand_in)
