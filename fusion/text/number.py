"""A token's number, copied to the host while the device goes on with the next token."""

from __future__ import annotations

import torch
from torch import Tensor


class Number:
    """The numbers of one text's tokens, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._found = -1
        self._room = self._there = None
        if device.type == "cuda":
            self._room = torch.empty(1, dtype=torch.int64, pin_memory=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, token: Tensor) -> None:
        """Start copying token [1, 1] int64, without waiting: later work of the device queues behind
        the copy."""
        if self._room is None or self._there is None:
            self._found = int(token[0])
            return
        self._room.copy_(token.view(-1), non_blocking=True)
        self._there.record()

    def read(self) -> int:
        """The number that was sent last, after waiting for it."""
        if self._room is not None and self._there is not None:
            self._there.synchronize()
            self._found = int(self._room[0])
        return self._found
