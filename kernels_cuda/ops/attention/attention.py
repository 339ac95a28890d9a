"""attention: softmax(q k^T * scale + bias) v, with everything a video model asks of it in one kernel.

The maths, the layout, the access pattern and the range of the half accumulators stand at the head of src/attention.cu;
what torch can do of it, in sdpa.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from ctypes import c_float, c_int, c_int64
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...binary.arch import half_sums_pay, has_tensor_cores
from ...call import Call, Plan, by_name, round_up
from ...launcher import Card, Launch, Pointer, output, parameter_struct
from ...plans import plan_of, strides
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import word, wrong_dtype
from ..views.rows import head_obstacles, rows_apart
from . import attention_products, int8_heads
from .attention_operands import (
    NO_LIMIT,
    PLACES,
    TENSORS,
    BlockList,
    Operands,
    Tail,
    arguments,
    of_heads,
    validate,
)
from .sdpa import SERVING, TorchBackend, run_stock, stock_begins

Maybe = Tensor | None

UNIT, INT8_UNIT = "attention", "attention_int8"
HEADS = (64, 96, 128, 384)  # elements of a head the kernels were compiled for
ONLY_INT8 = 256  # ... that has a kernel for 8-bit values alone
WIDE = 384  # the VAE's single head has a kernel of its own
REFERENCE_ROWS = 1024  # queries at a time: bounds what the reference holds
MOST_TOKENS = 2**30
# What the blocks of a list must be multiples of: the most queries of a block, the most keys of a tile.
ROWS, TILE = 128, 64
SHORT = 1024  # keys up to which `turbo` does not round them: little is gained, and few keys average few errors


def attention(
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
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """Attention of q over k and v, [batch, tokens, heads, d] fp16 each, or bf16, with any strides but the last.

    k, v           may have other tokens than q, and fewer heads (grouped queries: head i of q sees head i // group)
    mask           broadcasts to [batch, heads, q tokens, k tokens]. bool: True may be seen; of q's type: added to the scores
    scale          of the scores; None: 1 / sqrt(d)
    causal         query i sees keys up to i + (k tokens - q tokens): the last query sees the last key
    window         (left, right): query i sees keys from i + shift - left to i + shift + right, with the same shift;
                   -1: no limit on that side
    key_lengths    [batch] int32: keys from there on do not exist for that row of the batch
    distance_bias  [heads, q tokens + k tokens - 1] fp32, added to the scores: the value for key - query, from
                   1 - q tokens on. T5's relative positions, without the bias of every pair
    blocks         a list of the key blocks to visit (sliding tiles, top-k); what is not listed is not seen
    tail           of whole blocks that are not listed, their means are seen
    Returns a contiguous [batch, q tokens, heads, d]. A query that sees no key is zero. Softmax is fp32; with precision
    `fast` the tensor cores may accumulate in fp16, folded into fp32 every few steps; with `turbo` the queries and more than
    1024 keys may be rounded to 8 bits, with a scale for each row, or 32 or 64 keys; and so may values, by channel, and weights,
    by row and 64 keys. Our kernels serve bf16 so alone.
    """
    tensors, options = arguments(
        q,
        k,
        v,
        mask,
        scale=scale,
        causal=causal,
        window=window,
        key_lengths=key_lengths,
        distance_bias=distance_bias,
        blocks=blocks,
        tail=tail,
    )
    out: Tensor = ATTENTION(tensors, options, policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def compute(o: Operands) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(o.q.dtype, torch.float32)
    group = o.q.shape[2] // max(o.k.shape[2], 1)
    k, v = (t.to(wide).repeat_interleave(group, 2).transpose(1, 2) for t in (o.keys, o.values))
    out = torch.empty(o.q.shape, dtype=o.q.dtype, device=o.q.device)
    for first in range(0, o.q.shape[1], REFERENCE_ROWS):
        last = min(first + REFERENCE_ROWS, o.q.shape[1])
        scores = (o.q[:, first:last].to(wide).transpose(1, 2) @ k.transpose(-1, -2)) * o.scale
        added, seen = o.added(first, last, wide), o.seen(first, last)
        if added is not None:
            scores = scores + added
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        # torch's softmax of a row without keys is NaN, ours zero; a row with a NaN stays NaN.
        nothing = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
        # A weight of zero times Inf would be NaN: what is not seen must not be met.
        values = weights @ v if seen is None else _weighted(weights, v, seen)
        out[:, first:last] = values.transpose(1, 2).to(o.q.dtype)
    return out


def _weighted(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """weights @ v where keys that no query of a batch row and head sees count as zero, whatever they hold."""
    used = seen.any(-2, keepdim=True).transpose(-1, -2)
    return weights @ torch.where(used, v, torch.zeros((), dtype=v.dtype, device=v.device))


reference = by_name(Operands.of, TENSORS, compute)
stock = by_name(Operands.of, TENSORS, run_stock)


def fake(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors AttentionParams in src/attention_params.cuh.
AttentionParams = parameter_struct(
    "AttentionParams",
    (Pointer, "q k v out key_lengths bias mask relative block_list block_counts q_scales k_scales"),
    (Pointer, "v_scales v_means v_sums"),
    (Pointer, "tail_k tail_v tail_scales visited"),
    (c_int64, " ".join(f"{t}_{where}" for t in ("q", "k", "v", "out") for where in PLACES)),
    (c_int64, "bias_batch bias_head bias_query mask_batch mask_head mask_query relative_head"),
    (c_int64, "list_batch list_head list_query count_batch count_head"),
    (c_int64, "q_scale_batch q_scale_head k_scale_batch k_scale_head"),
    (c_int64, " ".join(f"{t}_{where}" for t in ("tail_k", "tail_v") for where in PLACES)),
    (c_int64, "tail_scale_batch tail_scale_head visited_batch visited_head visited_query"),
    (c_int, "q_length k_length heads_per_key_head window_left window_right relative_zero list_rows list_keys"),
    (c_int, "tail_length"),
    (c_float, "scale_log2 tail_log2"),
    (c_int, "is_bf16"),
)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    o = Operands.of(call.tensors, call.options)
    yield from wrong_dtype((torch.float16, torch.bfloat16), q=o.q)
    yield from wrong_dtype((o.q.dtype,), k=o.k, v=o.v)
    yield from head_obstacles(o.q, sorted((*HEADS, ONLY_INT8)))
    if not ways(call):
        what = word(o.q) if o.q.dtype is torch.bfloat16 else f"heads of {ONLY_INT8} elements"
        yield f"{what}: in 8 bits alone, which takes turbo, more than {SHORT} keys, and heads of at most {ONLY_INT8} elements"
    if o.q.shape[3] == WIDE and not o.plain:
        yield f"heads of {WIDE} elements are served without masks, windows and block lists only"
    if o.scale <= 0:
        yield f"scale is {o.scale}, the kernels take a positive one"
    if max(o.q.shape[1], o.k.shape[1]) > MOST_TOKENS:
        yield f"{max(o.q.shape[1], o.k.shape[1])} tokens exceed {MOST_TOKENS}"
    yield from rows_apart(q=o.q, k=o.k, v=o.v)
    yield from _mask_obstacles(o)
    yield from _list_obstacles(o)


def _mask_obstacles(o: Operands) -> Iterator[str]:
    if o.mask is None:
        return
    yield from wrong_dtype((torch.bool, o.q.dtype), mask=o.mask)
    if o.mask.shape[-1:] != o.k.shape[1:2] or (o.k.shape[1] > 1 and o.mask.stride(-1) != 1):
        yield f"mask: the keys of {list(o.mask.shape)} with strides {o.mask.stride()} are not adjacent"


def _list_obstacles(o: Operands) -> Iterator[str]:
    yield from wrong_dtype((torch.int32,), key_lengths=o.key_lengths)
    yield from wrong_dtype((torch.float32,), distance_bias=o.distance_bias)
    for name, vector in (("key_lengths", o.key_lengths), ("distance_bias", o.distance_bias)):
        if vector is not None and vector.shape[-1] > 1 and vector.stride(-1) != 1:
            yield f"{name} is not contiguous"
    if o.blocks is None:
        return
    yield from wrong_dtype((torch.int32,), block_keys=o.blocks.keys, block_counts=o.blocks.counts)
    if not o.blocks.keys.is_contiguous() or not o.blocks.counts.is_contiguous():
        yield "the block list is not contiguous"
    if o.blocks.rows % ROWS or o.blocks.size % TILE:
        yield f"blocks are {o.blocks.rows} x {o.blocks.size}, the kernels take multiples of {ROWS} x {TILE}"
    if o.tail is None:
        return
    yield from wrong_dtype((o.q.dtype,), tail_k=o.tail.k, tail_v=o.tail.v)
    yield from wrong_dtype((torch.int32,), visited=o.tail.visited)
    yield from rows_apart(tail_k=o.tail.k, tail_v=o.tail.v)
    if not o.tail.visited.is_contiguous():
        yield "the bits of the visited blocks are not contiguous"


@dataclass(frozen=True)
class Tactic:
    """How the tensor cores multiply and add: a precision; `turbo half`, which adds values in FP16 as `fast` does; or `turbo
    int8`, whose values are 8-bit numbers too."""

    precision: str

    @property
    def in_8_bits(self) -> bool:
        """Whether scores are products of 8-bit numbers."""
        return self.precision.startswith("turbo")

    def __str__(self) -> str:
        return self.precision

    @property
    def unit(self) -> str:
        return INT8_UNIT if self.rounds_values else UNIT

    @property
    def rounds_values(self) -> bool:
        return self.precision == "turbo_int8"


PRECISE, FAST, TURBO, TURBO_HALF, TURBO_INT8 = (
    Tactic(name) for name in ("precise", "fast", "turbo", "turbo_half", "turbo_int8")
)
WAYS = {"precise": [PRECISE], "fast": [FAST, PRECISE], "turbo": [TURBO_INT8, TURBO_HALF, TURBO, FAST, PRECISE]}


def ways(call: Call) -> list[Tactic]:
    """Each tier offers what is more precise too: where the card's fp32 accumulation is as quick, that may win."""
    o = Operands.of(call.tensors, call.options)
    d, long = o.q.shape[3], o.k.shape[1] > SHORT
    tier = WAYS[call.policy.attends]
    if TURBO_INT8 in tier and _asked(o) == "_general":  # whose code spills
        tier = [TURBO_HALF, TURBO, TURBO_INT8, FAST, PRECISE]
    if d == ONLY_INT8 or o.q.dtype is torch.bfloat16:
        return [tactic for tactic in tier if long and tactic.rounds_values and d in int8_heads.ROUNDED_HEADS]
    return [tactic for tactic in tier if (long and d != WIDE) or not tactic.in_8_bits]


def first_way(call: Call, card: Card) -> Tactic:
    """What is best by rule, where nothing was measured: half sums are for cards that add them faster."""
    pays = half_sums_pay(card.capability)
    return next(way for way in ways(call) if runs(call, card, way) and (pays or way is not TURBO_HALF))


def runs(call: Call, card: Card, way: Tactic) -> bool:
    """Whether the card's class has such kernels: without tensor cores those of bytes alone, and for heads of up to 128."""
    return card.has(way.unit) and (has_tensor_cores(card.capability) or call.first.shape[3] != ONLY_INT8)


# Of a kernel beside lengths and grouped heads: nothing, lists of blocks, everything.
ASKED = ("", "_listed", "_general")


def kernel_name(d: int, tactic: Tactic, asked: str) -> str:
    return f"attention_{d}_{tactic}{asked}"


def _asked(o: Operands) -> str:
    return "" if o.plain else "_listed" if o.whole_blocks else "_general"


# The pointers of a call's tensors, in its order. `{}` is `mask` of a mask of bool, `bias` of another.
POINTERS = "q k v {} key_lengths relative block_list block_counts tail_k tail_v visited"


def plan(call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
    """Fix lengths, strides, grid and kernel; what remains per call is the output and the pointers."""
    o = Operands.of(call.tensors, call.options)
    new_out = output(o.q.shape, o.q.dtype, card.index)
    if o.q.numel() == 0:
        return lambda *_: new_out()
    if o.k.shape[1] == 0:
        return lambda *_: new_out().zero_()
    tactic = tactic or first_way(call, card)
    heads = o.q.shape[2]
    if not tactic.in_8_bits:
        return plan_of(_launch(call, o, card, tactic, heads), _pointers(o), call.tensors, out=new_out)
    parts = list(int8_heads.pieces(o.q, o.k, tactic.rounds_values))
    if len(parts) < 2:
        launch = _in_8_bits(call, card, tactic, heads)

        def run(*tensors: Tensor | None) -> Tensor:
            out = new_out()
            launch(out, *tensors)
            return out

        return run
    # Some heads at a time: what is rounded lies beside what it was made of, and long videos fill a card of 8 GB.
    calls = (replace(call, tensors=of_heads(call.tensors, *part)) for part in parts)
    launches = [_in_8_bits(some, card, tactic, heads) for some in calls]

    def run_in_pieces(*tensors: Tensor | None) -> Tensor:
        out = new_out()
        for launch, part in zip(launches, parts, strict=True):
            launch(out[:, :, part[0]], *of_heads(tensors, *part))
        return out

    return run_in_pieces


def _pointers(o: Operands) -> str:
    return POINTERS.format("mask" if o.mask is None or o.mask.dtype is torch.bool else "bias")


def _in_8_bits(call: Call, card: Card, tactic: Tactic, all_heads: int) -> Callable[..., None]:
    """As `_launch`, with queries and keys that are rounded first. Takes the output and operands."""
    o = Operands.of(call.tensors, call.options)
    together = int8_heads.TILE if tactic.rounds_values else int8_heads.TOGETHER
    convert = int8_heads.plan(card, o, call.describe(), together)
    scaled = o.q, o.k, None if o.tail is None else o.tail.k  # scales are there where these are
    values = (o.v,) * 3 if tactic.rounds_values else ()
    names = f"out {_pointers(o)} q_scales k_scales tail_scales v_scales v_means v_sums"
    launch = plan_of(_launch(call, o, card, tactic, all_heads), names, (o.q, *call.tensors, *scaled, *values))
    convert_values = int8_heads.plan_values(card, o, call.describe()) if tactic.rounds_values else None

    def run(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, key_lengths: Maybe, *rest: Maybe) -> None:
        *lists, tail_k, tail_v, visited = rest
        (q, q_scales), (k, k_scales), (tail_k, tail_scales) = convert(q, k, key_lengths, tail_k)
        more: tuple[Tensor, ...] = ()
        if convert_values is not None:
            rounded, tail_v = convert_values(v, key_lengths, tail_v)
            v, more = rounded.numbers, rounded[1:]
        scales = q_scales, k_scales, tail_scales, *more
        launch(out, q, k, v, mask, key_lengths, *lists, tail_k, tail_v, visited, *scales)

    return run


def _launch(call: Call, o: Operands, card: Card, tactic: Tactic, all_heads: int) -> Launch:
    """The launch of a call, or of some heads of it, into a contiguous output with all heads."""
    b, s, h, d = o.q.shape
    kernel = card.kernel(tactic.unit, kernel_name(d, tactic, _asked(o)))
    rows, threads, shared_bytes = kernel.cut
    fields = {
        "q_length": s,
        "k_length": o.k.shape[1],
        "heads_per_key_head": h // o.k.shape[2],
        # Beyond all tokens nothing is hidden, and the kernels add the limits to places in 32 bits.
        "window_left": min(o.left, s + o.k.shape[1]),
        "window_right": min(o.right_limit, s + o.k.shape[1]),
        "relative_zero": s - 1,
        "scale_log2": o.scale * math.log2(math.e),
        "is_bf16": o.q.dtype is torch.bfloat16,
        "out_batch": s * all_heads * d,
        "out_token": all_heads * d,
        "out_head": d,
        **strides("batch token head", q=o.q, k=o.k, v=o.v),
        **strides("head", relative=o.distance_bias),
    }
    if o.mask is not None:
        mask, where = o.mask.expand(b, h, s, o.k.shape[1]), "batch head query"
        fields |= strides(where, mask=mask) if mask.dtype is torch.bool else strides(where, bias=mask)
    fields |= _of_lists(o) | (_of_8_bits(o, tactic) if tactic.in_8_bits else {})
    grid, shape = (-(-s // rows), h, b), call.describe()
    return kernel.prepare(AttentionParams(**fields), grid=grid, block=threads, shape=shape, shared_bytes=shared_bytes)


def _of_8_bits(o: Operands, tactic: Tactic) -> dict[str, Any]:
    """Strides of 8-bit queries, keys, values and means, in units of 2 bytes, and of their scales."""
    together = int8_heads.TILE if tactic.rounds_values else int8_heads.TOGETHER
    parts = [("q", "q_scale", o.q, 1, 0), ("k", "k_scale", o.k, together, int8_heads.list_block(o, together))]
    tiles = [("v", o.v)]
    if o.tail is not None:
        parts.append(("tail_k", "tail_scale", o.tail.k, together, 0))
        tiles.append(("tail_v", o.tail.v))
    fields: dict[str, int] = {}
    for name, scale, t, of, block in parts:
        _, tokens, heads, d = t.shape
        row, scales = int8_heads.pitch(d) // 2, int8_heads.scale_count(tokens, of, block)
        if of == int8_heads.TILE:
            tokens = scales * of
        fields |= {f"{name}_token": row, f"{name}_head": tokens * row, f"{name}_batch": heads * tokens * row}
        fields |= {f"{scale}_head": scales, f"{scale}_batch": heads * scales}
    for name, t in tiles if tactic.rounds_values else ():
        _, tokens, heads, d = t.shape
        head = -(-tokens // int8_heads.TILE) * int8_heads.TILE * d // 2
        fields |= {f"{name}_token": d // 2, f"{name}_head": head, f"{name}_batch": heads * head}
    return fields


def _of_lists(o: Operands) -> dict[str, Any]:
    """Sizes and strides of a block list and its tail: 0 where one serves all batch rows or heads."""
    if o.blocks is None:
        return {}
    keys, counts, rows, size = o.blocks
    fields = {"list_rows": rows, "list_keys": size, "list_query": keys.stride(2)}
    fields |= strides("batch head", used=True, list=keys, count=counts)
    if o.tail is None:
        return fields
    k, v, visited = o.tail
    fields |= strides("batch token head", tail_k=k, tail_v=v) | strides("batch head", used=True, visited=visited)
    return fields | {"visited_query": visited.stride(2), "tail_length": k.shape[1], "tail_log2": math.log2(size)}


def shape_class(call: Call) -> str:
    """Heads exactly, tokens to a power of two, and what is asked beside the plain product."""
    o = Operands.of(call.tensors, call.options)
    b, s, h, d = o.q.shape
    tokens = "x".join(str(round_up(n)) for n in (s, o.k.shape[1]))
    asked = [
        name
        for name, there in (
            ("causal", o.causal),
            ("window", o.left != NO_LIMIT or o.right != NO_LIMIT),
            ("lengths", o.key_lengths is not None),
            ("distance", o.distance_bias is not None),
            ("blocks", o.blocks is not None),
            ("tail", o.tail is not None),
        )
        if there
    ]
    if o.mask is not None:
        asked.append(f"mask {word(o.mask)} {'x'.join(map(str, o.mask.shape[:-2]))}")
    return f"{word(o.q)} {b}x{h}/{o.k.shape[2]}x{d} {tokens} {call.policy.attends} {' '.join(asked)}".rstrip()


KERNELS = (
    *(kernel_name(d, way, asked) for d in HEADS if d != WIDE for way in WAYS["turbo"][1:] for asked in ASKED),
    *(kernel_name(WIDE, tactic, "") for tactic in WAYS["fast"]),
)
INT8_KERNELS = tuple(kernel_name(d, TURBO_INT8, asked) for d in int8_heads.ROUNDED_HEADS for asked in ASKED)


ATTENTION = Op(
    name="attention",
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key_lengths, Tensor? distance_bias, Tensor? block_keys, "
        "Tensor? block_counts, Tensor? tail_k, Tensor? tail_v, Tensor? visited, float? scale, bool causal, int left, int right, "
        "int block_rows, int block_size, "
        "str policy) -> Tensor"
    ),
    reference=reference,
    fake=fake,
    candidates=(
        CudaCandidate("cuda", obstacles, plan, ways, runs=runs),
        attention_products.PRODUCTS,
        *(TorchBackend(name, backend) for name, backend in SERVING.items()),
        StockCandidate(stock, begins=stock_begins),
    ),
    shape_class=shape_class,
    validate=validate,
    others_race=True,  # torch takes flash before cuDNN, whoever is faster
    kernels={
        UNIT: KERNELS,
        INT8_UNIT: INT8_KERNELS,
        int8_heads.UNIT: int8_heads.KERNELS,
        attention_products.UNIT: attention_products.KERNELS,
    },
)
