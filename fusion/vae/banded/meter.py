"""Counts the bytes that a call has at a time, and its products, while nothing is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

# Types whose convolutions cuDNN computes with adjacent channels: input, weight and result lie once more
# in a workspace. Measured on an H200: 1.00 to 1.25 of these for 22 sizes alone, and for some of a
# VAE's none at all.
TURNED = (torch.float16, torch.bfloat16)
CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.cudnn_convolution)


class Share:
    """What a tensor takes of the bytes; its views have the same one. When the last of them goes,
    so do the bytes."""

    def __init__(self, meter: Meter, nbytes: int) -> None:
        self.meter, self._nbytes = meter, nbytes
        meter.now += nbytes
        meter.most = max(meter.most, meter.now)
        meter.worst = max(meter.worst, meter.now)

    def __del__(self) -> None:
        self.meter.now -= self._nbytes


class Meter:
    """Of one call.

    now, most  bytes, on the device that computes
    worst      the most with a workspace of every convolution
    products   multiplications of convolutions and matrices
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.now = self.most = self.worst = self.products = 0

    def begin(self) -> None:
        """Count from here on."""
        self.most = self.worst = self.now
        self.products = 0

    def share(self, made: Tensor, *sources: Any) -> Share:
        """The share of a tensor that an operation made of these: a new one, unless it is a view."""
        key = made.untyped_storage()._cdata
        for source in sources:
            if source.share is not None and source.held.untyped_storage()._cdata == key:
                return source.share  # type: ignore[no-any-return]
        return Share(self, made.untyped_storage().nbytes())

    def elsewhere(self) -> Share:
        """The share of a tensor on another device."""
        return Share(self, 0)

    def count(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Add the products of an operation on plain tensors, and what it may need meanwhile."""
        counted = flop_registry.get(func.overloadpacket)
        if counted is not None:
            self.products += counted(*args, **kwargs, out_val=made) // 2
        is_turned = func.overloadpacket in CONVOLUTIONS and made.dtype in TURNED
        if is_turned and self.device.type == "cuda":
            self.worst = max(self.worst, self.now + args[0].nbytes + args[1].nbytes + 2 * made.nbytes)
