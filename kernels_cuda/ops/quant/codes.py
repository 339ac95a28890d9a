"""Codes of 4 or 6 bits as files have them, in torch. The twin of src/codes.cuh, where the layout stands.

A code is counted from 0 here, or read as two's complement (`unpacked` of integer_rows.py). SVDQuant's files may have
tiles in place of rows, one of 128 rows and 64 columns behind the other:

    codes               [n / 128, k / 64, 32, 128]   of a tile four rows in each line, 32 bytes of each
    scales              [n / 128, k / 64, 128]       of each row of a tile
    the second factor   [n / 128, rank, 128]         of its low-rank part, the same

What is read once, when a file is opened, is put in order here and needs no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..views.checks import word
from .integer_rows import unpacked

TILE_ROWS, TILE_COLUMNS = 128, 64


def unsigned(codes: Tensor, bits: int) -> Tensor:
    """[n, bytes] int8 as [n, k] int32, counted from 0."""
    n, k = decoded_shape(codes, bits)
    lower = unpacked(codes[:, : k // 2]).to(torch.int32) & 15
    if bits == 4:
        return lower
    fields = codes[:, k // 2 :, None].to(torch.int32) >> torch.arange(0, 8, 2, dtype=torch.int32, device=codes.device)
    return lower | (fields & 3).reshape(n, k) << 4


def decoded_shape(codes: Tensor, bits: int) -> tuple[int, int]:
    """[n, k] of [n, bytes]."""
    return codes.shape[0], codes.shape[1] * 8 // bits


def in_groups(values: Tensor, group: int) -> Tensor:
    """[n, k] as [n, groups, columns of a group], to be computed with what a group has."""
    n, k = values.shape
    return values.view(n, k // group, group)


def check_codes(codes: Tensor, bits: int) -> None:
    """Raise ValueError for what has no rows of codes."""
    if codes.dtype is not torch.int8 or codes.ndim != 2 or codes.shape[1] * 8 % bits:
        raise ValueError(f"codes: {word(codes)} {list(codes.shape)} is not int8 [rows, bytes of {bits}-bit codes]")


def untiled_codes(tiles: Tensor) -> Tensor:
    """Codes of 4 bits in tiles, [n / 128, k / 64, 32, 128] int8, as [n, k / 2]."""
    if tiles.ndim != 4 or tiles.shape[2] * tiles.shape[3] != TILE_ROWS * TILE_COLUMNS // 2:
        raise ValueError(f"tiles: {list(tiles.shape)} is not [n / {TILE_ROWS}, k / {TILE_COLUMNS}, 32, 128]")
    of_rows = tiles.reshape(*tiles.shape[:2], TILE_ROWS, TILE_COLUMNS // 2)
    return of_rows.transpose(1, 2).reshape(tiles.shape[0] * TILE_ROWS, tiles.shape[1] * TILE_COLUMNS // 2)


def untiled_of_rows(tiles: Tensor) -> Tensor:
    """What a tile has of each of its rows, [n / 128, any number, 128], as [any number, n]."""
    if tiles.ndim != 3 or tiles.shape[2] != TILE_ROWS:
        raise ValueError(f"tiles: {list(tiles.shape)} is not [n / {TILE_ROWS}, any number, {TILE_ROWS}]")
    return tiles.transpose(0, 1).reshape(tiles.shape[1], tiles.shape[0] * TILE_ROWS)
