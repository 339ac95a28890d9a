"""Hadamard matrices along rows, as the ConvRot files have them. The twin of src/rotation.cuh, where the maths stands."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

GROUPS = (4, 16, 64, 256)  # neighbours that are turned together; 0: none are


def check_rotation(group: int, k: int) -> None:
    """Raise ValueError for a group that no rows of k can be turned in."""
    if group == 0:
        return
    if group not in GROUPS:
        raise ValueError(f"rotation is {group}, expected 0 or one of {', '.join(map(str, GROUPS))}")
    if k % group:
        raise ValueError(f"rotation: rows of {k} do not divide into groups of {group}")


def turned(x: Tensor, group: int) -> Tensor:
    """x [..., k] times the matrices, without their root: by the sums that the kernels make, in their order."""
    apart = 1
    while apart < group:
        a, b, c, d = x.reshape(*x.shape[:-1], x.shape[-1] // (4 * apart), 4, apart).unbind(-2)
        s, t, u, v = a + b, c + d, a - b, c - d
        x = torch.stack([s + v, s - v, t + u, t - u], -2).flatten(-3)
        apart *= 4
    return x


def root(group: int) -> float:
    """1 over the root of the group: what `turned` lacks. A power of two."""
    return 1 / math.sqrt(group) if group else 1.0


@cache  # a CUDA graph may read it for as long as the process lives
def matrix(group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The matrix itself, with its root: stock multiplies by it."""
    return turned(torch.eye(group, dtype=torch.float64), group).mul(root(group)).to(device, dtype)
