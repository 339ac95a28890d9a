"""Tokens of a video in tiles of space and time, so that the tokens of a block lie close together.

A video's tokens come frame by frame, and within a frame line by line: 64 in a row are a stripe. In
tiles of four frames by four lines by four columns they are a cube, whose mean represents each of
them. The order is a permutation of the existing tokens: tiles at the edge of the grid are not
padded, and the next tile follows at once. A model that was trained on tiles has each in a block of
its own (`Tiles`), which at the edge of the grid is not full.
"""

from __future__ import annotations

import math
from typing import NamedTuple

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


class Tiles(NamedTuple):
    """Where tokens lie if each tile has a block of its own.

    order  int64 [tokens]: as of `tile_order`
    tile   int64 [tokens]: the tile of the token at each place of the order
    rank   int64 [tokens]: its place in the tile
    sizes  fp32 [tiles]: tokens that each tile has
    """

    order: Tensor
    tile: Tensor
    rank: Tensor
    sizes: Tensor

    @property
    def number(self) -> int:
        return self.sizes.shape[0]

    def places(self, room: int) -> Tensor:
        """int64 [tokens]: the place of each token of the order in blocks of `room` places."""
        return self.tile * room + self.rank


def tiles(grid: Grid, device: torch.device) -> Tiles:
    """The tiles of a video, by frame, line and column."""
    order = tile_order(grid, device)
    frames, lines, columns = (-(-size // side) for size, side in zip(grid, TILE, strict=True))
    at = (order // math.prod(grid[1:]), order // grid[2] % grid[1], order % grid[2])
    by_axis = [place // side for place, side in zip(at, TILE, strict=True)]
    tile = (by_axis[0] * lines + by_axis[1]) * columns + by_axis[2]
    sizes = torch.bincount(tile, minlength=frames * lines * columns)
    first = sizes.cumsum(0) - sizes
    rank = torch.arange(order.shape[0], device=device) - first[tile]
    return Tiles(order, tile, rank, sizes.float())
