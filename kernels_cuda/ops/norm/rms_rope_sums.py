"""rms_rope_sums: q and k normalised and turned, out of the sums of a product of two parts, rounded once.

The maths, the layout and the access pattern stand at the head of src/rms_rope_sums.cu.
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
from ..views.checks import check_eps, check_vector
from ..views.parts import check_sums, join
from .rms import WARPS, by_its_rms, check_halves, head_obstacles, turned, type_obstacles

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


class Operands(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def heads(self) -> int:
        """Of q and k, of all tokens."""
        _, batch, tokens, heads, _ = self.q.shape
        return batch * tokens * (heads + self.k.shape[3])


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(*given: Any) -> Pair:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    *tensors, eps = given
    return _made(Operands(*tensors), lambda x, weight: by_its_rms(x, eps) * weight)


def stock(*given: Any) -> Pair:
    """torch's norm in fp32, as stock runs it, and its rotation."""
    *tensors, eps = given
    return _made(Operands(*tensors), lambda x, weight: functional.rms_norm(x, x.shape[-1:], weight, eps))


def _made(o: Operands, norm: Callable[[Tensor, Tensor], Tensor]) -> Pair:
    """norm: of heads and weights of their type."""
    q, k = join(o.q), join(o.k)
    table = o.cos.transpose(1, 2), o.sin.transpose(1, 2)
    return turned(norm(q, o.q_weight.to(q.dtype)), *table), turned(norm(k, o.k_weight.to(k.dtype)), *table)


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


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    o = Operands(*call.operands)
    check_eps(call.options[0])
    for name, sums in (("q", o.q), ("k", o.k)):
        check_sums(name, sums)
        if sums.ndim != 5 or (*sums.shape[:3], sums.shape[4]) != (*o.q.shape[:3], o.q.shape[-1]):
            raise ValueError(f"{name}: {list(sums.shape)} is not [2, batch, tokens, heads, d] like q {list(o.q.shape)}")
    check_halves(o.q)
    _, batch, tokens, _, d = o.q.shape
    check_vector("q_weight", o.q_weight, d)
    check_vector("k_weight", o.k_weight, d)
    for name, t in (("cos", o.cos), ("sin", o.sin)):
        if t.shape[1:] != (1, tokens, d // 2) or t.shape[0] not in (1, batch):
            raise ValueError(f"{name}: {list(t.shape)} is not [1 or {batch}, 1, {tokens}, {d // 2}]")


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernel from serving a call."""
    o = Operands(*call.operands)
    of_floats = {"q": o.q, "k": o.k, "cos": o.cos, "sin": o.sin}
    yield from type_obstacles({"q_weight": o.q_weight, "k_weight": o.k_weight}, of_floats)
    yield from head_obstacles(o.q.shape[-1], o.heads, **o._asdict())


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the outputs and the pointers."""
    o = Operands(*call.operands)
    new_q, new_k = (output(t.shape[1:], torch.float16, card.index) for t in (o.q, o.k))
    names = "q k q_weight k_weight cosines sines"
    if not o.heads * o.q.shape[-1]:
        return plan_of((), names, call.tensors, q_out=new_q, k_out=new_k)
    _, batches, tokens, q_heads, d = o.q.shape
    params = RmsRopeSumsParams(
        batches=batches,
        tokens=tokens,
        q_heads=q_heads,
        k_heads=o.k.shape[3],
        d=d,
        eps=call.options[0],
        **strides("part batch token head", q=o.q, k=o.k),
        **strides("batch", used=True, cosines=o.cos, sines=o.sin),
        **strides("token", cosines=o.cos[0, 0], sines=o.sin[0, 0]),
        **floats(weight=o.q_weight),
    )
    launch = card.kernel("rms_rope_sums", "rms_rope_sums").prepare(
        params, grid=(-(-o.heads // WARPS), 1, 1), block=WARPS * 32, shape=call.describe()
    )
    return plan_of(launch, names, call.tensors, q_out=new_q, k_out=new_k)


def shape_class(call: Call) -> str:
    """Heads exactly, tokens to a power of two."""
    q, k, *_ = call.operands
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
