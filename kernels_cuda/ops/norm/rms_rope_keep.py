"""rms_rope_keep: of new tokens, queries and keys normalised and turned; keys and values put where they are kept.

The maths, the layout and the access pattern stand at the head of src/rms_rope_keep.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_float, c_int, c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan, round_up
from ...launcher import Card, Pointer, output, parameter_struct
from ...plans import floats, plan_of, strides
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_eps, check_vector, check_written, wrong_dtype
from ..views.half_range import saturated
from ..views.parts import PARTS, join
from ..views.rows import rows_apart
from .rms import WARPS, by_its_rms, check_halves, head_obstacles, turned, type_obstacles


def rms_rope_keep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    *,
    eps: float,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """RMSNorm of each head of q and k, then RoPE of elements j and j + d/2. What becomes of k, and v, are written to `keys` and
    `values`, from place `at` on.

    q, k, v       [1 or 2, batch, tokens, heads, d] fp32, parts that are added first; any strides but the last. k and v may have
                  other heads than q
    q_weight, k_weight  [d], fp16 or fp32
    cos, sin      [places, d/2] fp32, contiguous: of each place
    keys, values  [batch, places, key heads, d] fp16, any strides but the last. Written where the tokens belong
    at            [1] int32 on the same device: the place of the first token. No host reads it, so a graph may hold the call. What
                  lies behind the last place is not written, and its queries are zero
    Returns the queries as [batch, tokens, heads, d] fp16, contiguous. All saturate; NaN stays.
    """
    out: Tensor = RMS_ROPE_KEEP((q, k, v, q_weight, k_weight, cos, sin, keys, values, at), (eps,), policy)
    return out


class Operands(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    at: Tensor

    @property
    def heads(self) -> int:
        """Of q, k and v, of all tokens."""
        _, batch, tokens, heads, _ = self.q.shape
        return batch * tokens * (heads + 2 * self.k.shape[3])


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(*given: Any) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64; keys and values are written."""
    *tensors, eps = given
    return _kept(Operands(*tensors), lambda x, weight: by_its_rms(x, eps) * weight)


def stock(*given: Any) -> Tensor:
    """torch's norm in fp32, as stock runs it, its rotation and its copies into the cache."""
    *tensors, eps = given
    return _kept(Operands(*tensors), lambda x, weight: functional.rms_norm(x, x.shape[-1:], weight, eps))


def _kept(o: Operands, norm: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The queries; keys and values are written. norm: of heads and weights of their type.

    The host does not read where the tokens belong, because it would wait for the device. What belongs behind the last place
    leaves one of the first as it is, and its queries are zero.
    """
    places = o.at.long() + torch.arange(o.q.shape[2], device=o.at.device)
    room = o.keys.shape[1]
    exists, places = (places < room)[:, None, None], places % room
    table = [t.index_select(0, places)[:, None] for t in (o.cos, o.sin)]
    q, k, v = (_summed(x) for x in (o.q, o.k, o.v))
    made = turned(norm(k, o.k_weight.to(k.dtype)), *table)
    for kept, new in ((o.keys, made), (o.values, saturated(v).half())):
        kept.index_copy_(1, places, torch.where(exists, new, kept.index_select(1, places)))
    return turned(norm(q, o.q_weight.to(q.dtype)), *table).masked_fill(~exists, 0)


def _summed(x: Tensor) -> Tensor:
    return x[0].to(torch.promote_types(x.dtype, torch.float32)) if len(x) == 1 else join(x)


def fake(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[1:], dtype=torch.float16)


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors RmsRopeKeepParams in src/rms_rope_keep.cu, where each q, k and v are an array of three, and keys and values of two.
RmsRopeKeepParams = parameter_struct(
    "RmsRopeKeepParams",
    (Pointer, "q k v q_weight k_weight cosines sines keys values at out"),
    (c_int64, " ".join(f"{name}_{where}" for where in ("part", "batch", "token", "head") for name in "qkv")),
    (c_int64, " ".join(f"{name}_{where}" for where in ("batch", "token", "head") for name in ("keys", "values"))),
    (c_int64, "batches"),
    (c_int, "tokens q_heads k_heads places d parts"),
    (c_float, "eps"),
    (c_int, "weight_is_float"),
)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    o = Operands(*call.operands)
    check_eps(call.options[0])
    if o.q.ndim != 5 or o.q.shape[0] not in (1, PARTS):
        raise ValueError(f"q: {list(o.q.shape)} is not [1 or 2, batch, tokens, heads, d]")
    check_halves(o.q)
    parts, batch, tokens, _, d = o.q.shape
    for name, t in (("k", o.k), ("v", o.v)):
        if t.ndim != 5 or (*t.shape[:3], t.shape[4]) != (parts, batch, tokens, d) or t.shape != o.k.shape:
            raise ValueError(f"{name}: {list(t.shape)} is not [{parts}, {batch}, {tokens}, key heads, {d}]")
    check_vector("q_weight", o.q_weight, d)
    check_vector("k_weight", o.k_weight, d)
    heads = o.k.shape[3]
    for name, t in (("keys", o.keys), ("values", o.values)):
        if t.ndim != 4 or (t.shape[0], *t.shape[2:]) != (batch, heads, d) or t.shape != o.keys.shape:
            raise ValueError(f"{name}: {list(t.shape)} is not [{batch}, places, {heads}, {d}]")
    places = o.keys.shape[1]
    if tokens > places:
        raise ValueError(f"keys: {list(o.keys.shape)} has no room for {tokens} tokens")
    for name, t in (("cos", o.cos), ("sin", o.sin)):
        if t.shape != (places, d // 2):
            raise ValueError(f"{name}: {list(t.shape)} is not [{places}, {d // 2}]")
    if o.at.shape != (1,) or o.at.dtype is not torch.int32:
        raise ValueError(f"at: {o.at.dtype} {list(o.at.shape)} is not one int32")
    check_written({"keys": o.keys, "values": o.values}, {"q": o.q, "k": o.k, "v": o.v})


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernel from serving a call."""
    o = Operands(*call.operands)
    sums, tables = {"q": o.q, "k": o.k, "v": o.v}, {"cos": o.cos, "sin": o.sin}
    weights, kept = {"q_weight": o.q_weight, "k_weight": o.k_weight}, {"keys": o.keys, "values": o.values}
    yield from type_obstacles(weights, sums | tables)
    yield from wrong_dtype((torch.float16,), **kept)
    yield from head_obstacles(o.q.shape[-1], o.heads, **sums, **weights)
    for name, t in tables.items():
        if not t.is_contiguous() or t.data_ptr() % 8:
            yield f"{name} is not contiguous, or does not start at a multiple of 8 bytes"
    yield from rows_apart(**kept)


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the queries' output and the pointers."""
    o = Operands(*call.operands)
    new_out = output(o.q.shape[1:], torch.float16, card.index)
    if not o.heads * o.q.shape[-1]:
        return lambda *_: new_out()
    parts, batches, tokens, q_heads, d = o.q.shape
    params = RmsRopeKeepParams(
        batches=batches,
        tokens=tokens,
        q_heads=q_heads,
        k_heads=o.k.shape[3],
        places=o.keys.shape[1],
        d=d,
        parts=parts,
        eps=call.options[0],
        **strides("part batch token head", q=o.q, k=o.k, v=o.v),
        **strides("batch token head", keys=o.keys, values=o.values),
        **floats(weight=o.q_weight),
    )
    launch = card.kernel("rms_rope_keep", "rms_rope_keep").prepare(
        params, grid=(-(-o.heads // WARPS), 1, 1), block=WARPS * 32, shape=call.describe()
    )
    names = "q k v q_weight k_weight cosines sines keys values at"
    return plan_of(launch, names, call.tensors, out=new_out)


def shape_class(call: Call) -> str:
    """Heads exactly, tokens to a power of two."""
    q, k, *_ = call.operands
    parts, batch, tokens, heads, d = q.shape
    return f"{parts}x{round_up(batch * tokens)}x({heads}+{k.shape[3]})x{d}"


RMS_ROPE_KEEP = Op(
    name="rms_rope_keep",
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, Tensor(a!) keys, "
        "Tensor(b!) values, Tensor at, float eps, str policy) -> Tensor"
    ),
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels={"rms_rope_keep": ("rms_rope_keep",)},
)
