"""Tokens of a video in tiles of space and time, so that the tokens of a block lie close together.

A video's tokens come frame by frame, and within a frame line by line: 64 in a row are a stripe. In
tiles of four frames by four lines by four columns they are a cube, whose mean represents each of
them. The order is a permutation of the existing tokens: tiles at the edge of the grid are not
padded, and the next tile follows at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

Grid = tuple[int, int, int]  # frames, lines, columns of tokens
TILE: Grid = (4, 4, 4)


def tile_order(grid: Grid, device: torch.device, tile: Grid = TILE) -> Tensor:
    """int64 [tokens]: the number in the video of the token at each place."""
    axes = torch.meshgrid(*(torch.arange(size, device=device) for size in grid), indexing="ij")
    keys = [at // side for at, side in zip(axes, tile, strict=True)] + [
        at % side for at, side in zip(axes, tile, strict=True)
    ]
    place = torch.zeros(grid, dtype=torch.int64, device=device)
    for key, size in zip(keys, (*(-(-n // side) for n, side in zip(grid, tile, strict=True)), *tile), strict=True):
        # Tiles by frame, line and column, and within each tile the tokens by the same.
        place = place * size + key
    return place.flatten().argsort()
