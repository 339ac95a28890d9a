"""The queries and keys of an attention as 8-bit numbers: what `turbo` multiplies. Not an op of its own.

The maths, the layout and the access pattern stand at the head of src/int8_heads.cu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from ctypes import c_int, c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import Plan
from ...launcher import Card, Launch, Pointer, output, parameter_struct
from ...plans import plan_of, strides
from .attention_operands import Operands, heads_in

UNIT = "int8_heads"
HEADS = (64, 96, 128)
TOGETHER = 32  # rows that share a block; of keys, also a scale
LONGEST_TILE = 128  # keys that attention looks at together
CHUNK = 512  # tokens that one block adds up
MOST = 127
MOST_BYTES = 2**28  # of rounded queries and keys at a time
KERNELS = tuple(f"{name}_{d}" for name in ("key_sums", "queries_to_int8", "keys_to_int8") for d in HEADS)

# Mirrors Int8HeadsParams in src/int8_heads.cu.
Int8HeadsParams = parameter_struct(
    "Int8HeadsParams",
    (Pointer, "x x8 scales sums lengths"),
    (c_int64, "x_batch x_token x_head"),
    (c_int, "tokens chunks heads summed"),
)


class Int8Heads(NamedTuple):
    """Rows of queries or keys: int8 [batch, heads, tokens, pitch], and fp32 scales by row, or by 32 rows of keys."""

    numbers: Tensor
    scales: Tensor


def pitch(d: int) -> int:
    """Bytes of a row: heads of 96 are followed by zeros."""
    return 64 if d == 64 else 128


def span(d: int) -> int:
    """Elements that one Hadamard matrix mixes."""
    return 32 if d == 96 else d


def scale_count(tokens: int, together: int) -> int:
    """Scales of a head. Of keys enough for whole tiles: attention looks at all keys of the last one."""
    return tokens if together == 1 else -(-tokens // LONGEST_TILE) * (LONGEST_TILE // together)


def pieces(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads of q and of k that belong together, so many at a time that what is rounded of them stays small."""
    heads, key_heads = q.shape[2], k.shape[2]
    rounded = q.shape[0] * (heads * q.shape[1] + key_heads * k.shape[1]) * pitch(q.shape[3])
    return heads_in(-(-rounded // MOST_BYTES), heads, key_heads)


Converted = tuple[Any, Any, Any]  # numbers and scales of queries, keys and tail, whose are None where there is none
Convert = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Converted]


def plan(card: Card, o: Operands, describe: str) -> Convert:
    """From queries, keys, the keys' lengths and the tail's keys to 8 bits; for tensors of the shapes and strides of `o`. Keys
    and tail are taken less the same mean: that of all keys."""
    batch, k_tokens, k_heads, d = o.k.shape
    chunks = -(-k_tokens // CHUNK)

    def launch(name: str, t: Tensor, blocks: int) -> Launch:
        where = strides("batch token head", x=t)
        params = Int8HeadsParams(tokens=t.shape[1], chunks=chunks, heads=t.shape[2], summed=k_tokens, **where)
        grid = (blocks, t.shape[2], t.shape[0])
        return card.kernel(UNIT, f"{name}_{d}").prepare(
            params, grid=grid, block=TOGETHER * pitch(d) // 8, shape=describe
        )

    def rounding(name: str, t: Tensor, blocks: int, scales: int, names: str, *more: Tensor | None) -> Plan:
        _, tokens, heads, _ = t.shape
        new_numbers = output((batch, heads, tokens, pitch(d)), torch.int8, card.index)
        new_scales = output((batch, heads, scales), torch.float32, card.index)
        return plan_of(launch(name, t, blocks), names, (t, *more), x8=new_numbers, scales=new_scales)

    def of_keys(t: Tensor, lengths: Tensor | None) -> Plan:
        blocks = scale_count(t.shape[1], TOGETHER)
        return rounding("keys_to_int8", t, blocks, blocks, "x sums lengths", t, lengths)

    new_sums = output((batch, k_heads, chunks, d), torch.float32, card.index)
    sums = plan_of(launch("key_sums", o.k, chunks), "x lengths", (o.k, o.key_lengths), sums=new_sums)
    keys = of_keys(o.k, o.key_lengths)
    tokens = o.q.shape[1]
    queries = rounding("queries_to_int8", o.q, -(-tokens // TOGETHER), tokens, "x")
    tails = None if o.tail is None else of_keys(o.tail.k, None)

    def convert(q: Tensor, k: Tensor, lengths: Tensor | None, tail: Tensor | None) -> Converted:
        added = sums(k, lengths)
        k8, q8 = keys(k, added, lengths), queries(q)
        return q8, k8, (None, None) if tails is None else tails(tail, added, None)

    return convert


# ---------------------------------------------------------------------------------------------------------- the maths


def rotated(x: Tensor) -> Tensor:
    """x [..., d] times a Hadamard matrix over the root of its size, by the sums that the kernel makes, in its order."""
    apart = 1
    while apart < span(x.shape[-1]):
        pairs = x.reshape(*x.shape[:-1], -1, 2, apart)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        apart *= 2
    return x


def to_int8(x: Tensor, mean: Tensor | None = None, together: int = 1) -> Int8Heads:
    """What the kernels make of x [batch, tokens, heads, d]: of queries, or with their mean [batch, heads, d] of keys, 32
    together. fp32; rows without zeros behind them."""
    wide = x.float().transpose(1, 2)
    if mean is not None:
        wide = wide - mean[:, :, None]
    turned = rotated(wide)
    tokens = x.shape[1]
    padded = torch.nn.functional.pad(turned, (0, 0, 0, scale_count(tokens, together) * together - tokens))
    groups = padded.reshape(*padded.shape[:2], -1, together * padded.shape[3]).abs().amax(3)
    root = 1 / math.sqrt(span(x.shape[-1]))
    finite = groups.isfinite()
    top = torch.where(groups == 0, MOST / root, groups)
    most = torch.full_like(top, MOST)  # a tensor: torch divides a number by multiplying it with a rounded reciprocal
    inverse = torch.where(finite, most / top, torch.zeros_like(top)).repeat_interleave(together, 2)[:, :, :tokens]
    numbers = torch.nan_to_num(turned * inverse[..., None], 0, 0, 0).round().to(torch.int8)
    return Int8Heads(numbers, torch.where(finite, top * (root / MOST), math.nan))
