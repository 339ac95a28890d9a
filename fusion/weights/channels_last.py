"""Convolutions whose weights lie channels-last on a card, as kernels want them: laid out once, when they arrive there.

Whoever fuses a network says which (`lay_out`). Of those that stream the pager lays them out as it copies (`stream/blocks.py`), of
the rest `as_kernels_want` once they are loaded. Shapes and numbers stay, but with such a weight torch takes another way through a
convolution, which rounds otherwise. So where stock computes, a convolution has its weight as the file has it for the time of its
call; and so have the functions that patch a weight (`in_file_order`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...kernels_cuda.ops.conv.conv_operands import last_format
from ..base.subclassing import mix
from .storage import FP8, in_file_order, is_quantised

TYPES = (torch.float16, *FP8)  # in which a weight is held that kernels take, or make halves of


class LaidOut:
    """What a convolution is mixed with: stock's own forward finds the weight as the file has it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        held = own["weight"]
        if held.is_contiguous():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        own["weight"] = in_file_order(held)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            own["weight"] = held


def lay_out(conv: nn.Module) -> None:
    """From now on this convolution's weight is to lie channels-last on a card, if it has taps and kernels take it."""
    weight: Any = conv.weight
    if weight.shape[2:].numel() > 1 and weight.dtype in TYPES and not is_quantised(weight):
        mix(conv, LaidOut)


# -------------------------------------------------------------------------------------------------- what does not stream


def serves(device: torch.device) -> bool:
    """Whether kernels on this device want channels to lie last."""
    return device.type == "cuda"


def as_kernels_want(net: nn.Module) -> None:
    """Lay out what of a network has its bytes: what streams has none while its block is not running."""
    for weight in _here(net):
        weight.data = weight.data.contiguous(memory_format=last_format(weight))


def as_in_file(net: nn.Module) -> None:
    """Undo it."""
    for weight in _here(net):
        weight.data = weight.data.contiguous()


def _here(net: nn.Module) -> Iterator[nn.Parameter]:
    laid_out = (module for module in net.modules() if isinstance(module, LaidOut))
    weights: Iterator[Any] = (module._parameters["weight"] for module in laid_out)
    return (weight for weight in weights if not weight.is_meta)
