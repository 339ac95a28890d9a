"""The operands of attention by name, the checks of their shapes, and masks as torch would need them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...call import Call, Options, Tensors
from ..views.checks import check_shape

NO_LIMIT = -1
BITS = 32  # of a word of Tail.visited
TENSORS = 11  # of a call of attention; its options follow


class BlockList(NamedTuple):
    """Which blocks of keys each block of queries sees.

    keys    [1 or batch, 1 or heads, query blocks, most] int32: numbers of key blocks, each at most once
    counts  [1 or batch, 1 or heads, query blocks] int32: how many of them count
    rows    queries in a block, a multiple of 128
    size    keys in a block, a multiple of 64
    """

    keys: Tensor
    counts: Tensor
    rows: int
    size: int


class Tail(NamedTuple):
    """What stands for the key blocks that a block of queries does not visit: the mean of their keys counts as often as a block
    has keys, with the mean of their values. A block with fewer keys than the others has to be visited.

    k, v      [batch, key blocks, key heads, d]: means, with any strides but the last
    visited   [1 or batch, 1 or heads, query blocks, words] int32: a bit for each key block, least first, 32 in a word; words are
              even in number
    """

    k: Tensor
    v: Tensor
    visited: Tensor

    @property
    def unvisited(self) -> Tensor:
        """Which blocks the tail stands for: bool [1 or batch, 1 or heads, query blocks, key blocks]."""
        bits = self.visited[..., None] >> torch.arange(BITS, device=self.visited.device, dtype=torch.int32)
        return (bits & 1).flatten(-2)[..., : self.k.shape[1]] == 0


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (NO_LIMIT, NO_LIMIT),
    key_lengths: Tensor | None = None,
    distance_bias: Tensor | None = None,
    blocks: BlockList | None = None,
    tail: Tail | None = None,
) -> tuple[Tensors, Options]:
    """What `attention` is asked for, as the op takes it."""
    listed = (None, None, 0, 0) if blocks is None else blocks
    pooled = (None, None, None) if tail is None else tail
    tensors = (q, k, v, mask, key_lengths, distance_bias, listed[0], listed[1], *pooled)
    return tensors, (scale, causal, *window, listed[2], listed[3])


def heads_in(parts: int, heads: int, key_heads: int) -> Iterator[tuple[slice, slice]]:
    """Heads of the queries and of the keys that belong together, in so many parts at most."""
    group, step = heads // key_heads, -(-key_heads // parts)
    for first in range(0, key_heads, step):
        last = min(first + step, key_heads)
        yield slice(first * group, last * group), slice(first, last)


def of_heads(tensors: Tensors, queries: slice, keys: slice) -> Tensors:
    """Of a call's tensors the part that some heads need: views. queries, keys: of which heads, that belong together."""
    q, k, v, mask, key_lengths, distance_bias, listed, counts, tail_k, tail_v, visited = cast(tuple[Any, ...], tensors)

    def some(t: Tensor | None, dim: int, heads: slice) -> Tensor | None:
        if t is None or t.ndim < -dim or t.shape[dim] == 1:
            return t
        return t.narrow(dim, heads.start, heads.stop - heads.start)

    return (
        q[:, :, queries],
        k[:, :, keys],
        v[:, :, keys],
        some(mask, -3, queries),
        key_lengths,
        some(distance_bias, -2, queries),
        some(listed, -3, queries),
        some(counts, -2, queries),
        some(tail_k, -2, keys),
        some(tail_v, -2, keys),
        some(visited, -3, queries),
    )


@dataclass(frozen=True)
class Operands:
    """The tensors and options of a call, by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    key_lengths: Tensor | None
    distance_bias: Tensor | None
    blocks: BlockList | None
    tail: Tail | None
    scale: float
    causal: bool
    left: int
    right: int

    @staticmethod
    def of(tensors: Tensors, options: Options) -> Operands:
        q, k, v, mask, key_lengths, distance_bias, listed, counts, *means = cast(tuple[Any, ...], tensors)
        scale, causal, left, right, rows, size = options
        blocks = None if listed is None else BlockList(listed, counts, rows, size)
        tail = None if means[0] is None else Tail(*means)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return Operands(q, k, v, mask, key_lengths, distance_bias, blocks, tail, scale, causal, left, right)

    @property
    def keys(self) -> Tensor:
        """All that queries may see: keys, and behind them the tail's means."""
        return self.k if self.tail is None else torch.cat((self.k, self.tail.k), 1)

    @property
    def values(self) -> Tensor:
        """The same of the values."""
        return self.v if self.tail is None else torch.cat((self.v, self.tail.v), 1)

    @property
    def shift(self) -> int:
        """How far the keys reach beyond the queries: the last of both meet."""
        return self.k.shape[1] - self.q.shape[1]

    @property
    def right_limit(self) -> int:
        """The window's right side, with causality in it."""
        if not self.causal:
            return self.right
        return 0 if self.right == NO_LIMIT else min(0, self.right)

    @property
    def plain(self) -> bool:
        """Nothing but lengths and grouped heads."""
        return self.whole_blocks and self.blocks is None

    @property
    def whole_blocks(self) -> bool:
        """Nothing that makes a difference between the keys of a block: lengths, grouped heads and block lists at most."""
        return (
            self.mask is None and self.distance_bias is None and self.left == NO_LIMIT and self.right_limit == NO_LIMIT
        )

    @property
    def hides(self) -> bool:
        """Whether `seen` tells keys apart."""
        masked = self.mask is not None and self.mask.dtype is torch.bool
        limited = self.left != NO_LIMIT or self.right_limit != NO_LIMIT or self.key_lengths is not None
        return masked or limited or self.blocks is not None

    @property
    def adds(self) -> bool:
        """Whether `added` adds to the scores."""
        masked = self.mask is not None and self.mask.dtype is not torch.bool
        return masked or self.distance_bias is not None or self.tail is not None

    def seen(self, first: int, last: int) -> Tensor | None:
        """Which keys the queries [first, last) may see: bool, broadcasts to [batch, heads, rows, keys]. None: all."""
        if not self.hides:
            return None  # before anything is asked of the device: torch's candidates come by here at every call
        q_tokens, k_tokens, device = self.q.shape[1], self.k.shape[1], self.q.device
        rows = torch.arange(first, last, device=device)[:, None]
        keys = torch.arange(k_tokens, device=device)
        parts = []
        if self.right_limit != NO_LIMIT:
            parts.append((keys <= rows + self.shift + self.right_limit)[None, None])
        if self.left != NO_LIMIT:
            parts.append((keys >= rows + self.shift - self.left)[None, None])
        if self.key_lengths is not None:
            parts.append((keys < self.key_lengths[:, None])[:, None, None])
        if self.mask is not None and self.mask.dtype is torch.bool:
            parts.append(self.mask.expand(*self.mask.shape[:-2], q_tokens, k_tokens)[..., first:last, :])
        if self.blocks is not None:
            by_block = _listed(self.blocks, k_tokens)
            if self.tail is not None:
                by_block = torch.cat((by_block, self.tail.unvisited), -1)
            high = self.blocks.rows
            by_row = by_block[..., first // high : -(-last // high), :].repeat_interleave(high, -2)
            parts.append(by_row[..., first % high :, :][..., : last - first, :])
        found = None
        for part in parts:
            found = part if found is None else found & part
        return found

    def added(self, first: int, last: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of the queries [first, last): broadcasts to [batch, heads, rows, keys]."""
        q_tokens, k_tokens = self.q.shape[1], self.k.shape[1]
        total = None
        if self.mask is not None and self.mask.dtype is not torch.bool:
            total = self.mask.expand(*self.mask.shape[:-2], q_tokens, k_tokens)[..., first:last, :].to(dtype)
        if self.distance_bias is not None:
            at = torch.arange(k_tokens, device=self.q.device) - torch.arange(first, last, device=self.q.device)[:, None]
            bias = self.distance_bias.to(dtype)[:, at + q_tokens - 1]
            total = bias if total is None else total + bias
        if self.tail is not None and self.blocks is not None:  # a mean counts as often as its block has keys
            total = torch.zeros(k_tokens + self.tail.k.shape[1], dtype=dtype, device=self.q.device)
            total[k_tokens:] = math.log(self.blocks.size)
        return total


def _listed(blocks: BlockList, k_tokens: int) -> Tensor:
    """The block list as a mask [batch, heads, query blocks, keys]."""
    most = blocks.keys.shape[-1]
    counted = torch.arange(most, device=blocks.keys.device) < blocks.counts[..., None]
    key_blocks = -(-k_tokens // blocks.size)
    chosen = torch.zeros(*blocks.keys.shape[:-1], key_blocks + 1, dtype=torch.bool, device=blocks.keys.device)
    chosen.scatter_(-1, torch.where(counted, blocks.keys.long(), key_blocks), True)
    return chosen[..., :key_blocks].repeat_interleave(blocks.size, -1)[..., :k_tokens]


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for what are no queries [batch, tokens, heads, d] with their keys and values."""
    if q.ndim != 4:
        raise ValueError(f"q: {list(q.shape)} is not [batch, tokens, heads, d]")
    b, _, h, d = q.shape
    if k.ndim != 4 or k.shape[0] != b or k.shape[3] != d or k.shape[2] == 0 or h % k.shape[2]:
        raise ValueError(
            f"k: {list(k.shape)} does not go with q {list(q.shape)}: batch and d are equal, q's heads a multiple of k's"
        )
    check_shape("v", v, k, "k")


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    o = Operands.of(call.tensors, call.options)
    check_heads(o.q, o.k, o.v)
    b, s, h, _ = o.q.shape
    t = o.k.shape[1]
    if o.mask is not None:
        try:
            o.mask.expand(b, h, s, t)
        except RuntimeError as error:
            raise ValueError(f"mask: {list(o.mask.shape)} does not broadcast to {[b, h, s, t]}") from error
        if o.mask.dtype not in (torch.bool, o.q.dtype) and not o.mask.is_floating_point():
            raise ValueError(f"mask: {o.mask.dtype} is neither bool nor a floating type")
    if o.key_lengths is not None and o.key_lengths.shape != (b,):
        raise ValueError(f"key_lengths: {list(o.key_lengths.shape)} is not one for each of {b} batch rows")
    if o.distance_bias is not None and o.distance_bias.shape != (h, s + t - 1):
        raise ValueError(f"distance_bias: {list(o.distance_bias.shape)}, expected {[h, s + t - 1]}")
    for name, limit in (("left", o.left), ("right", o.right)):
        if limit < NO_LIMIT:
            raise ValueError(f"window: {name} is {limit}, expected -1 (no limit) or more")
    if o.blocks is not None:
        _check_blocks(o.blocks, (b, h, s))
    _check_tail(o)
    if not math.isfinite(o.scale):
        raise ValueError(f"scale is {o.scale}, expected a finite number")


def _check_blocks(blocks: BlockList, sizes: tuple[int, int, int]) -> None:
    b, h, s = sizes
    if blocks.rows <= 0 or blocks.size <= 0:
        raise ValueError(f"blocks: {blocks.rows} queries by {blocks.size} keys is no block")
    wanted = -(-s // blocks.rows)
    keys = blocks.keys.shape
    if len(keys) != 4 or keys[0] not in (1, b) or keys[1] not in (1, h) or keys[2] != wanted:
        raise ValueError(f"blocks: keys {list(keys)}, expected [1 or {b}, 1 or {h}, {wanted}, any]")
    if blocks.counts.shape != keys[:3]:
        raise ValueError(f"blocks: counts {list(blocks.counts.shape)}, expected {list(keys[:3])}")


def _check_tail(o: Operands) -> None:
    if o.tail is None:
        return
    if o.blocks is None:
        raise ValueError("tail: there is no list of blocks whose rest it could stand for")
    if not o.whole_blocks or o.key_lengths is not None:
        raise ValueError("tail: masks, windows, lengths and biases tell keys of a block apart, whose mean is one")
    count = -(-o.k.shape[1] // o.blocks.size)
    for name, t in (("k", o.tail.k), ("v", o.tail.v)):
        wanted = (o.k.shape[0], count, *o.k.shape[2:])
        if t.shape != wanted:
            raise ValueError(f"tail: {name} {list(t.shape)}, expected the means of {count} blocks, {list(wanted)}")
    bits = o.tail.visited.shape
    words = -(-count // (2 * BITS)) * 2
    if bits != (*o.blocks.counts.shape, words):
        raise ValueError(f"tail: visited {list(bits)}, expected {[*o.blocks.counts.shape, words]}")


PLACES = ("batch", "token", "head")
