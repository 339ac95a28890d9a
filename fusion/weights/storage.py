"""How a weight is stored: as numbers, or quantised, as data and scales; and the parameter that the pager has of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor
from torch import Tensor, nn

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INT8 = "TensorWiseINT8Layout"  # of stock's quantised tensors: int8, a scale for all or for each row, rows turned or not
# Of stock's, too: made with samples beforehand, so that no numbers can be written back into such a weight.
MADE_BEFOREHAND = ("TensorCoreAWQW4A16Layout", "TensorCoreSVDQuantW4A4Layout")


@dataclass(frozen=True)
class Paged:
    """One parameter that lives in the pager. `key` is its name in the model's state_dict, `name` the one within its block.

    stand_in: what the module holds while the block is not running; right in shape and dtype, without bytes (meta).
    """

    name: str
    key: str
    module: nn.Module
    attribute: str
    stand_in: nn.Parameter

    @property
    def storage(self) -> torch.Tensor:
        """The tensor whose bytes are paged: of a quantised weight its data."""
        return stored(self.stand_in)


def is_quantised(parameter: torch.Tensor) -> bool:
    """Whether the parameter is data and scales rather than numbers."""
    return isinstance(parameter, QuantizedTensor)


def layout_of(quantised: Any) -> str:
    """The name of stock's class for how its data and scales lie."""
    layout = quantised._layout_cls
    return layout if isinstance(layout, str) else str(layout.__name__)


def stored(tensor: Any) -> torch.Tensor:
    """The tensor itself, or of a quantised one its data."""
    data: torch.Tensor = tensor._qdata if is_quantised(tensor) else tensor
    return data


def in_file_order(weight: Tensor) -> Tensor:
    """A weight whose last dimension's elements lie side by side: a copy of what is laid out otherwise."""
    return weight if is_quantised(weight) else weight.contiguous()
