"""attention: softmax(q k^T * scale + bias) v, with everything a video model asks of it in one kernel.

The maths, the layout, the access pattern and the range of the half accumulators stand at the head of src/attention.cu;
what torch can do of it, in sdpa.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import Call, Plan, round_up
from ..launcher import MAX_GRID, Card, Pointer, output, parameter_struct
from ..policy import STANDARD, KernelPolicy
from ..registry import CudaCandidate, Op, StockCandidate
from .attention_operands import NO_LIMIT, BlockList, Operands, validate
from .checks import word, wrong_dtype
from .sampling import LEAST
from .sdpa import BACKENDS, SERVING, TorchBackend, run_sdpa

HEADS = (64, 96, 128, 384)  # elements of a head the kernels were compiled for
WIDE = 384  # the VAE's single head has a kernel of its own
ALIGNED = 8  # elements: every row of q, k, v and out starts at a 16-byte boundary
REFERENCE_ROWS = 1024  # queries at a time: bounds what the reference holds
MOST_TOKENS = 2**30
# What the blocks of a list must be multiples of: the most queries of a block, the most keys of a tile.
ROWS, TILE = 256, 64


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
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """Attention of q over k and v, [batch, tokens, heads, d] fp16 each, with any strides but the last.

    k, v           may have other tokens than q, and fewer heads (grouped queries: head i of q sees head i // group)
    mask           broadcasts to [batch, heads, q tokens, k tokens]. bool: True may be seen; fp16: added to the scores
    scale          of the scores; None: 1 / sqrt(d)
    causal         query i sees keys up to i + (k tokens - q tokens): the last query sees the last key
    window         (left, right): query i sees keys from i + shift - left to i + shift + right, with the same shift;
                   -1: no limit on that side
    key_lengths    [batch] int32: keys from there on do not exist for that row of the batch
    distance_bias  [heads, q tokens + k tokens - 1] fp32, added to the scores: the value for key - query, from
                   1 - q tokens on. T5's relative positions, without the bias of every pair
    blocks         a list of the key blocks to visit (sliding tiles, top-k); what is not listed is not seen
    Returns a contiguous [batch, q tokens, heads, d]. A query that sees no key is zero. Softmax is fp32; with precision
    `fast` the tensor cores may accumulate in fp16, folded into fp32 every few steps.
    """
    listed = (None, None, 0, 0) if blocks is None else blocks
    out: Tensor = ATTENTION(
        (q, k, v, mask, key_lengths, distance_bias, listed[0], listed[1]),
        (scale, causal, *window, listed[2], listed[3]),
        policy,
    )
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(*arguments: object) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    o = Operands.of(arguments[:8], arguments[8:])  # type: ignore[arg-type]
    wide = torch.promote_types(o.q.dtype, torch.float32)
    group = o.q.shape[2] // max(o.k.shape[2], 1)
    k, v = (t.to(wide).repeat_interleave(group, 2).transpose(1, 2) for t in (o.k, o.v))
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


def stock(*arguments: object) -> Tensor:
    """What stock runs: torch's scaled_dot_product_attention, flash before cuDNN before mem-efficient before math."""
    return run_sdpa(Operands.of(arguments[:8], arguments[8:]), BACKENDS.values())  # type: ignore[arg-type]


def fake(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors AttentionParams in src/attention_params.cuh.
_PLACES = "batch token head"
AttentionParams = parameter_struct(
    "AttentionParams",
    (Pointer, "q k v out key_lengths bias mask relative block_list block_counts"),
    (c_int64, " ".join(f"{t}_{where}" for t in ("q", "k", "v", "out") for where in _PLACES.split())),
    (c_int64, "bias_batch bias_head bias_query mask_batch mask_head mask_query relative_head"),
    (c_int64, "list_batch list_head list_query count_batch count_head"),
    (c_int, "q_length k_length heads_per_key_head window_left window_right relative_zero list_rows list_keys"),
    (c_float, "scale_log2"),
)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    o = Operands.of(call.tensors, call.options)
    yield from wrong_dtype((torch.float16,), q=o.q, k=o.k, v=o.v)
    d = o.q.shape[3]
    if d not in HEADS:
        yield f"heads have {d} elements, the kernels serve {', '.join(map(str, HEADS))}"
    if d == WIDE and not o.plain:
        yield f"heads of {WIDE} elements are served without masks, windows and block lists only"
    if o.scale <= 0:
        yield f"scale is {o.scale}, the kernels take a positive one"
    if o.q.shape[2] > MAX_GRID[1] or o.q.shape[0] > MAX_GRID[2]:
        yield f"{o.q.shape[0]} x {o.q.shape[2]} batch rows and heads exceed a grid"
    if max(o.q.shape[1], o.k.shape[1]) > MOST_TOKENS:
        yield f"{max(o.q.shape[1], o.k.shape[1])} tokens exceed {MOST_TOKENS}"
    for name, t in (("q", o.q), ("k", o.k), ("v", o.v)):
        yield from _rows_apart(name, t)
    yield from _mask_obstacles(o)
    yield from _list_obstacles(o)


def _rows_apart(name: str, t: Tensor) -> Iterator[str]:
    if t.stride(3) != 1:
        yield f"{name}: elements of a head are {t.stride(3)} apart, not adjacent"
    strides = [stride for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True) if size > 1]
    if t.data_ptr() % 16 or any(stride % ALIGNED for stride in strides):
        yield f"{name}: rows do not start at multiples of 16 bytes (strides {t.stride()})"


def _mask_obstacles(o: Operands) -> Iterator[str]:
    if o.mask is None:
        return
    yield from wrong_dtype((torch.bool, torch.float16), mask=o.mask)
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


@dataclass(frozen=True)
class Tactic:
    """How the tensor cores accumulate."""

    precision: str

    def __str__(self) -> str:
        return self.precision


def ways(call: Call) -> list[Tactic]:
    """`fast` is an offer: where the card's fp32 accumulation is as quick, it may lose."""
    return [Tactic("fast"), Tactic("precise")] if call.policy.precision == "fast" else [Tactic("precise")]


def kernel_name(d: int, precision: str, general: bool) -> str:
    return f"attention_{d}_{precision}" + ("_general" if general else "")


def plan(call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
    """Fix lengths, strides, grid and kernel; what remains per call is the output and the pointers."""
    o = Operands.of(call.tensors, call.options)
    b, s, h, d = o.q.shape
    new_out = output(o.q.shape, torch.float16, card.index)
    if o.q.numel() == 0:
        return lambda *_: new_out()
    if o.k.shape[1] == 0:
        return lambda *_: new_out().zero_()
    tactic = tactic or ways(call)[0]
    general = not o.plain
    kernel = card.kernel("attention", kernel_name(d, tactic.precision, general))
    rows, threads, shared_bytes = kernel.cut
    bias = o.mask is not None and o.mask.dtype is not torch.bool
    params = AttentionParams(
        q_length=s,
        k_length=o.k.shape[1],
        heads_per_key_head=h // o.k.shape[2],
        window_left=o.left,
        window_right=o.right_limit,
        relative_zero=s - 1,
        scale_log2=o.scale * math.log2(math.e),
    )
    out_like = torch.empty(o.q.shape, dtype=torch.float16, device="meta")
    for name, t in (("q", o.q), ("k", o.k), ("v", o.v), ("out", out_like)):
        for where, stride in zip(_PLACES.split(), t.stride()[:3], strict=True):
            setattr(params, f"{name}_{where}", stride)
    if o.mask is not None:
        strides = o.mask.expand(b, h, s, o.k.shape[1]).stride()
        for where, stride in zip(("batch", "head", "query"), strides[:3], strict=True):
            setattr(params, f"{'bias' if bias else 'mask'}_{where}", stride)
    if o.distance_bias is not None:
        params.relative_head = o.distance_bias.stride(0)
    if o.blocks is not None:
        _fill_blocks(params, o.blocks)
    launch = kernel.prepare(
        params,
        grid=(-(-s // rows), h, b),
        block=threads,
        shape=call.describe(),
        shared_bytes=shared_bytes,
    )

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        key_lengths: Tensor | None,
        distance_bias: Tensor | None,
        listed: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        out = new_out()
        at = 0 if mask is None else mask.data_ptr()
        launch(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            0 if key_lengths is None else key_lengths.data_ptr(),
            at if bias else 0,
            0 if bias else at,
            0 if distance_bias is None else distance_bias.data_ptr(),
            0 if listed is None else listed.data_ptr(),
            0 if counts is None else counts.data_ptr(),
        )
        return out

    return run


def _fill_blocks(params: object, blocks: BlockList) -> None:
    """Strides of the list: 0 where a batch or head dimension is shared."""
    keys, counts = blocks.keys, blocks.counts
    values = {
        "list_rows": blocks.rows,
        "list_keys": blocks.size,
        "list_batch": keys.stride(0) if keys.shape[0] > 1 else 0,
        "list_head": keys.stride(1) if keys.shape[1] > 1 else 0,
        "list_query": keys.stride(2),
        "count_batch": counts.stride(0) if counts.shape[0] > 1 else 0,
        "count_head": counts.stride(1) if counts.shape[1] > 1 else 0,
    }
    for name, value in values.items():
        setattr(params, name, value)


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
        )
        if there
    ]
    if o.mask is not None:
        asked.append(f"mask {word(o.mask)} {'x'.join(map(str, o.mask.shape[:-2]))}")
    return f"{word(o.q)} {b}x{h}/{o.k.shape[2]}x{d} {tokens} {call.policy.precision} {' '.join(asked)}".rstrip()


KERNELS = tuple(
    kernel_name(d, precision, general)
    for d in HEADS
    for precision in ("precise", "fast")
    for general in ((False, True) if d != WIDE else (False,))
)


def sample(call: Call) -> tuple[Tensor | None, ...]:
    """Fewer queries, all keys, where every query sees all of them."""
    _, causal, left, right, *_ = call.options
    plain = not causal and left == right == NO_LIMIT and all(t is None for t in call.tensors[3:])
    q, k, v = call.tensors[:3]
    if not plain or q is None or k is None or v is None or q.shape[:2].numel() <= LEAST:
        return call.tensors
    return (q[:1, :LEAST], k[:1], v[:1], *call.tensors[3:])


ATTENTION = Op(
    name="attention",
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key_lengths, Tensor? distance_bias, Tensor? block_keys, "
        "Tensor? block_counts, float? scale, bool causal, int left, int right, int block_rows, int block_size, "
        "str policy) -> Tensor"
    ),
    reference=reference,
    fake=fake,
    candidates=(
        CudaCandidate("cuda", obstacles, plan, ways),
        *(TorchBackend(name, backend) for name, backend in SERVING.items()),
        StockCandidate(stock),
    ),
    shape_class=shape_class,
    sample=sample,
    validate=validate,
    kernels={"attention": KERNELS},
)
