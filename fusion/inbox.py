"""Pixels on their way from the host to the card."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

AHEAD = 2  # pieces that wait in pinned memory for the card


class Inbox:
    """Brings pieces of what lies on the host to a device, each while the card computes the one before.

    What is not pinned crosses the bus through the driver's own buffers, for which the host waits until the card has done all that
    it was told before: then the card waits for the host. So a piece is copied into pinned memory first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: deque[torch.cuda.Event] = deque()

    def take(self, piece: Tensor) -> Tensor:
        """The piece on the device."""
        if self._device.type != "cuda" or piece.is_cuda:
            return piece.to(self._device)
        if len(self._sent) == AHEAD:
            self._sent.popleft().synchronize()
        staged = torch.empty_like(piece, pin_memory=True)
        there = staged.copy_(piece).to(self._device, non_blocking=True)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record(torch.cuda.current_stream(self._device))
        self._sent.append(sent)
        return there
