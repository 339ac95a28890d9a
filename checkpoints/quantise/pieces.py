"""A tensor in pieces: some rows are read, worked on by one of a few threads, and handed on in
order.

A piece is as large as what stays in a core's cache while it is passed over a hundred times. Each
thread works by itself: torch's own division of such small work among threads costs more than it
gains.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from ...memory import Checkpoint, Extent
from ...memory.layer import DTYPES
from .errors import CannotQuantise

PIECE = 1 << 17  # elements, or one row
MOST_THREADS = 8
Result = TypeVar("Result")
Rows = tuple[int, int]  # from, to


class Workers:
    """Threads that work on pieces, a few ahead of what is asked for."""

    def __init__(self, pool: ThreadPoolExecutor, count: int) -> None:
        self._pool, self._ahead = pool, 2 * count

    def each(self, work: Callable[[Rows], Result], pieces: Iterable[Rows]) -> Iterator[Result]:
        """What `work` makes of them, in order."""
        under_way: deque[Future[Result]] = deque()
        try:
            for piece in pieces:
                under_way.append(self._pool.submit(work, piece))
                if len(under_way) > self._ahead:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for one in under_way:
                one.cancel()


@contextmanager
def workers() -> Iterator[Workers]:
    count, before = min(os.cpu_count() or 1, MOST_THREADS), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, "quantise", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield Workers(pool, count)
    finally:
        torch.set_num_threads(before)


def row_pieces(extent: Extent) -> Iterator[Rows]:
    """A matrix by rows."""
    rows, width = extent.shape
    return _ranges(rows, max(1, PIECE // width))


def flat_pieces(extent: Extent) -> Iterator[Rows]:
    """Any tensor by elements."""
    return _ranges(math.prod(extent.shape), PIECE)


def _ranges(count: int, step: int) -> Iterator[Rows]:
    return ((begin, min(begin + step, count)) for begin in range(0, count, step))


def stored(source: Checkpoint, extent: Extent, begin: int, end: int) -> Tensor:
    """Elements of a tensor in a type of torch's, as they are in the file."""
    kind = DTYPES[extent.dtype]
    read = torch.empty((end - begin) * kind.itemsize, dtype=torch.uint8)
    source.read_into(extent, read, begin * kind.itemsize)
    return read.view(kind)


def matrix_rows(source: Checkpoint, extent: Extent, rows: Rows) -> Tensor:
    """Rows in fp32. Raises `CannotQuantise` where a number is none, or beyond fp16's range."""
    width = extent.shape[1]
    found = stored(source, extent, rows[0] * width, rows[1] * width).float().view(-1, width)
    if not float(found.abs().amax()) <= torch.finfo(torch.float16).max:
        raise CannotQuantise(
            f"{source.files[0].path}: {extent.name} has numbers that are not finite, or beyond fp16's range. The file is damaged, "
            "or no model that can be quantised."
        )
    return found
