"""choose_blocks: which blocks of keys each block of queries visits, and what stands for those that it does not.

The maths, the layout and the access pattern stand at the head of src/sparse_routing.cu. The result goes to `attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from ctypes import c_float, c_int, c_int64
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Options, Plan, Tensors, round_up
from ...launcher import Card, Pointer, output, parameter_struct
from ...plans import strides
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op
from ..views.checks import check_shape, word, wrong_dtype
from ..views.rows import head_obstacles, rows_apart
from .attention_operands import BlockList, Tail

HEADS = (64, 96, 128, 256)
QUERY_BLOCK, KEY_BLOCK = 128, 64  # tokens: what a block of the attention kernels has of queries, and a tile of keys
PER_WORD = 32
HALF = QUERY_BLOCK // 2  # whose weights are added
MOST_BLOCKS = 8192  # of keys: a row of scores lies in shared memory; and its weights, of half as many blocks
WARPS, CHOOSERS = 4, 256

Chosen = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def choose_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    most: int,
    near: int | None = 1,
    sinks: int = 1,
    deviations: float | None = None,
    left: float | None = None,
    scale: float | None = None,
    policy: KernelPolicy = STANDARD,
) -> tuple[BlockList, Tail]:
    """Of q [batch, tokens, heads, d] and k, v [batch, key tokens, key heads, d] fp16 or bf16, with strides as `attention` takes
    them.

    Each block of 128 queries visits the blocks of 64 keys within `near` of the diagonal, the first `sinks`, the last one if it
    is short, then its best by the product of their means until they are `most`, and those more than `deviations` standard
    deviations above the row's mean. Lists are in order of the blocks. The tail holds the means of all blocks, and which of them
    each row visits.

    near   None: nothing is visited for where it lies, no neighbours, no `sinks` and no short last block. The tail then
           serves only if all blocks are whole
    left   share of a row's weight that may be left to the tail, in place of `deviations`. The best are then those with the most
           weight, and more than `most` are visited until no more is left. The weight is what the means say: of each half of the
           queries the share of tokens times exp(scale * product)
    scale  of the scores, as `attention` has it, for `left` alone; None: 1 / sqrt(d)
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = (most, near, sinks, deviations, left, scale)
    keys, counts, visited, tail_k, tail_v = CHOOSE_BLOCKS((q, k, v), options, policy)
    blocks = BlockList(keys, counts, QUERY_BLOCK, KEY_BLOCK)
    return blocks, Tail(tail_k.transpose(1, 2), tail_v.transpose(1, 2), visited)


class Sizes(NamedTuple):
    """What the outputs are made of."""

    batch: int
    heads: int
    key_heads: int
    d: int
    query_blocks: int
    blocks: int
    width: int  # of a list
    words: int  # of a row of bits

    @staticmethod
    def of(tensors: Tensors, options: Options) -> Sizes:
        q, k, _ = cast(tuple[Tensor, ...], tensors)
        most, near, sinks, deviations, left, _ = options
        query_blocks, blocks = -(-q.shape[1] // QUERY_BLOCK), -(-k.shape[1] // KEY_BLOCK)
        beside = 0 if near is None else math.ceil(blocks / max(query_blocks, 1)) + 2 + 2 * near + sinks + 1
        # NaN is among the best: where a row is of nothing else, what is visited in any case comes on top of `most`.
        width = blocks if deviations is not None or left is not None else min(blocks, most + beside)
        words = -(-blocks // (2 * PER_WORD)) * 2
        return Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[3], query_blocks, blocks, width, words)

    @property
    def per_query(self) -> float:
        """Key blocks to a query block: where the diagonal is."""
        return self.blocks / max(self.query_blocks, 1)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    q, k, v = call.operands
    most, near, sinks, deviations, left, scale = call.options
    if q.ndim != 4 or k.ndim != 4 or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k: {list(k.shape)} does not go with q {list(q.shape)}: batch and d are equal")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"k: {k.shape[2]} heads do not go with q's {q.shape[2]}")
    check_shape("v", v, k, "k")
    for name, count in (("most", most), ("near", 0 if near is None else near), ("sinks", sinks)):
        if count < 0:
            raise ValueError(f"{name} is {count}, expected 0 or more")
    if deviations is not None and not math.isfinite(deviations):
        raise ValueError(f"deviations is {deviations}, expected a finite number or None")
    if left is not None and not 0 <= left <= 1:  # NaN is in no range
        raise ValueError(f"left is {left}, expected a share, 0 to 1, or None")
    if left is not None and deviations is not None:
        raise ValueError("left and deviations are two ends of one list, expected one of them")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}, expected a positive number")


# ---------------------------------------------------------------------------------------------------------- the maths


def block_means(x: Tensor, size: int) -> Tensor:
    """The mean of each `size` tokens of x [batch, tokens, heads, d]: [batch, heads, blocks, d], of x's type."""
    tokens = x.shape[1]
    wide = functional.pad(x.to(torch.promote_types(x.dtype, torch.float32)), (0, 0, 0, 0, 0, -tokens % size))
    sums = wide.reshape(wide.shape[0], -(-tokens // size), size, *wide.shape[2:]).sum(2)
    have = torch.full((sums.shape[1],), size, device=x.device)
    if tokens % size:
        have[-1] = tokens % size
    return (sums / have[:, None, None]).transpose(1, 2).to(x.dtype).contiguous()


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    most: int,
    near: int | None,
    sinks: int,
    deviations: float | None,
    left: float | None,
    scale: float,
) -> Chosen:
    """The oracle, with scores in fp32, or in float64 for float64 inputs."""
    sizes = Sizes.of((q, k, v), (most, near, sinks, deviations, left, scale))
    k_means, v_means = block_means(k, KEY_BLOCK), block_means(v, KEY_BLOCK)
    of_heads = k_means.repeat_interleave(sizes.heads // sizes.key_heads, 1)
    scores = _scores(block_means(q, QUERY_BLOCK), of_heads)
    if left is not None:
        scores = block_weights(_scores(block_means(q, HALF), of_heads), q.shape[1], k.shape[1], scale)
    rows = torch.arange(sizes.query_blocks, device=q.device)[:, None] * sizes.per_query
    columns = torch.arange(sizes.blocks, device=q.device)
    if near is None:
        always = torch.zeros(sizes.query_blocks, sizes.blocks, dtype=torch.bool, device=q.device)
    else:
        always = (columns + 1 + near > rows) & (columns - near < rows + sizes.per_query)
        always |= columns < sinks
        if k.shape[1] % KEY_BLOCK:
            always |= columns == sizes.blocks - 1
    first = always | scores.isnan()
    # The best, then what comes first before the rest; of equals the earlier block.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, first.gather(-1, order).int().sort(dim=-1, descending=True, stable=True).indices)
    wanted = torch.full((*scores.shape[:-1], 1), most, device=q.device)
    if left is not None:
        weights = scores.nan_to_num(0)
        enough = (1 - left) * weights.sum(-1, keepdim=True)
        reached = weights.gather(-1, order).cumsum(-1) >= enough
        wanted = torch.maximum(wanted, torch.maximum((~reached).sum(-1, keepdim=True) + 1, first.sum(-1, keepdim=True)))
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, columns < wanted) | always
    if deviations is not None:
        bar = scores.mean(-1, keepdim=True) + deviations * scores.std(-1, correction=0, keepdim=True)
        chosen |= scores > bar
    counts = chosen.sum(-1).int()
    # Numbers of the chosen in order, then whatever: a stable sort puts what is chosen first.
    listed = chosen.int().sort(dim=-1, descending=True, stable=True).indices[..., : sizes.width].int().contiguous()
    bits = functional.pad(chosen, (0, sizes.words * PER_WORD - sizes.blocks)).long()
    bits = bits.reshape(*counts.shape, sizes.words, PER_WORD)
    words = (bits << torch.arange(PER_WORD, device=q.device)).sum(-1)
    visited = torch.where(words >= 2**31, words - 2**32, words).int()
    return listed, counts, visited, k_means, v_means


def _scores(q_means: Tensor, k_means: Tensor) -> Tensor:
    wide = torch.promote_types(q_means.dtype, torch.float32)
    return q_means.to(wide) @ k_means.to(wide).transpose(-1, -2)


def block_weights(scores: Tensor, queries: int, tokens: int, scale: float) -> Tensor:
    """What key blocks weigh in each block of queries, [batch, heads, query blocks, blocks]; together 1. NaN where a score is.

    scores   products of means [batch, heads, halves of query blocks, blocks]
    queries  how many these are the means of
    tokens   of all key blocks together
    """
    known = scores.masked_fill(scores.isnan(), -math.inf)
    if not scores.numel():
        return scores.new_zeros(*scores.shape[:2], -(-queries // QUERY_BLOCK), scores.shape[3])
    top = known.amax(-1, keepdim=True)
    weights = torch.where(known == top, torch.ones_like(known), ((known - top) * scale).exp())
    if tokens % KEY_BLOCK:
        weights[..., -1] *= (tokens % KEY_BLOCK) / KEY_BLOCK
    weights = weights / weights.masked_fill(scores.isnan(), 0).sum(-1, keepdim=True)
    have = torch.full((scores.shape[2], 1), HALF, device=scores.device)
    have[-1] = queries - (scores.shape[2] - 1) * HALF
    weights = weights.masked_fill(scores.isnan(), math.nan) * have
    rows = -(-queries // QUERY_BLOCK)
    weights, have = (functional.pad(t, (0, 0, 0, 2 * rows - t.shape[-2])) for t in (weights, have))
    return weights.reshape(*scores.shape[:2], rows, 2, -1).sum(3) / have.reshape(rows, 2, 1).sum(1)


def fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Chosen:
    s = Sizes.of((q, k, v), options)
    rows = (s.batch, s.heads, s.query_blocks)
    means = (s.batch, s.key_heads, s.blocks, s.d)
    integers = (q.new_empty(shape, dtype=torch.int32) for shape in ((*rows, s.width), rows, (*rows, s.words)))
    keys, counts, visited = integers
    return keys, counts, visited, k.new_empty(means), k.new_empty(means)


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors BlockMeansParams and ChooseParams in src/sparse_routing.cu.
BlockMeansParams = parameter_struct(
    "BlockMeansParams",
    (Pointer, "x means"),
    (c_int64, "x_batch x_token x_head"),
    (c_int, "tokens size blocks heads is_bf16"),
)
ChooseParams = parameter_struct(
    "ChooseParams",
    (Pointer, "q k list counts bits"),
    (c_int, "d blocks query_blocks heads heads_per_key_head width words most near sinks always_last by_deviation"),
    (c_int, "queries q_means last_tokens is_bf16"),
    (c_float, "deviations per_query scale_log2 left"),
)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    q, k, v = call.operands
    yield from wrong_dtype((torch.float16, torch.bfloat16), q=q)
    yield from wrong_dtype((q.dtype,), k=k, v=v)
    yield from head_obstacles(q, HEADS)
    yield from rows_apart(q=q, k=k, v=v)
    s = Sizes.of(call.tensors, call.options)
    most = MOST_BLOCKS if call.options[4] is None else MOST_BLOCKS // 2
    if s.blocks > most:
        yield f"{s.blocks} blocks of keys, the kernels sort {most}"


def plan(call: Call, card: Card, _: None = None) -> Plan:
    """Fix sizes, strides and grids; what remains per call is the outputs and the pointers."""
    s = Sizes.of(call.tensors, call.options)
    most, near, sinks, deviations, left, scale = call.options
    q, k, v = call.operands
    if 0 in (s.batch, s.heads, s.query_blocks, s.blocks):
        return lambda q, k, v: reference(q, k, v, *call.options)  # nothing to launch
    together = QUERY_BLOCK if left is None else HALF
    q_means = -(-q.shape[1] // together)
    new_q_means = output((s.batch, s.heads, q_means, s.d), q.dtype, card.index)
    new_means = output((s.batch, s.key_heads, s.blocks, s.d), q.dtype, card.index)
    rows = (s.batch, s.heads, s.query_blocks)
    shapes = ((*rows, s.width), rows, (*rows, s.words))
    new_list, new_counts, new_bits = (output(shape, torch.int32, card.index) for shape in shapes)

    is_bf16 = q.dtype is torch.bfloat16

    def means(t: Tensor, size: int) -> Callable[..., None]:
        blocks = -(-t.shape[1] // size)
        where = strides("batch token head", x=t)
        sizes = {"tokens": t.shape[1], "size": size, "blocks": blocks, "heads": t.shape[2]}
        params = BlockMeansParams(**sizes, is_bf16=is_bf16, **where)
        kernel = card.kernel("sparse_routing", f"block_means_{s.d}")
        grid = (-(-blocks // WARPS), t.shape[2], t.shape[0])
        return kernel.prepare(params, grid=grid, block=WARPS * 32, shape=call.describe())

    of_queries, of_keys, of_values = means(q, together), means(k, KEY_BLOCK), means(v, KEY_BLOCK)
    params = ChooseParams(
        d=s.d,
        blocks=s.blocks,
        query_blocks=s.query_blocks,
        heads=s.heads,
        heads_per_key_head=s.heads // s.key_heads,
        width=s.width,
        words=s.words,
        most=min(most, s.blocks),  # more than there are say no more, and may exceed an int
        # None: so far within the diagonal that no block is.
        near=-s.blocks - 1 if near is None else min(near, s.blocks),
        sinks=0 if near is None else min(sinks, s.blocks),
        always_last=near is not None and k.shape[1] % KEY_BLOCK != 0,
        by_deviation=deviations is not None,
        deviations=deviations or 0.0,
        queries=q.shape[1],
        q_means=q_means,
        left=left or 0.0,
        last_tokens=k.shape[1] - (s.blocks - 1) * KEY_BLOCK,
        scale_log2=scale * math.log2(math.e),
        is_bf16=is_bf16,
        per_query=s.per_query,
    )
    choose = card.kernel("sparse_routing", "choose_blocks" if left is None else "choose_by_weight").prepare(
        params,
        grid=(s.query_blocks, s.heads, s.batch),
        block=CHOOSERS,
        shape=call.describe(),
        shared_bytes=4 * (s.blocks * (1 if left is None else 2) + s.words),
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Chosen:
        q_means, k_means, v_means = new_q_means(), new_means(), new_means()
        listed, counts, bits = new_list(), new_counts(), new_bits()
        of_queries(q.data_ptr(), q_means.data_ptr())
        of_keys(k.data_ptr(), k_means.data_ptr())
        of_values(v.data_ptr(), v_means.data_ptr())
        choose(q_means.data_ptr(), k_means.data_ptr(), listed.data_ptr(), counts.data_ptr(), bits.data_ptr())
        return listed, counts, bits, k_means, v_means

    return run


def shape_class(call: Call) -> str:
    s = Sizes.of(call.tensors, call.options)
    q = call.first
    return f"{word(q)} {s.batch}x{s.heads}/{s.key_heads}x{s.d} {round_up(s.query_blocks)}x{round_up(s.blocks)}"


CHOOSE_BLOCKS = Op(
    name="choose_blocks",
    schema=(
        "(Tensor q, Tensor k, Tensor v, int most, int? near, int sinks, float? deviations, float? left, float scale, "
        "str policy) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan),),
    shape_class=shape_class,
    validate=validate,
    kernels={"sparse_routing": ("choose_blocks", "choose_by_weight", *(f"block_means_{d}" for d in HEADS))},
)
