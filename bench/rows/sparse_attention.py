"""Attention that visits a part of the key blocks, routing included, beside all of it: what FuseStream Sparse Attention does.

FLOP/s are of the dense work. Tokens lie in groups that resemble each other, as in a video: noise alone would have no blocks that
matter more than others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda import KernelPolicy, attention, choose_blocks
from ...kernels_cuda.ops.attention.attention import stock
from ...kernels_cuda.ops.attention.sparse_routing import KEY_BLOCK
from ...kernels_cuda.policy import Precision
from .. import kitchen
from ..row import Row, Tensors
from .attention import NOTHING_ELSE, PLAIN, SAMPLED, exactly, flops

SHARES = (0.5, 0.3)
LEFT = 0.1  # of the weight, to means: the node's default
TIERS: tuple[Precision, ...] = ("precise", "turbo")
ALIKE = 256  # tokens of a group
COMMON = 1.0  # how far a group's tokens are off together, in sigmas


def grouped(b: int, s: int, h: int, d: int) -> Callable[[], Tensors]:
    """Queries and keys of a group are near each other. Views of one packed projection."""

    def make() -> Tensors:
        both = torch.randn(b, s, 3, h, d, device="cuda", dtype=torch.float16)
        groups = torch.randn(b, -(-s // ALIKE), h, d, device="cuda", dtype=torch.float16)
        both[:, :, :2] += COMMON * groups.repeat_interleave(ALIKE, 1)[:, :s, None]
        return (*both.unbind(2), *NOTHING_ELSE)

    return make


def sparse(share: float) -> Callable[[KernelPolicy], Callable[..., Tensor]]:
    """Top-k with tail: routing, then the blocks."""

    def ours(policy: KernelPolicy) -> Callable[..., Tensor]:
        if policy.default == "auto":  # as the node does: torch's would need a mask of every query and key
            policy = KernelPolicy.of("on", precision=policy.precision, isa=policy.isa)

        def run(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
            most = max(round(share * -(-k.shape[1] // KEY_BLOCK)), 1)
            blocks, tail = choose_blocks(q, k, v, most=most, policy=policy)
            return attention(q, k, v, blocks=blocks, tail=tail, policy=policy)

        return run

    return ours


def bounded(policy: KernelPolicy) -> Callable[..., Tensor]:
    """As many blocks as the bound takes, with tail."""
    if policy.default == "auto":
        policy = KernelPolicy.of("on", precision=policy.precision, isa=policy.isa)

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        blocks, tail = choose_blocks(q, k, v, most=0, left=LEFT, policy=policy)
        return attention(q, k, v, blocks=blocks, tail=tail, policy=policy)

    return run


def rows(label: str, b: int, s: int, h: int, d: int) -> list[Row]:
    def row(what: str, precision: Precision, ours: Any, **others: Any) -> Row:
        return Row(
            "sparse attention",
            f"{label}, {what}: {b}x{h}x{s}x{s}x{d} {precision}",
            grouped(b, s, h, d),
            PLAIN,
            stock,
            precision=precision,
            flops=flops(b, s, s, h, d),
            peers=False,
            ours=ours,
            exact=exactly,
            sampled=SAMPLED,
            **others,
        )

    return [row(f"{LEFT:.0%} left to means", precision, bounded) for precision in TIERS] + [
        row(f"{share:.0%} of the blocks", precision, sparse(share), rivals=kitchen.sparse_attention(share))
        for share in SHARES
        for precision in TIERS
    ]


ROWS = [*rows("Wan 1.3B 480x832x81", 1, 32760, 12, 128), *rows("Wan 14B 480x480x33, cond and uncond", 2, 8190, 40, 128)]
