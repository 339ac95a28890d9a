"""The queries, keys and values of an attention as 8-bit numbers: what `turbo` multiplies. Not an op of its own.

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
ROUNDED_HEADS = (*HEADS, 256)  # whose values are rounded too
TOGETHER = 32  # rows that share a block; of keys, also a scale
TILE = 64  # keys that share a scale where values are rounded too, and tokens of a tile of values
TILES = 4  # of values that a block rounds
LONGEST_TILE = 128  # keys that attention looks at together
CHUNK = 512  # tokens that one block adds up
MOST = 127
SMALLEST = 2.0**-50  # kSmallest
MOST_BYTES = 2**28  # of rounded queries and keys at a time
KERNELS = (
    *(f"keys_to_int8_{d}" for d in HEADS),
    *(
        f"{name}_{d}"
        for name in ("key_sums", "queries_to_int8", "key_tiles_to_int8", "value_ranges", "values_to_int8")
        for d in ROUNDED_HEADS
    ),
)

# Mirrors Int8HeadsParams in src/int8_heads.cu.
Int8HeadsParams = parameter_struct(
    "Int8HeadsParams",
    (Pointer, "x x8 scales sums least greatest means totals lengths"),
    (c_int64, "x_batch x_token x_head"),
    (c_int, "tokens chunks heads is_bf16 summed"),
)


class Int8Heads(NamedTuple):
    """Rows of queries or keys: int8 [batch, heads, tokens, pitch], and fp32 scales by row, or by 32 rows of keys."""

    numbers: Tensor
    scales: Tensor


class Int8Values(NamedTuple):
    """Values less their mean: int8 [batch, heads, tiles, d, 64 tokens]. By channel, [batch, heads, d], fp32 scales and means,
    and int32 sums of the numbers."""

    numbers: Tensor
    scales: Tensor
    means: Tensor
    sums: Tensor


def pitch(d: int) -> int:
    """Bytes of a row: heads of 96 are followed by zeros."""
    return {64: 64, 256: 256}.get(d, 128)


def span(d: int) -> int:
    """Elements that one Hadamard matrix mixes."""
    return 32 if d == 96 else d


def scale_count(tokens: int, together: int, block: int = 0) -> int:
    """Scales of a head. Of keys enough for whole tiles, and for whole blocks of so many keys, where they are listed: attention
    looks at all keys of the last one."""
    tile = max(TILE if together == TILE else LONGEST_TILE, together, block)
    return tokens if together == 1 else -(-tokens // tile) * (tile // together)


def list_block(o: Operands, together: int) -> int:
    """Keys of a block of the list, whose scales are looked at beyond the last key: where values are rounded too, none are."""
    return 0 if o.blocks is None or together == TILE else o.blocks.size


def pieces(q: Tensor, k: Tensor, with_values: bool = False) -> Iterator[tuple[slice, slice]]:
    """Heads of q and of k that belong together, so many at a time that what is rounded of them stays small."""
    heads, key_heads = q.shape[2], k.shape[2]
    of_keys = key_heads * k.shape[1] * (pitch(q.shape[3]) + q.shape[3] * with_values)
    rounded = q.shape[0] * (heads * q.shape[1] * pitch(q.shape[3]) + of_keys)
    return heads_in(-(-rounded // MOST_BYTES), heads, key_heads)


Converted = tuple[Any, Any, Any]  # numbers and scales of queries, keys and tail, whose are None where there is none
Convert = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Converted]
# numbers, scales, means and sums of values, and the tail's numbers
ConvertValues = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Int8Values, Tensor | None]]


def launcher(card: Card, o: Operands, describe: str) -> Callable[..., Launch]:
    """Prepares a kernel by its name, for a tensor, on so many blocks for each head, of so many threads."""
    k_tokens, d = o.k.shape[1], o.k.shape[3]

    def launch(name: str, t: Tensor, blocks: int, threads: int = TOGETHER * pitch(d) // 8) -> Launch:
        where = strides("batch token head", x=t)
        chunks = -(-k_tokens // CHUNK)
        sizes = {"tokens": t.shape[1], "chunks": chunks, "heads": t.shape[2], "summed": k_tokens}
        params = Int8HeadsParams(**sizes, is_bf16=t.dtype is torch.bfloat16, **where)
        grid = (blocks, t.shape[2], t.shape[0])
        return card.kernel(UNIT, f"{name}_{d}").prepare(params, grid=grid, block=threads, shape=describe)

    return launch


def plan_values(card: Card, o: Operands, describe: str) -> ConvertValues:
    """From values, the keys' lengths and the tail's values to 8 bits; for tensors of the shapes and strides of `o`. The tail has
    the mean and the scales of the values, whose means it is."""
    batch, tokens, heads, d = o.v.shape
    launch, chunks = launcher(card, o, describe), -(-tokens // CHUNK)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
        return output((batch, heads, *shape), dtype, card.index)

    new_of_chunks = new(chunks, d)
    ranges = plan_of(
        launch("value_ranges", o.v, chunks),
        "x lengths",
        (o.v, o.key_lengths),
        sums=new_of_chunks,
        least=new_of_chunks,
        greatest=new_of_chunks,
        totals=new(d, dtype=torch.int32),
    )

    def rounding(t: Tensor, lengths: Tensor | None, totals: Tensor | None) -> Plan:
        tiles = -(-t.shape[1] // TILE)
        names = "x sums least greatest totals lengths"
        return plan_of(
            launch("values_to_int8", t, -(-tiles // TILES), 2 * d),
            names,
            (t, t, t, t, totals, lengths),
            x8=new(tiles, d, TILE, dtype=torch.int8),
            scales=new(d),
            means=new(d),
        )

    values = rounding(o.v, o.key_lengths, o.v)
    tails = None if o.tail is None else rounding(o.tail.v, None, None)

    def convert(v: Tensor, lengths: Tensor | None, tail: Tensor | None) -> tuple[Int8Values, Tensor | None]:
        sums, least, greatest, totals = ranges(v, lengths)
        numbers, scales, means = values(v, sums, least, greatest, totals, lengths)
        rest = None if tails is None else tails(tail, sums, least, greatest, None, None)[0]
        return Int8Values(numbers, scales, means, totals), rest

    return convert


def plan(card: Card, o: Operands, describe: str, together: int = TOGETHER) -> Convert:
    """From queries, keys, the keys' lengths and the tail's keys to 8 bits; for tensors of the shapes and strides of `o`. Keys
    and tail are taken less the same mean: that of all keys.

    together  keys that share a scale: 32, or TILE, where rows go on, as zeros, to the end of the last tile
    """
    batch, k_tokens, k_heads, d = o.k.shape
    launch, chunks = launcher(card, o, describe), -(-k_tokens // CHUNK)

    def rounding(name: str, t: Tensor, blocks: int, scales: int, names: str, *more: Tensor | None) -> Plan:
        tokens, heads = blocks * TILE if name == "key_tiles_to_int8" else t.shape[1], t.shape[2]
        new_numbers = output((batch, heads, tokens, pitch(d)), torch.int8, card.index)
        new_scales = output((batch, heads, scales), torch.float32, card.index)
        return plan_of(launch(name, t, blocks), names, (t, *more), x8=new_numbers, scales=new_scales)

    def of_keys(t: Tensor, lengths: Tensor | None, block: int = 0) -> Plan:
        blocks = scale_count(t.shape[1], together, block)
        return rounding(
            "key_tiles_to_int8" if together == TILE else "keys_to_int8", t, blocks, blocks, "x sums lengths", t, lengths
        )

    new_sums = output((batch, k_heads, chunks, d), torch.float32, card.index)
    sums = plan_of(launch("key_sums", o.k, chunks), "x lengths", (o.k, o.key_lengths), sums=new_sums)
    keys = of_keys(o.k, o.key_lengths, list_block(o, together))
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
    top = torch.where(groups == 0, MOST / root, groups.clamp_min(SMALLEST))
    most = torch.full_like(top, MOST)  # a tensor: torch divides a number by multiplying it with a rounded reciprocal
    inverse = torch.where(finite, most / top, torch.zeros_like(top)).repeat_interleave(together, 2)[:, :, :tokens]
    numbers = torch.nan_to_num(turned * inverse[..., None], 0, 0, 0).round().to(torch.int8)
    return Int8Heads(numbers, torch.where(finite, top * (root / MOST), math.nan))


def values_to_int8(v: Tensor, mean: Tensor, most: Tensor) -> Int8Values:
    """What the kernel makes of v [batch, tokens, heads, d], whose channels have this mean and reach this far from it,
    [batch, heads, d] fp32."""
    finite = mean.isfinite() & most.isfinite()
    top = torch.where(most == 0, torch.full_like(most, MOST), most)
    inverse = torch.where(finite, torch.full_like(most, MOST) / top, torch.zeros_like(most))
    wide = (v.float().transpose(1, 2) - mean[:, :, None]) * inverse[:, :, None]
    numbers = torch.nan_to_num(wide, 0, 0, 0).round().clamp(-MOST, MOST).to(torch.int8)
    padded = torch.nn.functional.pad(numbers, (0, 0, 0, -v.shape[1] % TILE))
    tiles = padded.reshape(*padded.shape[:2], -1, TILE, padded.shape[3]).transpose(-1, -2).contiguous()
    scales = torch.where(finite, top / torch.full_like(top, MOST), math.nan)
    return Int8Values(tiles, scales, mean, numbers.sum(2, dtype=torch.int32))
