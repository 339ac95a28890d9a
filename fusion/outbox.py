"""Decoded frames on their way to where the result is kept."""

from __future__ import annotations

from mmap import PAGESIZE

import torch
from torch import Tensor

from .finishing import finish

Place = tuple[slice, ...]


class Outbox:
    """Writes pieces into a result that may be on the host, while the card computes the next piece.

    A piece crosses the bus into pinned memory behind its computation, and is copied to its place when the next piece has
    been set going: two pinned pieces at a time, and the card never waits for the host's copy.

    finishes  whether pixels are to be those of pictures when they are there: finishing.py
    """

    def __init__(self, out: Tensor, finishes: bool = False) -> None:
        self.out, self._finishes = out, finishes
        self._pending: tuple[Place, Tensor, torch.cuda.Event] | None = None

    def put(self, place: Place, piece: Tensor) -> None:
        """out[place] = piece, by the time of `flush`. The piece may be written to."""
        if piece.device == self.out.device or piece.device.type != "cuda":
            self.out[place].copy_(piece)
            if self._finishes:
                finish(self.out[place])
            return
        ready = piece.to(self.out.dtype).contiguous()
        if self._finishes:
            finish(ready)
        staged = torch.empty(ready.shape, dtype=ready.dtype, pin_memory=True)
        staged.copy_(ready, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(piece.device))
        previous, self._pending = self._pending, (place, staged, arrived)
        self._write(previous)

    def flush(self) -> None:
        """Wait for what is on its way."""
        previous, self._pending = self._pending, None
        self._write(previous)

    def _write(self, pending: tuple[Place, Tensor, torch.cuda.Event] | None) -> None:
        if pending is not None:
            place, staged, arrived = pending
            if not arrived.query():  # type: ignore[no-untyped-call]
                touch(self.out[place])
            arrived.synchronize()
            self.out[place].copy_(staged)


def touch(part: Tensor) -> None:
    """Write to every page of a part of a result, rows [..., width]. Memory that is new gets its pages when it is first written, at
    ten times what the copy takes: better while the host waits for the card anyway."""
    part[..., :: max(1, PAGESIZE // part.element_size())].zero_()
