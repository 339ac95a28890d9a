"""SLA: attention over the best blocks of keys, and linear attention beside it.

    o = attention over the blocks that a block of queries chooses
        + project(phi(q) (sum of phi(k) v) / phi(q) (sum of phi(k))),   phi: softmax over a head

A block of 128 queries chooses among blocks of 64 keys, tokens in the video's order, by the product
of their means. The paper has linear attention over the blocks that are left out; the code by which
the published checkpoints were trained and run has it over all keys, and so it is here. The mean of
all keys is taken from keys before they are chosen, as there: this changes all scores of a row alike
and no choice, but what keys have in common takes no digits of a block's mean in FP16.

Beside attention it costs two products of heads by heads and two passes over q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...kernels_cuda import attention, choose_blocks
from ...kernels_cuda.ops.attention.sparse_routing import KEY_BLOCK
from .order import Grid
from .trained import How

PIECE_BYTES = 64 * 2**20  # of the features that are there at a time
# Tokens of a piece, and the part of each feature: sums of FP16 hold values up to 512 if all keys
# have the same only feature.
MOST_TOKENS, LESS = 4096, 2.0**-5
EPS = 1e-5


class Sla:
    """The attention of one block."""

    def __init__(self, project: Callable[[Tensor], Tensor]) -> None:
        """project: of the linear part of each head, [.., d] -> [.., d]."""
        self.project = project

    def obstacle(self, grid: Grid | None) -> str | None:  # noqa: ARG002 - tokens lie as they come
        """None: nothing is asked of a video's size."""
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        """q, k, v [batch, tokens, heads, d]. Returns the same shape."""
        count = -(-k.shape[1] // KEY_BLOCK)
        # Of fewer blocks than 1 / share the published code chooses none, which leaves 0 / 0.
        most = max(1, int(how.share * count))
        apart = k - k.mean(1, keepdim=True, dtype=torch.promote_types(k.dtype, torch.float32)).to(k.dtype)
        blocks, _ = choose_blocks(q, apart, v, most=most, near=None, policy=how.policy)
        del apart
        how.seen(blocks, count)
        out = attention(q, k, v, scale=how.scale, blocks=blocks, policy=how.policy)
        add_linear_(out, q, k, v, self.project)
        return out


def add_linear_(out: Tensor, q: Tensor, k: Tensor, v: Tensor, project: Callable[[Tensor], Tensor]) -> None:
    """Add the linear part to out, all [batch, tokens, heads, d]. Some tokens at a time."""
    batch, _, heads, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    values = q.new_zeros(batch, heads, d, d, dtype=wide)
    total = q.new_zeros(batch, heads, d, 1, dtype=wide)
    for piece in _pieces(k):
        features = k[:, piece].softmax(-1).transpose(1, 2)
        total += features.sum(2, dtype=wide)[..., None]
        values += (features.mul_(LESS).transpose(2, 3) @ v[:, piece].transpose(1, 2)).to(wide)
    # As a mean of so many tokens both are about as large as a value and as one.
    part = d / k.shape[1]
    means, ones = (values * (part / LESS)).to(q.dtype), (total * part).to(q.dtype)
    for piece in _pieces(q):
        features = q[:, piece].softmax(-1).transpose(1, 2)
        weight = (features @ ones).to(wide).add_(EPS * part)
        out[:, piece] += project(((features @ means) / weight).to(q.dtype).transpose(1, 2))


def _pieces(x: Tensor) -> Iterator[slice]:
    """Some tokens of x [batch, tokens, heads, d] at a time."""
    token = x.shape[0] * x.shape[2] * x.shape[3] * x.element_size()
    step = max(1, min(MOST_TOKENS, PIECE_BYTES // max(token, 1)))
    for first in range(0, x.shape[1], step):
        yield slice(first, first + step)
