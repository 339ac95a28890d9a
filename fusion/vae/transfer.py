"""Pixels between the host and the card, piece by piece: an encoder's arrive (`Inbox`), a decoder's
leave (`Outbox`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from mmap import PAGESIZE

import torch
from torch import Tensor

from .pixel_range import finish

AHEAD = 2  # pieces in pinned memory that wait for the card

Place = tuple[slice, ...]


class Inbox:
    """Brings pieces from the host to a device, each while the card computes the one before.

    Memory that is not pinned crosses the bus through the driver's buffers, for which the host waits
    until the card has finished all earlier work; then the card waits for the host. So a piece is
    copied into pinned memory first.
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


class Outbox:
    """Writes pieces into a result that may be on the host, while the card computes the next piece.

    A piece crosses the bus into pinned memory after its computation, and is copied to its place
    when the next piece has been launched. There are two pinned pieces at a time, and the card never
    waits for the host's copy.

    finishes  whether pixels are converted to those of pictures: pixel_range.py
    """

    def __init__(self, out: Tensor, finishes: bool = False) -> None:
        self.out, self._finishes = out, finishes
        self._pending: tuple[Place, Tensor, torch.cuda.Event] | None = None

    def put(self, place: Place, piece: Tensor) -> None:
        """out[place] = piece, done after `flush` at the latest. The piece may be overwritten."""
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
        """Wait for the last piece."""
        previous, self._pending = self._pending, None
        self._write(previous)

    def _write(self, pending: tuple[Place, Tensor, torch.cuda.Event] | None) -> None:
        if pending is not None:
            place, staged, arrived = pending
            if not arrived.query():  # type: ignore[no-untyped-call]
                touch(self.out[place])
            arrived.synchronize()
            self.out[place].copy_(staged)


class FreshPages:
    """The memory of a result on the host gets its pages in parts, each while the card computes; what is not
    contiguous gets them as it is written."""

    def __init__(self, out: Tensor, parts: int) -> None:
        lies = out.device.type == "cpu" and out.is_contiguous() and out.numel() > 0
        each = -(-out.numel() // parts)
        self._parts: Iterator[Tensor] = iter(torch.split(out.view(-1), each) if lies else ())

    def touch_next(self) -> None:
        """The next part's, if one is left."""
        for part in self._parts:
            touch(part)
            return


def touch(part: Tensor) -> None:
    """Write to every page of a part of a result, rows [..., width]. New memory gets its pages at
    the first write, which takes ten times as long as the copy; here the host waits for the card
    anyway."""
    part[..., :: max(1, PAGESIZE // part.element_size())].zero_()
