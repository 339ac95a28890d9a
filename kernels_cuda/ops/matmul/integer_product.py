"""The kernels of linear_int8, linear_int4 and their pairs: what keeps them from a call, how the work is cut, how it is launched.

The tiles stand in src/linear_integers.cuh; the operands and what else can compute it in integer_operands.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_int
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...binary.arch import has_int4
from ...call import Call, Candidate, Plan, by_name
from ...launcher import Card, Launch, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import IsaClass
from ...registry import CudaCandidate, Op, StockCandidate
from ..quant.integer_rows import TYPES as ROW_TYPES
from ..quant.integer_rows import row_obstacles
from ..views.checks import mixed_dtypes, no_multiples, scattered, wrong_dtype, wrong_output
from ..views.rows import Rows, folded, row_view
from .integer_operands import IntegerOperands, compute, stock_compute, validate
from .linear import FIELDS, MOST, POINTERS, TYPES, Cut, class_of, parameters, places
from .linear_operands import Operands

WARP_ROWS = 64  # of a warp's tile that leaves registers for unpacking
COLUMNS = 8  # n is a multiple: columns of an access to the result
BYTES = 16  # of an access to x and weight: bytes of a row and their strides are multiples
BESIDE = (*TYPES, torch.bfloat16)  # of what is read and written behind the sums
LONGEST = 2**17 - BYTES  # k: of products of -128 with -128 more do not fit 31 bits

# Mirrors LinearIntegerParams in src/linear_integers.cuh.
LinearIntegerParams = parameter_struct(
    "LinearIntegerParams",
    (Pointer, f"x_scale weight_scale up_scale {POINTERS}"),
    *FIELDS,
    (c_int, "weight_scale_step beside_is_bf16 out_is_bf16"),
)


@dataclass(frozen=True)
class Tactic:
    """The tile."""

    cut: Cut

    def __str__(self) -> str:
        return f"{self.cut.rows}x{self.cut.columns}"


@dataclass(frozen=True)
class IntegerProduct:
    """An op that multiplies integers, and its kernels."""

    unit: str  # the kernels', and the name of the op of one weight
    # How well each uses the tensor cores, once there is enough work: for choosing without measuring. Best known first.
    cuts: dict[Cut, dict[IsaClass, float]]

    def op(self, *others: Candidate) -> Op:
        """`linear` of integers. others: candidates beside our kernel and torch's own operations."""
        return self._op(self.unit, "Tensor? bias, Tensor? residual, Tensor? gate", *others)

    def pair(self) -> Op:
        """`linear_pair` of integers."""
        return self._op(f"{self.unit}_pair", "Tensor up, Tensor up_scale")

    def stock(self, *, paired: bool = False) -> Callable[..., Tensor]:
        """What stock runs, as the op calls it."""
        return self._named(stock_compute, paired)

    def _named(self, run: Callable[[IntegerOperands], Tensor], paired: bool) -> Callable[..., Tensor]:
        name, count = (f"{self.unit}_pair", 6) if paired else (self.unit, 7)
        return by_name(partial(IntegerOperands.of, name), count, run)

    def _op(self, name: str, more: str, *others: Candidate) -> Op:
        tensors = f"Tensor x, Tensor? x_scale, Tensor weight, Tensor weight_scale, {more}"
        options = "str activation, float scale, bool saturate, int rotation"
        paired = name != self.unit
        return Op(
            name=name,
            schema=f"({tensors}, {options}, ScalarType? out_dtype, str policy) -> Tensor",
            reference=self._named(compute, paired),
            fake=self._named(_empty, paired),
            candidates=(
                CudaCandidate("cuda", obstacles, self.plan, self.ways, runs=self.runs),
                StockCandidate(self.stock(paired=paired)),
                *others,
            ),
            shape_class=shape_class,
            validate=validate,
            kernels={self.unit: tuple(f"{name}_{cut.rows}x{cut.columns}" for cut in self.cuts)},
        )

    def cuts_of(self, isa: IsaClass | None) -> list[Cut]:
        """The tiles that a class has kernels of; None: of a class with tensor cores."""
        return [cut for cut, classes in self.cuts.items() if isa is None or isa in classes]

    def ways(self, _call: Call) -> list[Tactic]:
        return [Tactic(cut) for cut in self.cuts]

    def runs(self, _call: Call, card: Card, tactic: Tactic) -> bool:
        """Whether the card's class has kernels of this tile."""
        return card.isa_class(self.unit) in self.cuts[tactic.cut]

    def best_cut(
        self, m: int, n: int, multiprocessors: int, isa: IsaClass, *, paired: bool = False, unpacks: bool = False
    ) -> Cut:
        """The least time by rule, as `linear` has it. unpacks: numbers become bytes in registers, which warps of more than 64
        rows have none left for."""
        able = (cut for cut, of in self.cuts.items() if isa in of and (not unpacks or cut.warp_rows <= WARP_ROWS))
        return min(able, key=lambda cut: cut.cost(m, n, paired, multiprocessors) / self.cuts[cut][isa])

    def kernel_name(self, cut: Cut, *, paired: bool = False) -> str:
        return f"{self.unit}{'_pair' if paired else ''}_{cut.rows}x{cut.columns}"

    def plan(self, call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
        """Fix sizes, strides, grid and kernel; what remains per call is the outputs and the pointers."""
        o = IntegerOperands.of_call(call)
        p = o.plain
        new_out = output(p.shape, p.out_dtype, card.index)
        if not p.m * p.n:
            return (lambda *_: new_out()) if p.out is None else (lambda *_: None)
        names = "x x_scale weight weight_scale " + ("up up_scale" if p.paired else "bias residual gate")
        names = names if p.out is None else f"out {names}"
        if o.x_scale is not None:
            return plan_of(self._prepare(call, o, card, tactic), names, call.tensors, out=new_out)
        rounding = o.rounding.prepare(card, p.x, o.rotation, call.describe())
        first = 0 if p.out is None else 1  # x's place
        given = (*call.tensors[: first + 1], p.x, *call.tensors[first + 2 :])  # with scales, wherever those will be
        run = plan_of(self._prepare(call, o.rounded(), card, tactic), names, given, out=new_out)
        if p.out is None:
            return lambda x, _, *rest: run(*rounding(x), *rest)
        return lambda out, x, _, *rest: run(out, *rounding(x), *rest)

    def _prepare(self, call: Call, o: IntegerOperands, card: Card, tactic: Tactic | None) -> Launch:
        x, weight = folded(row_view(o.plain.x)), row_view(o.plain.weight)
        params = LinearIntegerParams(
            **parameters(o.plain, in_pairs(x), in_pairs(weight)),
            weight_scale_step=int(o.weight_scale.numel() > 1),
            beside_is_bf16=any(t.dtype is torch.bfloat16 for t in _of_two_bytes(o.plain).values()),
            out_is_bf16=o.plain.out_dtype is torch.bfloat16,
        )
        p, isa = o.plain, card.isa_class(self.unit)
        unpacks = o.rounding.in_byte > 1 and not has_int4(card.capability)
        chosen = tactic or Tactic(self.best_cut(p.m, p.n, card.multiprocessors, isa, paired=p.paired, unpacks=unpacks))
        kernel = card.kernel(self.unit, self.kernel_name(chosen.cut, paired=p.paired))
        threads, shared_bytes = kernel.cut
        return kernel.prepare(
            params,
            grid=(chosen.cut.tiles(x.tokens, p.n, p.paired), x.batches, 1),
            block=threads,
            shape=call.describe(),
            shared_bytes=shared_bytes,
        )


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call. Later checks rely on earlier ones having passed."""
    o = IntegerOperands.of_call(call)
    p = o.plain
    yield from wrong_dtype((torch.int8,), weight=p.weight, up=p.up)
    yield from wrong_dtype((*ROW_TYPES, torch.int8), x=p.x)
    yield from wrong_dtype((torch.float32,), x_scale=o.x_scale, weight_scale=o.weight_scale, up_scale=o.up_scale)
    yield from wrong_dtype(BESIDE, bias=p.bias, residual=p.residual, gate=p.gate)
    yield from wrong_output(BESIDE, p.out_dtype)
    yield from mixed_dtypes(_of_two_bytes(p))
    if not p.m * p.n:
        return  # nothing to compute, and nothing to refuse
    if not o.k:
        yield "k is 0: there is nothing to multiply"
    yield from no_multiples(BYTES * o.rounding.in_byte, k=o.k)
    yield from no_multiples(COLUMNS, n=p.n)
    if o.k > LONGEST:
        yield f"k is {o.k}, and sums of more than {LONGEST} products do not fit 32 bits"
    if max(p.m, p.n) > MOST:
        yield f"a size of {p.m} x {p.n} x {o.k} exceeds {MOST}"
    yield from scattered(x_scale=o.x_scale, weight_scale=o.weight_scale, up_scale=o.up_scale)
    if o.x_scale is None:
        yield from row_obstacles(p.x)
        p = o.rounded().plain
    yield from places(p)


def in_pairs(view: Rows) -> Rows:
    """Two bytes are moved as one half would be."""
    return Rows(view.batches, view.tokens, view.d // 2, view.batch_stride // 2, view.row_stride // 2)


def shape_class(call: Call) -> str:
    o = IntegerOperands.of_call(call)
    scales = "a scale per row" if o.weight_scale.numel() > 1 else "one scale"
    return f"{class_of(o.plain, scales)} rotation {o.rotation}"


def _empty(o: IntegerOperands) -> Tensor:
    return o.plain.x.new_empty(o.plain.shape, dtype=o.plain.out_dtype)


def _of_two_bytes(o: Operands) -> dict[str, Tensor]:
    """What is read behind the sums and is not of fp32."""
    read = {"bias": o.bias, "residual": o.residual, "gate": o.gate}
    return {name: t for name, t in read.items() if t is not None and t.dtype is not torch.float32}
