"""The windows of Qwen2.5-VL's vision tower: squares of neighbours that see only each other, cut at
the right and at the lower edge of a picture.

Stock lists them row by row. Here those of one size are adjacent, so that the attention takes all of
them as one batch; a picture has four sizes at most:

    whole  whole  | right edge
    whole  whole  | right edge
    --------------+-----------
    lower  lower  | corner

Patches come in squares of 2 x 2 that are merged later. A window has whole squares, and so has a
`Layout`, which is an order of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .patches import Grid


class Layout(NamedTuple):
    """The order of the squares of some pictures.

    order   [squares] int64: which square comes where
    sizes   patches of each window, in this order
    frames  patches of each frame. Its windows are adjacent
    """

    order: Tensor
    sizes: tuple[int, ...]
    frames: tuple[int, ...]


def layout(grid: Grid, side: int, merge: int) -> Layout:
    """Of pictures of patches. side: of a window, in squares. merge: of a square, in patches."""
    order, sizes, frames, first = list[Tensor](), list[int](), list[int](), 0
    for count, height, width in grid:
        for _ in range(count):
            for alike in windows(height // merge, width // merge, side):
                order.append(alike.flatten() + first)
                sizes += [alike.shape[1] * merge * merge] * len(alike)
            frames.append(height * width)
            first += height * width // (merge * merge)
    return Layout(torch.cat(order), tuple(sizes), tuple(frames))


def windows(height: int, width: int, side: int) -> Iterator[Tensor]:
    """The squares of each window of a frame, numbered row by row: [windows, squares] int64, once
    for each size."""
    numbers = torch.arange(height * width).view(height, width)
    for band in numbers.tensor_split((height - height % side,)):
        for part in band.tensor_split((width - width % side,), 1):
            if part.numel():
                tall, wide = (min(side, size) for size in part.shape)
                yield part.unfold(0, tall, tall).unfold(1, wide, wide).flatten(2).flatten(0, 1)
