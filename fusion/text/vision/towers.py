"""The vision towers of a stock text encoder model, of every kind."""

from __future__ import annotations

from torch import nn

from ....kernels_cuda import STANDARD, KernelPolicy
from . import qwen2_vl, qwen3_vl, siglip

KINDS = (qwen2_vl, qwen3_vl, siglip)
OPS = tuple(sorted({op for kind in KINDS for op in kind.OPS}))


def fuse(model: nn.Module, policy: KernelPolicy = STANDARD, *, on_cpu: bool = False) -> int:
    """Let all vision towers in a stock text encoder model compute through our ops, in place. Returns
    how many blocks, 0 if all is left to stock.

    on_cpu: on the CPU too, where the ops run their references: for tests.
    """
    return sum(kind.fuse(model, policy, on_cpu=on_cpu) for kind in KINDS)
