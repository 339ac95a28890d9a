"""decode_attention: the attention of one new token of each sequence over the keys that were kept.

The maths, the layout and the access pattern stand at the head of src/decode_attention.cu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...call import Call, Plan, round_up
from ...launcher import Card, Pointer, output, parameter_struct
from ...plans import plan_of, strides
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import wrong_dtype
from ..views.rows import head_obstacles, rows_apart
from .attention_operands import NO_LIMIT

HEADS = (64, 128)  # elements of a head the kernels were compiled for
TOGETHER = (1, 2, 4)  # heads of queries that share a head of keys, of a block
THREADS = 128  # kThreads
FEWEST_KEYS = 64  # of a part: with fewer, joining the parts takes as long as a part
WAVES = 2  # blocks of a multiprocessor
MOST_PARTS = 256


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    *,
    scale: float | None = None,
    window: int = NO_LIMIT,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """softmax(q k^T * scale) v over keys 0 to `at`, or over the last of them.

    q             [batch, 1, heads, d] fp16, any strides but the last
    keys, values  [batch, room, key heads, d] fp16, any strides but the last: room for more keys than there are. heads is a
                  multiple of key heads: head i sees key head i // group
    at            [1] int32 on the same device: the last key that is seen; behind the room, all are. No host reads it, so a graph
                  may hold the call
    scale         of the scores; None: 1 / sqrt(d)
    window        keys from `at` - window on are seen; -1: all
    Returns [batch, 1, heads, d] fp16, contiguous. Scores, softmax and sums are fp32. Of q, keys and values in fp32 torch makes
    an fp32 result.
    """
    out: Tensor = DECODE_ATTENTION((q, keys, values, at), (scale, window), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(q: Tensor, keys: Tensor, values: Tensor, at: Tensor, scale: float | None, window: int) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(q.dtype, torch.float32)
    seen, group = int(at) + 1, q.shape[2] // keys.shape[2]
    first = 0 if window < 0 else max(0, seen - 1 - window)
    k, v = (t[:, first:seen].to(wide).repeat_interleave(group, 2).transpose(1, 2) for t in (keys, values))
    scores = (q.to(wide).transpose(1, 2) @ k.transpose(-1, -2)) * _scale(q, scale)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).to(q.dtype).contiguous()


def stock(q: Tensor, keys: Tensor, values: Tensor, at: Tensor, scale: float | None, window: int) -> Tensor:
    """torch's, over all of the room under a mask: what has no kernel for it does where the host is not to wait."""
    places = torch.arange(keys.shape[1], device=at.device)
    mask = places <= at if window < 0 else (places <= at) & (places >= at - window)
    # Room that nobody wrote to yet may hold anything, and zero times infinity is no zero.
    nothing = torch.zeros((), dtype=values.dtype, device=values.device)
    k, v = (torch.where(mask[:, None, None], t, nothing).transpose(1, 2) for t in (keys, values))
    out = scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask[None, None, None], scale=_scale(q, scale), enable_gqa=True
    )
    return out.transpose(1, 2).contiguous()


def fake(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors DecodeParams in src/decode_attention.cu.
DecodeParams = parameter_struct(
    "DecodeParams",
    (Pointer, "q keys values at out part_sums part_heads"),
    (c_int64, "keys_batch keys_token keys_head values_batch values_token values_head"),
    (c_int64, "q_batch q_head"),
    (c_int, "heads group blocks_of_group parts d room"),
    (c_float, "scale_log2"),
)


def validate(call: Call) -> None:
    """Shapes that no implementation could serve."""
    q, keys, values, at = call.operands
    if q.ndim != 4 or q.shape[1] != 1:
        raise ValueError(f"q: {list(q.shape)} is not [batch, 1, heads, d]")
    b, _, h, d = q.shape
    if keys.ndim != 4 or (keys.shape[0], keys.shape[3]) != (b, d) or keys.shape[2] == 0 or h % keys.shape[2]:
        raise ValueError(f"keys: {list(keys.shape)} is not [{b}, room, heads, {d}] with heads that divide {h}")
    if values.shape != keys.shape:
        raise ValueError(f"values: {list(values.shape)} is not the keys' shape {list(keys.shape)}")
    if keys.shape[1] == 0:
        raise ValueError(f"keys: {list(keys.shape)}, there is no key to see")
    if at.shape != (1,) or at.dtype is not torch.int32:
        raise ValueError(f"at: {at.dtype} {list(at.shape)} is not one int32")


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    q, keys, values, _ = call.operands
    yield from wrong_dtype((torch.float16,), q=q, keys=keys, values=values)
    yield from head_obstacles(q, HEADS)
    if _scale(q, call.options[0]) <= 0:
        yield f"scale is {call.options[0]}, the kernels take a positive one"
    if call.options[1] >= 0:
        yield "only the last keys are to be seen, the kernels see all"
    yield from rows_apart(q=q, keys=keys, values=values)
    if keys.shape[1] >= 2**31 - 2**16:
        yield f"room for {keys.shape[1]} keys exceeds 31 bits"


def together(group: int) -> int:
    """Heads of queries that a block takes."""
    return next((one for one in TOGETHER if one >= group), TOGETHER[-1])


def parts_for(room: int, blocks: int, multiprocessors: int) -> int:
    """In how many parts keys are dealt to blocks. blocks: that there are for each part."""
    wanted = -(-WAVES * multiprocessors // blocks)
    return max(1, min(wanted, -(-room // FEWEST_KEYS), MOST_PARTS))


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix sizes, strides, grids and kernels; what remains per call is memory and pointers. How many keys there are the kernel
    reads on the device; how they are dealt follows from the room for them."""
    q, keys, values, _ = call.operands
    b, _, h, d = q.shape
    new_out = output(q.shape, torch.float16, card.index)
    if not q.numel():
        return lambda *_: new_out()
    group = h // keys.shape[2]
    each = together(group)
    blocks = keys.shape[2] * -(-group // each)
    parts = parts_for(keys.shape[1], blocks * b, card.multiprocessors)
    params = DecodeParams(
        q_batch=q.stride(0) if b > 1 else 0,
        q_head=q.stride(2),
        heads=h,
        group=group,
        blocks_of_group=-(-group // each),
        parts=parts,
        d=d,
        room=keys.shape[1],
        scale_log2=_scale(q, call.options[0]) * math.log2(math.e),
        **strides("batch token head", used=True, keys=keys, values=values),
    )
    what = call.describe()
    over = card.kernel("decode_attention", f"decode_attention_{d}_{each}").prepare(
        params, grid=(parts, blocks, b), block=THREADS, shape=what
    )
    join = card.kernel("decode_attention", "decode_attention_join").prepare(params, grid=(h, b, 1), block=d, shape=what)
    scratch = {
        "part_sums": output((b, h, parts, d), torch.float32, card.index),
        "part_heads": output((b, h, parts, 2), torch.float32, card.index),
    }
    return plan_of((over, join), "q keys values at", call.tensors, scratch=scratch, out=new_out)


def shape_class(call: Call) -> str:
    """Heads exactly, room to a power of two."""
    q, keys, *_ = call.operands
    return f"{q.shape[0]}x{q.shape[2]}/{keys.shape[2]}x{q.shape[3]} {round_up(keys.shape[1])}"


DECODE_ATTENTION = Op(
    name="decode_attention",
    schema="(Tensor q, Tensor keys, Tensor values, Tensor at, float? scale, int window, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels={
        "decode_attention": (
            *(f"decode_attention_{d}_{each}" for d in HEADS for each in TOGETHER),
            "decode_attention_join",
        )
    },
)
