"""Counts the bytes that a call has at a time, and its products, while nothing is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


class Share:
    """What a tensor takes of the bytes; its views have the same one. When the last of them goes,
    so do the bytes."""

    def __init__(self, meter: Meter, nbytes: int) -> None:
        self.meter, self._nbytes = meter, nbytes
        meter.now += nbytes
        meter.most = max(meter.most, meter.now)

    def __del__(self) -> None:
        self.meter.now -= self._nbytes


class Meter:
    """Of one call.

    now, most  bytes, on the device that computes
    products   multiplications of convolutions and matrices
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.now = self.most = self.products = 0

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
        """Add the products of an operation on plain tensors."""
        counted = flop_registry.get(func.overloadpacket)
        if counted is not None:
            self.products += counted(*args, **kwargs, out_val=made) // 2
