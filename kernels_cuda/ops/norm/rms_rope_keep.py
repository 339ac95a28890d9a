"""rms_rope_keep: of new tokens, queries and keys normalised and turned; keys and values put where they are kept.

The maths, the layout and the access pattern stand at the head of src/rms_rope_keep.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan, round_up
from ...launcher import MAX_GRID, Card, Pointer, output, parameter_struct
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_eps, check_written, mixed_dtypes, wrong_dtype
from ..views.half_range import LARGEST
from ..views.parts import PARTS
from ..views.rows import rows_apart
from .rms import by_its_rms

TYPES = (torch.float16, torch.float32)
WARPS = 4  # kWarps: heads of a block
WIDEST = 256  # elements of a head
QUAD = 4  # of which its width is a multiple: pairs in either half


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
                  lies behind the last place is not written
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


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(*given: object) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64; keys and values are written."""
    o, eps = Operands(*given[:-1]), given[-1]  # type: ignore[arg-type]
    return _kept(o, lambda x, weight: by_its_rms(x, eps) * weight.to(x.dtype))  # type: ignore[arg-type]


def stock(*given: object) -> Tensor:
    """torch's norm in fp32, as stock runs it, its rotation and its copies into the cache."""
    o, eps = Operands(*given[:-1]), given[-1]  # type: ignore[arg-type]
    return _kept(o, lambda x, weight: functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps))  # type: ignore[arg-type]


def _kept(o: Operands, norm: object) -> Tensor:
    """A host that read where the tokens belong would wait for the device."""
    places = o.at.long() + torch.arange(o.q.shape[2], device=o.at.device)
    cos, sin = (t.index_select(0, places)[:, None] for t in (o.cos, o.sin))
    q, k = (
        _turned(norm(_summed(x), weight), cos, sin)  # type: ignore[operator]
        for x, weight in ((o.q, o.q_weight), (o.k, o.k_weight))
    )
    for kept, made in ((o.keys, k), (o.values, _halved(_summed(o.v)))):
        kept.index_copy_(1, places, made)
    return q


def _summed(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x[0].to(wide) if len(x) == 1 else x[0].to(wide) + x[1].to(wide)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, tokens, heads, d] as fp16."""
    low, high = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return _halved(torch.cat((torch.addcmul(cos * low, sin, high, value=-1), torch.addcmul(cos * high, sin, low)), -1))


def _halved(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).half()


def fake(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[1:], dtype=torch.float16)


# --------------------------------------------------------------------------------------------------------- the kernel

NAMES = ("q", "k", "v")

# Mirrors RmsRopeKeepParams in src/rms_rope_keep.cu, where each q, k and v are an array of three, and keys and values of two.
RmsRopeKeepParams = parameter_struct(
    "RmsRopeKeepParams",
    (Pointer, "q k v q_weight k_weight cosines sines keys values at out"),
    (c_int64, " ".join(f"{name}_{where}" for where in ("part", "batch", "token", "head") for name in NAMES)),
    (c_int64, " ".join(f"{name}_{where}" for where in ("batch", "token", "head") for name in ("keys", "values"))),
    (c_int64, "batches"),
    (c_int, "tokens q_heads k_heads places d parts"),
    (c_float, "eps"),
    (c_int, "weight_is_float"),
)


def _operands(call: Call) -> Operands:
    return Operands(*call.tensors)  # type: ignore[arg-type]


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    o = _operands(call)
    check_eps(call.options[0])
    if o.q.ndim != 5 or o.q.shape[0] not in (1, PARTS):
        raise ValueError(f"q: {list(o.q.shape)} is not [1 or 2, batch, tokens, heads, d]")
    parts, batch, tokens, _, d = o.q.shape
    if d % 2:
        raise ValueError(f"q: {list(o.q.shape)}, a head of {d} elements has no halves to turn")
    for name, t in (("k", o.k), ("v", o.v)):
        if t.ndim != 5 or (*t.shape[:3], t.shape[4]) != (parts, batch, tokens, d) or t.shape != o.k.shape:
            raise ValueError(f"{name}: {list(t.shape)} is not [{parts}, {batch}, {tokens}, key heads, {d}]")
    for name, t in (("q_weight", o.q_weight), ("k_weight", o.k_weight)):
        if t.shape != (d,):
            raise ValueError(f"{name}: {list(t.shape)} is not [{d}]")
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
    o = _operands(call)
    sums, tables = {"q": o.q, "k": o.k, "v": o.v}, {"cos": o.cos, "sin": o.sin}
    weights, kept = {"q_weight": o.q_weight, "k_weight": o.k_weight}, {"keys": o.keys, "values": o.values}
    yield from wrong_dtype((torch.float32,), **sums, **tables)
    yield from wrong_dtype(TYPES, **weights)
    yield from wrong_dtype((torch.float16,), **kept)
    yield from mixed_dtypes(weights)
    d = o.q.shape[-1]
    if d % QUAD or d > WIDEST:
        yield f"heads have {d} elements, the kernel takes multiples of {QUAD} up to {WIDEST}"
    for name, t in {**sums, **weights}.items():
        steps = [stride for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1]
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            yield f"{name}: elements are {t.stride(-1)} apart, not adjacent"
        if t.data_ptr() % (2 * t.element_size()) or any(step % 2 for step in steps):
            yield f"{name}: pairs of elements do not start at multiples of their size (strides {t.stride()})"
    for name, t in tables.items():
        if not t.is_contiguous() or t.data_ptr() % 8:
            yield f"{name} is not contiguous, or does not start at a multiple of 8 bytes"
    for name, t in kept.items():
        yield from rows_apart(name, t)
    if _heads(o) > MAX_GRID[0] * WARPS:
        yield f"{_heads(o)} heads of all tokens exceed a grid"


def _heads(o: Operands) -> int:
    """Of q, k and v, of all tokens."""
    _, batch, tokens, heads, _ = o.q.shape
    return batch * tokens * (heads + 2 * o.k.shape[3])


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the queries' output and the pointers."""
    o = _operands(call)
    new_out = output(o.q.shape[1:], torch.float16, card.index)
    if not _heads(o) * o.q.shape[-1]:
        return lambda *_: new_out()
    params = RmsRopeKeepParams(
        batches=o.q.shape[1],
        tokens=o.q.shape[2],
        q_heads=o.q.shape[3],
        k_heads=o.k.shape[3],
        places=o.keys.shape[1],
        d=o.q.shape[4],
        parts=o.q.shape[0],
        eps=call.options[0],
        weight_is_float=o.q_weight.dtype is torch.float32,
    )
    for name, t in zip(NAMES, (o.q, o.k, o.v), strict=True):
        for where, stride in zip(("part", "batch", "token", "head"), t.stride(), strict=False):
            setattr(params, f"{name}_{where}", stride)
    for name, t in (("keys", o.keys), ("values", o.values)):
        for where, stride in zip(("batch", "token", "head"), t.stride(), strict=False):
            setattr(params, f"{name}_{where}", stride)
    launch = card.kernel("rms_rope_keep", "rms_rope_keep").prepare(
        params, grid=(-(-_heads(o) // WARPS), 1, 1), block=WARPS * 32, shape=call.describe()
    )

    def run(*tensors: Tensor) -> Tensor:
        made = new_out()
        launch(*[t.data_ptr() for t in (*tensors, made)])
        return made

    return run


def shape_class(call: Call) -> str:
    """Heads exactly, tokens to a power of two."""
    o = _operands(call)
    parts, batch, tokens, heads, d = o.q.shape
    return f"{parts}x{round_up(batch * tokens)}x({heads}+{o.k.shape[3]})x{d}"


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
