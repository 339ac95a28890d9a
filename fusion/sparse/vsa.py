"""VSA: attention over the best cubes of tokens, and attention over the means of all cubes beside it.

    scores = <mean of q, mean of k> / sqrt(d)             of each pair of cubes of 4 x 4 x 4 tokens
    o = attention over the cubes with the best scores
        + gate * (softmax(scores) mean of v)              the same for all tokens of a cube

The gate is of each token and each element of a head, a product of the block's input. A cube at the
edge of a video has fewer tokens than 64 and is padded: its mean is of the tokens that it has, and
nobody sees the padding.

Our lists are of 128 queries. A cube's 64 queries are followed by as many that nobody reads, so that
each cube has a list of its own, as trained: a list costs twice what its share says. Where cubes are
padded, a mask hides what is no key, for which attention has another kernel.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ...kernels_cuda import BlockList, attention
from ...kernels_cuda.ops.attention.attention_operands import heads_in
from ...kernels_cuda.ops.attention.sparse_routing import KEY_BLOCK, QUERY_BLOCK
from .order import Grid, Tiles, tiles
from .override import PIECES, SIZES
from .trained import How

NO_GRID = "the model does not say how its tokens lie in frames, lines and columns, as its cubes need it"

_tiles = lru_cache(maxsize=SIZES)(tiles)


class Vsa:
    """The attention of one block."""

    def __init__(self, gate: Tensor) -> None:
        """gate: [batch, tokens, heads * d], of the means."""
        self.gate = gate

    def obstacle(self, grid: Grid | None) -> str | None:
        """Why this cannot be served, in words a user understands."""
        return NO_GRID if grid is None else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        """q, k, v [batch, tokens, heads, d]. Returns the same shape. Some heads at a time."""
        assert how.grid is not None  # ensured by `obstacle`
        cubes, out = _tiles(how.grid, q.device), torch.empty_like(q, memory_format=torch.contiguous_format)
        gate = self.gate.view(q.shape)
        for some, keys in heads_in(PIECES, q.shape[2], k.shape[2]):
            parts = [t.index_select(1, cubes.order) for t in (q[:, :, some], k[:, :, keys], v[:, :, keys])]
            fine, coarse = _attend(parts[0], parts[1], parts[2], cubes, how)
            weight = gate[:, :, some].index_select(1, cubes.order)
            out[:, :, some].index_copy_(1, cubes.order, fine.addcmul_(coarse.index_select(1, cubes.tile), weight))
        return out


def _attend(q: Tensor, k: Tensor, v: Tensor, cubes: Tiles, how: How) -> tuple[Tensor, Tensor]:
    """Of q, k, v [batch, tokens, heads, d], cube by cube: what tokens see of the cubes that they
    visit, of the same shape, and what cubes see of all means [batch, cubes, heads, d]."""
    rows, columns = cubes.places(QUERY_BLOCK), cubes.places(KEY_BLOCK)
    q, k, v = (
        _spread(q, rows, cubes, QUERY_BLOCK),
        _spread(k, columns, cubes, KEY_BLOCK),
        _spread(v, columns, cubes, KEY_BLOCK),
    )
    of_q, of_k, of_v = _means(q, cubes), _means(k, cubes), _means(v, cubes)
    scores = of_q @ of_k.transpose(-1, -2) * q.shape[3] ** -0.5
    most = max(1, min(math.ceil(how.share * cubes.number), cubes.number))
    best = scores.topk(most, dim=-1, sorted=False).indices.sort(-1).values.int()
    blocks = BlockList(best, torch.full_like(best[..., 0], best.shape[-1]), QUERY_BLOCK, KEY_BLOCK)
    how.seen(blocks, cubes.number)
    coarse = (scores.softmax(-1) @ of_v).transpose(1, 2).to(q.dtype)
    there = None
    if cubes.order.shape[0] < cubes.number * KEY_BLOCK:
        there = torch.zeros(1, 1, 1, k.shape[1], dtype=torch.bool, device=k.device).index_fill_(3, columns, True)
    seen = attention(q, k, v, there, scale=how.scale, blocks=blocks, policy=how.policy)
    return seen.index_select(1, rows), coarse


def _spread(x: Tensor, places: Tensor, cubes: Tiles, room: int) -> Tensor:
    """Tokens [batch, tokens, heads, d] at these places of blocks of `room`, with zeros between."""
    return x.new_zeros(x.shape[0], cubes.number * room, *x.shape[2:]).index_copy_(1, places, x)


def _means(x: Tensor, cubes: Tiles) -> Tensor:
    """The means of cubes [batch, heads, cubes, d], at least fp32, of blocks with zeros between."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = x.view(x.shape[0], cubes.number, -1, *x.shape[2:]).sum(2, dtype=wide)
    return sums.div_(cubes.sizes[:, None, None]).transpose(1, 2)
