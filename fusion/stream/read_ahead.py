"""Bytes of weights that no pager brings, read from the file by several threads, some pieces ahead of
their use.

Each piece is read into a buffer of its own, which is pinned where a card is to copy it: torch lends
pinned memory again only when the copies out of it are done. Buffers of a few pieces are there at a
time, however large a weight is.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory import Checkpoint, Extent

PIECE = 32 << 20  # bytes that are read at once
AHEAD = 6  # pieces that are read, or are about to be, beside the one in use
READERS = min(AHEAD, os.cpu_count() or 1)


class Piece(NamedTuple):
    """Bytes [start, start + nbytes) of a tensor of the file."""

    extent: Extent
    start: int
    nbytes: int


def pieces_of(extent: Extent, step: int = PIECE) -> Iterator[Piece]:
    """All of a tensor, in pieces of so many bytes."""
    for start in range(0, extent.nbytes, step):
        yield Piece(extent, start, min(step, extent.nbytes - start))


class ReadAhead:
    """Pieces on their way to the host, in order. Reading begins at once."""

    def __init__(self, source: Checkpoint, pieces: Iterable[Piece], *, pinned: bool) -> None:
        self._source, self._pieces, self._pinned = source, iter(pieces), pinned
        self._pool = ThreadPoolExecutor(READERS, "fusestream-read-ahead")
        self._coming: deque[tuple[Piece, Future[Tensor]]] = deque()
        self._ask(AHEAD)

    def __iter__(self) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece with its bytes on the host: uint8. Raises what reading it raised."""
        try:
            while self._coming:
                piece, future = self._coming.popleft()
                stored = future.result()
                self._ask(1)
                yield piece, stored
        finally:
            self.close()

    def close(self) -> None:
        """Read no more. May be called twice."""
        self._pieces = iter(())
        self._coming.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, count: int) -> None:
        for piece in islice(self._pieces, count):
            self._coming.append((piece, self._pool.submit(self._read, piece)))

    def _read(self, piece: Piece) -> Tensor:
        buffer = self._buffer(piece.nbytes)
        self._source.read_into(piece.extent, buffer, piece.start)
        return buffer

    def _buffer(self, nbytes: int) -> Tensor:
        if self._pinned:
            with contextlib.suppress(RuntimeError):  # the system pins no more: the driver copies in two steps
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.empty(nbytes, dtype=torch.uint8)
