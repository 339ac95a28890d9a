"""Seeded weights. A table says for every tensor its shape and how its numbers are spread; `draw` makes them.

Each tensor is a function of (seed, family, name) alone. So files of one kind agree in every storage format, and kinds of
one family agree in the tensors they share. The bits come from numpy's generators, which do not depend on the CPU.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Spec:
    """One tensor: its shape, the normal distribution it is drawn from, and whether fp8 files hold it in fp8."""

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    fp8: bool = False


Table = dict[str, Spec]


def linear(name: str, out: int, into: int, *, gain: float = 1.0, bias: bool = True) -> Table:
    """`weight` [out, into], N(0, (gain^2)/into), and `bias` [out]: unit input gives output of size `gain`."""
    table = {f"{name}.weight": Spec((out, into), gain / math.sqrt(into), fp8=True)}
    return table | shift(name, out) if bias else table


def conv(name: str, out: int, into: int, kernel: tuple[int, ...], *, gain: float = 1.0, fp8: bool = True) -> Table:
    """`weight` [out, into, *kernel], N(0, (gain^2)/fan_in), and `bias` [out]."""
    fan_in = into * math.prod(kernel)
    return {f"{name}.weight": Spec((out, into, *kernel), gain / math.sqrt(fan_in), fp8=fp8)} | shift(name, out)


def shift(name: str, size: int) -> Table:
    """`bias` [size], small but never zero, so that a forgotten bias shows."""
    return {f"{name}.bias": Spec((size,), 0.05)}


def scale(name: str, *shape: int, mean: float = 1.0) -> Table:
    """The gain of a normalisation, spread around `mean`. `name` is the whole key: some call it weight, some gamma."""
    return {name: Spec(shape, 0.1 * mean, mean)}


def layer_norm(name: str, size: int) -> Table:
    """`weight` and `bias`, both [size]."""
    return scale(f"{name}.weight", size) | shift(name, size)


def draw(table: Table, family: str, seed: int) -> dict[str, torch.Tensor]:
    """fp32 tensors for every row of the table, in its order."""
    return {name: _draw_one(f"{seed}/{family}/{name}", spec) for name, spec in table.items()}


def _draw_one(label: str, spec: Spec) -> torch.Tensor:
    key = int.from_bytes(hashlib.sha256(label.encode()).digest()[:16], "little")
    values = np.random.Generator(np.random.PCG64(key)).standard_normal(math.prod(spec.shape), dtype=np.float32)
    values *= np.float32(spec.std)
    values += np.float32(spec.mean)
    return torch.from_numpy(values).reshape(spec.shape)
