"""linear_int8 and linear_int8_: `linear` with both matrices in 8 bits, a scale for each row of either.

The maths, the layout and the tiles stand at the head of src/linear_int8.cu; the operands and what else can compute it in
linear_int8_operands.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...call import Call, Plan, by_name
from ...launcher import Card, Launch, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import STANDARD, IsaClass, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..quant.rows_to_int8 import Int8Rows, prepare, row_obstacles
from ..views.checks import no_multiples, scattered, wrong_dtype, wrong_output
from ..views.rows import Rows, folded, row_view
from .linear import FIELDS, MOST, POINTERS, TYPES, Activation, Cut, class_of, parameters, places
from .linear_int8_operands import Int8Operands, KitchenLinear, compute, stock_compute, validate

UNIT = "linear_int8"
COLUMNS = 8  # n is a multiple: columns of an access to the result
BYTES = 16  # of an access to x and weight: k and their strides are multiples
LONGEST = 2**17 - BYTES  # k: of products of -128 with -128 more do not fit 31 bits

# How well each uses the tensor cores, once there is enough work: for choosing without measuring. Best known first.
CUTS: dict[Cut, dict[IsaClass, float]] = {
    Cut(128, 128): {"sm_80": 0.96, "sm_75": 1.0},
    Cut(192, 128, 96): {"sm_80": 1.0, "sm_75": 0.5},
    Cut(128, 256): {"sm_80": 0.96, "sm_75": 0.89},
    Cut(64, 128): {"sm_80": 0.9, "sm_75": 0.71},
}


@dataclass(frozen=True)
class Tactic:
    """The tile."""

    cut: Cut

    def __str__(self) -> str:
        return f"{self.cut.rows}x{self.cut.columns}"


def linear_int8(
    x: Tensor | Int8Rows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    rotation: int = 0,
    activation: Activation = "none",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float = 1.0,
    saturate: bool = False,
    out_dtype: torch.dtype | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """residual + gate * activation(scale * (x8 @ weight^T) * x_scale * weight_scale + bias), each part optional.

    x             [batch, ..., k] fp16, rounded to x8 with a scale for each row; or what `rows_to_int8` made of it, if several
                  products have the same input
    weight        [n, k] int8, rows may be apart
    weight_scale  fp32: one element, or one for each row of the weight ([n] or [n, 1])
    rotation      the group in which the weight's rows were turned before they were rounded, 0 if they were not: x is turned
                  alike. Rows that are rounded already were turned then
    The rest is as `linear` has it. The sums are exact; all that follows is fp32, and rounded once.
    """
    numbers, scales = x if isinstance(x, Int8Rows) else (x, None)
    tensors = (numbers, scales, weight, weight_scale, bias, residual, gate)
    out: Tensor = LINEAR_INT8(tensors, (activation, scale, saturate, rotation, out_dtype), policy)
    return out


def linear_int8_(
    out: Tensor,
    x: Tensor | Int8Rows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    rotation: int = 0,
    activation: Activation = "none",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float = 1.0,
    saturate: bool = False,
    policy: KernelPolicy = STANDARD,
) -> None:
    """`linear_int8`, written to `out`, [batch, ..., n] fp16 or fp32 with rows anywhere. The residual may be `out` itself."""
    numbers, scales = x if isinstance(x, Int8Rows) else (x, None)
    tensors = (out, numbers, scales, weight, weight_scale, bias, residual, gate)
    LINEAR_INT8_(tensors, (activation, scale, saturate, rotation), policy)


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors LinearInt8Params in src/linear_int8.cu.
LinearInt8Params = parameter_struct(
    "LinearInt8Params", (Pointer, f"x_scale weight_scale {POINTERS}"), *FIELDS, (c_int, "weight_scale_step")
)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call. Later checks rely on earlier ones having passed."""
    o = Int8Operands.of_call(call)
    p = o.plain
    yield from wrong_dtype((torch.int8,), weight=p.weight)
    yield from wrong_dtype((torch.float16, torch.int8), x=p.x)
    yield from wrong_dtype((torch.float32,), x_scale=o.x_scale, weight_scale=o.weight_scale)
    yield from wrong_dtype(TYPES, bias=p.bias, residual=p.residual, gate=p.gate)
    yield from wrong_output(TYPES, p.out_dtype)
    if not p.m * p.n:
        return  # nothing to compute, and nothing to refuse
    if not p.k:
        yield "k is 0: there is nothing to multiply"
    yield from no_multiples(BYTES, k=p.k)
    yield from no_multiples(COLUMNS, n=p.n)
    if p.k > LONGEST:
        yield f"k is {p.k}, and sums of more than {LONGEST} products do not fit 32 bits"
    if max(p.m, p.n) > MOST:
        yield f"a size of {p.m} x {p.n} x {p.k} exceeds {MOST}"
    yield from scattered(x_scale=o.x_scale, weight_scale=o.weight_scale)
    if o.x_scale is None:
        yield from row_obstacles(p.x)
        p = o.rounded(torch.empty(p.x.shape, dtype=torch.int8, device="meta"))
    yield from places(p)


def ways(_call: Call) -> list[Tactic]:
    return [Tactic(cut) for cut in CUTS]


def best_cut(m: int, n: int, multiprocessors: int, isa: IsaClass) -> Cut:
    """The least time by rule, as `linear` has it."""
    return min(CUTS, key=lambda cut: cut.cost(m, n, False, multiprocessors) / CUTS[cut][isa])


def plan(call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the outputs and the pointers."""
    o = Int8Operands.of_call(call)
    p = o.plain
    new_out = output(p.shape, p.out_dtype, card.index)
    if not p.m * p.n:
        return (lambda *_: new_out()) if p.out is None else (lambda *_: None)
    names = "x x_scale weight weight_scale bias residual gate"
    names = names if p.out is None else f"out {names}"
    if o.x_scale is not None:
        return plan_of(_prepare(call, o, card, tactic), names, call.tensors, out=new_out)
    rounding = prepare(card, p.x, o.rotation, call.describe())
    rounded = replace(o, plain=o.rounded(torch.empty(p.x.shape, dtype=torch.int8, device="meta")))
    first = 0 if p.out is None else 1  # x's place
    given = (*call.tensors[: first + 1], p.x, *call.tensors[first + 2 :])  # with scales, wherever those will be
    run = plan_of(_prepare(call, rounded, card, tactic), names, given, out=new_out)
    if p.out is None:
        return lambda x, _, *rest: run(*rounding(x), *rest)
    return lambda out, x, _, *rest: run(out, *rounding(x), *rest)


def _prepare(call: Call, o: Int8Operands, card: Card, tactic: Tactic | None) -> Launch:
    x, weight = folded(row_view(o.plain.x)), row_view(o.plain.weight)
    params = LinearInt8Params(
        **parameters(o.plain, in_pairs(x), in_pairs(weight)), weight_scale_step=int(o.weight_scale.numel() > 1)
    )
    cut = (tactic or Tactic(best_cut(o.plain.m, o.plain.n, card.multiprocessors, card.isa_class(UNIT)))).cut
    kernel = card.kernel(UNIT, kernel_name(cut))
    threads, shared_bytes = kernel.cut
    return kernel.prepare(
        params,
        grid=(cut.tiles(x.tokens, o.plain.n, False), x.batches, 1),
        block=threads,
        shape=call.describe(),
        shared_bytes=shared_bytes,
    )


def in_pairs(view: Rows) -> Rows:
    """Two bytes are moved as one half would be."""
    return Rows(view.batches, view.tokens, view.d // 2, view.batch_stride // 2, view.row_stride // 2)


def kernel_name(cut: Cut) -> str:
    return f"linear_int8_{cut.rows}x{cut.columns}"


def shape_class(call: Call) -> str:
    o = Int8Operands.of_call(call)
    scales = "a scale per row" if o.weight_scale.numel() > 1 else "one scale"
    return f"{class_of(o.plain, scales)} rotation {o.rotation}"


# ----------------------------------------------------------------------------------------------------------- the ops


def _empty(o: Int8Operands) -> Tensor:
    return o.plain.x.new_empty(o.plain.shape, dtype=o.plain.out_dtype)


_OF = partial(Int8Operands.of, "linear_int8")
reference, stock, fake = (by_name(_OF, 7, run) for run in (compute, stock_compute, _empty))


_TENSORS = "Tensor x, Tensor? x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? residual, Tensor? gate"
_OPTIONS = "str activation, float scale, bool saturate, int rotation"
_OURS = CudaCandidate("cuda", obstacles, plan, ways)
_KERNELS = {UNIT: tuple(kernel_name(cut) for cut in CUTS)}

LINEAR_INT8 = Op(
    name="linear_int8",
    schema=f"({_TENSORS}, {_OPTIONS}, ScalarType? out_dtype, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(_OURS, StockCandidate(stock), KitchenLinear()),
    shape_class=shape_class,
    validate=validate,
    kernels=_KERNELS,
)

LINEAR_INT8_ = LINEAR_INT8.into("linear_int8_")
