"""rms_rope_sums: q and k normalised and turned, out of the sums of a product of two parts, rounded once.

The maths, the layout and the access pattern stand at the head of src/rms_rope_sums.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan, round_up
from ...launcher import MAX_GRID, Card, Pointer, output, parameter_struct
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_eps, mixed_dtypes, wrong_dtype
from ..views.half_range import LARGEST
from ..views.parts import check_sums, join
from .rms import by_its_rms

TYPES = (torch.float16, torch.float32)
WARPS = 4  # kWarps: heads of a block
WIDEST = 256  # elements of a head
QUAD = 4  # of which its width is a multiple: pairs in either half

Pair = tuple[Tensor, Tensor]


def rms_rope_sums(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    policy: KernelPolicy = STANDARD,
) -> Pair:
    """RMSNorm of each head of q and k, then RoPE of elements j and j + d/2.

    q, k      [2, batch, tokens, heads, d] fp32, parts that are added first; any strides but the last. k may have other heads
    q_weight, k_weight  [d], fp16 or fp32
    cos, sin  [1 or batch, 1, tokens, d/2] fp32
    Returns both as [batch, tokens, heads, d] fp16, contiguous and saturated; NaN stays.
    """
    found: Pair = RMS_ROPE_SUMS((q, k, q_weight, k_weight, cos, sin), (eps,), policy)
    return found


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Pair:
    """The oracle, in fp32 or, for float64 inputs, in float64."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return by_its_rms(x, eps) * weight.to(x.dtype)

    return _turned(normed(join(q), q_weight), cos, sin), _turned(normed(join(k), k_weight), cos, sin)


def stock(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Pair:
    """torch's norm in fp32, as stock runs it, and its rotation."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)

    return _turned(normed(join(q), q_weight), cos, sin), _turned(normed(join(k), k_weight), cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, tokens, heads, d] as fp16."""
    cos, sin = (t.to(x.dtype).transpose(1, 2) for t in (cos, sin))
    low, high = x.chunk(2, -1)
    pair = torch.addcmul(cos * low, sin, high, value=-1), torch.addcmul(cos * high, sin, low)
    return torch.cat(pair, -1).clamp_(-LARGEST, LARGEST).half()


def fake(q: Tensor, k: Tensor, *_: object) -> Pair:
    return q.new_empty(q.shape[1:], dtype=torch.float16), k.new_empty(k.shape[1:], dtype=torch.float16)


# --------------------------------------------------------------------------------------------------------- the kernel


# Mirrors RmsRopeSumsParams in src/rms_rope_sums.cu, where each q and k are an array of two.
RmsRopeSumsParams = parameter_struct(
    "RmsRopeSumsParams",
    (Pointer, "q k q_weight k_weight cosines sines q_out k_out"),
    (c_int64, "q_part k_part q_batch k_batch q_token k_token q_head k_head"),
    (c_int64, "cosines_batch cosines_token sines_batch sines_token batches"),
    (c_int, "tokens q_heads k_heads d"),
    (c_float, "eps"),
    (c_int, "weight_is_float"),
)


def _named(call: Call) -> dict[str, Tensor]:
    names = ("q", "k", "q_weight", "k_weight", "cos", "sin")
    return {name: t for name, t in zip(names, call.tensors, strict=True) if t is not None}


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    t = _named(call)
    q, k = t["q"], t["k"]
    check_eps(call.options[0])
    for name, sums in (("q", q), ("k", k)):
        check_sums(name, sums)
        if sums.ndim != 5 or (*sums.shape[:3], sums.shape[4]) != (*q.shape[:3], q.shape[-1]):
            raise ValueError(f"{name}: {list(sums.shape)} is not [2, batch, tokens, heads, d] like q {list(q.shape)}")
    _, batch, tokens, _, d = q.shape
    if d % 2:
        raise ValueError(f"q: {list(q.shape)}, a head of {d} elements has no halves to turn")
    for name in ("q_weight", "k_weight"):
        if t[name].shape != (d,):
            raise ValueError(f"{name}: {list(t[name].shape)} is not [{d}]")
    for name in ("cos", "sin"):
        if t[name].shape[1:] != (1, tokens, d // 2) or t[name].shape[0] not in (1, batch):
            raise ValueError(f"{name}: {list(t[name].shape)} is not [1 or {batch}, 1, {tokens}, {d // 2}]")


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernel from serving a call."""
    t = _named(call)
    sums, tables = {name: t[name] for name in ("q", "k")}, {name: t[name] for name in ("cos", "sin")}
    weights = {name: t[name] for name in ("q_weight", "k_weight")}
    yield from wrong_dtype((torch.float32,), **sums, **tables)
    yield from wrong_dtype(TYPES, **weights)
    yield from mixed_dtypes(weights)
    d = t["q"].shape[-1]
    if d % QUAD or d > WIDEST:
        yield f"heads have {d} elements, the kernel takes multiples of {QUAD} up to {WIDEST}"
    for name, each in t.items():
        steps = [stride for size, stride in zip(each.shape[:-1], each.stride()[:-1], strict=True) if size > 1]
        if each.shape[-1] > 1 and each.stride(-1) != 1:
            yield f"{name}: elements are {each.stride(-1)} apart, not adjacent"
        if each.data_ptr() % (2 * each.element_size()) or any(step % 2 for step in steps):
            yield f"{name}: pairs of elements do not start at multiples of their size (strides {each.stride()})"
    if _heads(t) > MAX_GRID[0] * WARPS:
        yield f"{_heads(t)} heads of all tokens exceed a grid"


def _heads(t: dict[str, Tensor]) -> int:
    """Of q and k, of all tokens."""
    _, batch, tokens, heads, _ = t["q"].shape
    return batch * tokens * (heads + t["k"].shape[3])


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the outputs and the pointers."""
    t = _named(call)
    q, k = t["q"], t["k"]
    new_q, new_k = (output(each.shape[1:], torch.float16, card.index) for each in (q, k))
    if not _heads(t) * q.shape[-1]:
        return lambda *_: (new_q(), new_k())
    params = RmsRopeSumsParams(
        batches=q.shape[1],
        tokens=q.shape[2],
        q_heads=q.shape[3],
        k_heads=k.shape[3],
        d=q.shape[4],
        eps=call.options[0],
        weight_is_float=t["q_weight"].dtype is torch.float32,
    )
    for name in ("q", "k"):
        for where, stride in zip(("part", "batch", "token", "head"), t[name].stride(), strict=False):
            setattr(params, f"{name}_{where}", stride)
    for name, of in (("cos", "cosines"), ("sin", "sines")):
        setattr(params, f"{of}_batch", t[name].stride(0) if t[name].shape[0] > 1 else 0)
        setattr(params, f"{of}_token", t[name].stride(2))
    launch = card.kernel("rms_rope_sums", "rms_rope_sums").prepare(
        params, grid=(-(-_heads(t) // WARPS), 1, 1), block=WARPS * 32, shape=call.describe()
    )

    def run(*tensors: Tensor) -> Pair:
        made = new_q(), new_k()
        launch(*[each.data_ptr() for each in (*tensors, *made)])
        return made

    return run


def shape_class(call: Call) -> str:
    """Heads exactly, tokens to a power of two."""
    q, k = call.tensors[:2]
    assert q is not None and k is not None
    return f"{round_up(q.shape[1] * q.shape[2])}x({q.shape[3]}+{k.shape[3]})x{q.shape[4]}"


RMS_ROPE_SUMS = Op(
    name="rms_rope_sums",
    schema=(
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps, str policy) -> (Tensor, Tensor)"
    ),
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels={"rms_rope_sums": ("rms_rope_sums",)},
)
