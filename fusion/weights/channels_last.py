"""Convolution weights that lie channels-last on a card, as kernels want them. They are laid out
once, on arrival.

The code that fuses a network says which (`lay_out`). The pager lays out streamed weights as it
copies them (`stream/blocks.py`), and `as_kernels_want` the others once they are loaded. Shapes and
numbers stay, but torch computes a convolution with such a weight by another algorithm, which rounds
differently. So stock's forward, and the functions that patch a weight, get the weight as the file
has it (`in_file_order`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...kernels_cuda.ops.conv.conv_operands import last_format
from ..base.subclassing import mix
from .storage import FP8, in_file_order, is_quantised

TYPES = (torch.float16, *FP8)  # types of weights that kernels take, or make halves of


class LaidOut:
    """Mixed into a convolution, so that stock's own forward finds the weight as the file has it."""

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
    """Mark a convolution whose weight is to lie channels-last on a card, if it has taps and kernels
    take it."""
    weight: Any = conv.weight
    if weight.shape[2:].numel() > 1 and weight.dtype in TYPES and not is_quantised(weight):
        mix(conv, LaidOut)


# -------------------------------------------------------------------------------------------------- what does not stream


def serves(device: torch.device) -> bool:
    """Whether kernels on this device want weights channels-last."""
    return device.type == "cuda"


def as_kernels_want(net: nn.Module) -> None:
    """Lay out the weights of a network that have bytes. Streamed weights have none between their
    blocks' runs."""
    for weight in _here(net):
        weight.data = weight.data.contiguous(memory_format=last_format(weight))


def as_in_file(net: nn.Module) -> None:
    """Undo `as_kernels_want`."""
    for weight in _here(net):
        weight.data = weight.data.contiguous()


def _here(net: nn.Module) -> Iterator[nn.Parameter]:
    laid_out = (module for module in net.modules() if isinstance(module, LaidOut))
    weights: Iterator[Any] = (module._parameters["weight"] for module in laid_out)
    return (weight for weight in weights if not weight.is_meta)
