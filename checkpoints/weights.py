"""Seeded weights. A tree says for every tensor its shape and how its numbers are spread; `draw`
makes them.

    tree({
        "blocks.[4]": {                                 # blocks.0 to blocks.3
            "attn.(q|k)": linear(64, 64),               # attn.q.weight, attn.q.bias, attn.k.weight,
            attn.k.bias "norm.weight": gain(64),
            "mask": normal(0.5, 1, 64) if masked else None,         # None: it is not there
        },
    })

Each tensor is a function of (seed, family, name) alone. So files of one kind agree in every storage
format, and kinds of one family agree in the tensors that they share. The bits come from numpy's
generators, which do not depend on the CPU.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Union

import numpy as np
import torch


@dataclass(frozen=True)
class Spec:
    """One tensor: shape, normal distribution, and whether fp8 files hold it in fp8."""

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    fp8: bool = False


Table = dict[str, Spec]
Tree = Mapping[str, Union[Spec, "Tree", None]]
Rows = dict[str, Spec | Tree | None]
CHOICE = re.compile(r"\[(\d+)\]|\(([^()]*)\)")


def tree(rows: Tree) -> Table:
    """The tensors by whole names, in order. `[n]` counts from 0, `(a|b)` has alternatives."""
    found: Table = {}
    for pattern, row in rows.items():
        for name in _names(pattern) if row is not None else ():
            if isinstance(row, Spec):
                found[name] = row
            elif row is not None:
                found |= {f"{name}.{inner}": spec for inner, spec in tree(row).items()}
    return found


def _names(pattern: str) -> Iterator[str]:
    choice = CHOICE.search(pattern)
    if choice is None:
        yield pattern
        return
    parts = map(str, range(int(choice[1]))) if choice[1] else choice[2].split("|")
    for part in parts:
        yield from _names(pattern[: choice.start()] + part + pattern[choice.end() :])


def linear(out: int, into: int, factor: float = 1.0, *, bias: bool = True) -> Tree:
    """`weight` [out, into], N(0, factor^2 / into), and `bias` [out]: size one becomes `factor`."""
    return conv(out, into, factor=factor, bias=bias)


def conv(out: int, into: int, *kernel: int, factor: float = 1.0, fp8: bool = True, bias: bool = True) -> Tree:
    """`weight` [out, into, *kernel], and `bias` [out], never zero: one that is forgotten shows."""
    weight = Spec((out, into, *kernel), factor / math.sqrt(into * math.prod(kernel)), fp8=fp8)
    return {"weight": weight, "bias": normal(0.05, out) if bias else None}


def norm(size: int) -> Tree:
    """A LayerNorm's or GroupNorm's `weight` and `bias`, both [size]."""
    return {"weight": gain(size), "bias": normal(0.05, size)}


def gain(*shape: int, mean: float = 1.0) -> Spec:
    """The gain of a normalisation, spread around `mean`."""
    return Spec(shape, 0.1 * mean, mean)


def normal(std: float, *shape: int, mean: float = 0.0) -> Spec:
    """Any other tensor."""
    return Spec(shape, std, mean)


def draw(table: Table, family: str, seed: int) -> dict[str, torch.Tensor]:
    """fp32 tensors for every row of the table, in its order."""
    return {name: _draw_one(f"{seed}/{family}/{name}", spec) for name, spec in table.items()}


def _draw_one(label: str, spec: Spec) -> torch.Tensor:
    key = int.from_bytes(hashlib.sha256(label.encode()).digest()[:16], "little")
    values = np.random.Generator(np.random.PCG64(key)).standard_normal(math.prod(spec.shape), dtype=np.float32)
    values *= np.float32(spec.std)
    values += np.float32(spec.mean)
    return torch.from_numpy(values).reshape(spec.shape)
