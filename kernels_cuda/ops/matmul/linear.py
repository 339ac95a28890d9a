"""linear, linear_, linear_pair and linear_pair_: a matrix product and everything that is done to its result, in one kernel.

The maths, the layout, the access pattern and the range of the half sums stand at the head of src/linear.cu; the operands
and what stock runs in linear_operands.py, what cuBLAS can fuse in linear_torch.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan, by_name
from ...launcher import MAX_GRID, Card, Launch, Pointer, output, parameter_struct
from ...plans import floats, plan_of
from ...policy import STANDARD, IsaClass, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import bias_obstacles, no_multiples, word, wrong_dtype, wrong_output
from ..views.rows import Rows, folded, row_class, row_view, rows, shared_row, shared_view
from .linear_operands import ACTIVATIONS, Operands, compute, stock_beside, stock_compute, validate
from .linear_torch import CublasEpilogue, CublasFused, CublasPair, CublasWide

Activation = Literal["none", "gelu", "gelu_tanh", "silu", "relu"]

TYPES = (torch.float16, torch.float32)
PACK = 8  # elements of an access: k, n and every stride are multiples
MOST = 2**31 - 2**10  # rows, columns, k: tiles reach a little further
WARP_COLUMNS = 64  # of a warp's tile


@dataclass(frozen=True)
class Cut:
    """A block's tile of the result: its rows, and rows of the weight. And the rows of a warp's part of it."""

    rows: int
    columns: int
    warp_rows: int = 64

    @property
    def warps(self) -> int:
        return self.rows * self.columns // (self.warp_rows * WARP_COLUMNS)

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor, by registers: eight warps of it."""
        return 8 // self.warps

    @property
    def precisions(self) -> tuple[str, ...]:
        """Half sums need registers of their own, which a warp of 96 rows does not have."""
        return ("precise", "fast") if self.warp_rows == 64 else ("precise",)

    def out_columns(self, paired: bool) -> int:
        return self.columns // 2 if paired else self.columns

    def tiles(self, m: int, n: int, paired: bool) -> int:
        return -(-m // self.rows) * -(-n // self.out_columns(paired))

    def cost(self, m: int, n: int, paired: bool, multiprocessors: int) -> int:
        """Rows of warps that a multiprocessor works through, in rounds of blocks over the card."""
        rounds, left = divmod(self.tiles(m, n, paired), multiprocessors * self.resident)
        last = -(-left // multiprocessors) * self.warps
        # With fewer than four warps some of a multiprocessor's quarters have nothing to do.
        return (rounds * self.resident * self.warps + (max(last, 4) if last else 0)) * self.warp_rows


# How well each uses the tensor cores, once there is enough work: for choosing without measuring. Best known first.
CUTS: dict[Cut, dict[IsaClass, float]] = {
    Cut(192, 128, 96): {"sm_80": 1.0, "sm_75": 0.5},
    Cut(192, 256, 96): {"sm_80": 1.0, "sm_75": 0.65},
    Cut(128, 256): {"sm_80": 0.92, "sm_75": 1.0},
    Cut(128, 128): {"sm_80": 0.94, "sm_75": 0.97},
    Cut(64, 128): {"sm_80": 0.8, "sm_75": 0.7},
}


@dataclass(frozen=True)
class Tactic:
    """The tile, and how the tensor cores accumulate."""

    cut: Cut
    precision: str

    def __str__(self) -> str:
        return f"{self.cut.rows}x{self.cut.columns} {self.precision}"


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float = 1.0,
    saturate: bool = False,
    out_dtype: torch.dtype | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """residual + gate * activation(scale * (x @ weight^T) + bias), each part optional.

    x         [batch, ..., k] fp16; rows may be anywhere, their elements adjacent
    weight    [n, k] fp16, as torch's Linear has it; rows may be apart
    bias      [n], fp16 or fp32
    residual  [batch, ..., n], fp16 or fp32, rows anywhere
    gate      fp16 or fp32: [n], [1 or batch, 1, n], [.., frames, n] or [.., frames, 1, n], spread over the tokens as stock
              does
    scale     multiplies the sums in fp32, before anything is rounded: 2^-k keeps what would overflow fp16, and 2^k gives
              back what a layer before this one took away (T5)
    saturate  what still overflows an fp16 result becomes +-65504 instead of infinity; NaN stays
    Returns a contiguous [batch, ..., n] of `out_dtype` (the residual's dtype, or x's). With half sums (`KernelPolicy.sums`) the
    tensor cores may sum up to 32 products in fp16; everything else is fp32, and rounded once.
    """
    out: Tensor = LINEAR((x, weight, bias, residual, gate), (activation, scale, saturate, out_dtype), policy)
    return out


def linear_(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float = 1.0,
    saturate: bool = False,
    policy: KernelPolicy = STANDARD,
) -> None:
    """`linear`, written to `out`, [batch, ..., n] fp16 or fp32 with rows anywhere. The residual may be `out` itself."""
    LINEAR_((out, x, weight, bias, residual, gate), (activation, scale, saturate), policy)


def linear_pair(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None = None,
    *,
    activation: Activation = "silu",
    scale: float = 1.0,
    saturate: bool = False,
    out_dtype: torch.dtype | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """activation(x @ weight^T) * (x @ up^T) * scale: SwiGLU, GeGLU and UMT5's feed-forward, in one kernel.

    weight, up  [n, k] fp16 each, with equal strides; or weight alone, [2 n, k], with the activated half first
    The rest is as `linear` has it. Neither product is ever rounded to fp16.
    """
    out: Tensor = LINEAR_PAIR((x, weight, up), (activation, scale, saturate, out_dtype), policy)
    return out


def linear_pair_(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    up: Tensor | None = None,
    *,
    activation: Activation = "silu",
    scale: float = 1.0,
    saturate: bool = False,
    policy: KernelPolicy = STANDARD,
) -> None:
    """`linear_pair`, written to `out`, [batch, ..., n] fp16 or fp32 with rows anywhere: a part of a wider buffer."""
    LINEAR_PAIR_((out, x, weight, up), (activation, scale, saturate), policy)


# --------------------------------------------------------------------------------------------------------- the kernel


# Mirrors LinearParams in src/linear_params.cuh.
POINTERS = "x weight up bias residual gate out"
FIELDS = (
    (c_int64, "x_batch residual_batch residual_row gate_batch gate_frame out_batch out_row"),
    (c_int, "x_row weight_row m n k tokens tokens_per_frame activation"),
    (c_float, "scale"),
    (c_int, "saturate bias_is_float residual_is_float gate_is_float out_is_float"),
)
LinearParams = parameter_struct("LinearParams", (Pointer, POINTERS), *FIELDS)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call. Later checks rely on earlier ones having passed."""
    o = Operands.of_call(call)
    yield from wrong_dtype((torch.float16,), x=o.x, weight=o.weight, up=o.up)
    yield from wrong_dtype(TYPES, bias=o.bias, residual=o.residual, gate=o.gate)
    yield from wrong_output(TYPES, o.out_dtype)
    if not o.m * o.n:
        return  # nothing to compute, and nothing to refuse
    if not o.k:
        yield "k is 0: there is nothing to multiply"
    yield from no_multiples(PACK, k=o.k, n=o.n)
    if max(o.m, o.n, o.k) > MOST:
        yield f"a size of {o.m} x {o.n} x {o.k} exceeds {MOST}"
    yield from places(o)


def places(o: Operands) -> Iterator[str]:
    """Where operands may not lie, and how many of them are too many, of a call whose sizes and types are served."""
    yield from _rows_apart(x=o.x, weight=o.weight, up=o.up, residual=o.residual, out=o.out)
    if o.up is not None and rows(o.up) != rows(o.weight):
        yield f"weight and up have different strides ({o.weight.stride()} and {o.up.stride()})"
    for name, view in (("x", folded(row_view(o.x))), ("weight", row_view(o.weight))):
        if view.row_stride > MOST:
            yield f"{name}: rows are {view.row_stride} elements apart, at most {MOST} are served"
    yield from bias_obstacles(o.bias)
    yield from _gate_obstacles(o)
    if folded(row_view(o.x)).batches > MAX_GRID[1] or min(CUTS, key=lambda c: c.columns).tiles(o.m, o.n, True) > MOST:
        yield f"{o.m} rows of {o.n} columns in {o.batches} batches exceed a grid"


def _rows_apart(**tensors: Tensor | None) -> Iterator[str]:
    for name, t in tensors.items():
        if t is None:
            continue
        view, pack = rows(t), max(PACK, 16 // t.element_size())
        if isinstance(view, str):
            yield f"{name}: {view}"
        elif t.data_ptr() % 16 or view.row_stride % pack or view.batch_stride % pack:
            yield f"{name}: rows do not start at multiples of 16 bytes (strides {t.stride()})"


def _gate_obstacles(o: Operands) -> Iterator[str]:
    if o.gate is None:
        return
    shared = shared_row(o.gate, Rows(o.batches, o.tokens, o.n, 0, 0), "gate")
    if isinstance(shared, str):
        yield shared
    elif shared is not None and (o.gate.data_ptr() % 16 or shared.batch_stride % PACK or shared.frame_stride % PACK):
        yield f"gate: rows do not start at multiples of 16 bytes (strides {o.gate.stride()})"


def tactics(precision: str) -> list[Tactic]:
    return [Tactic(cut, precision) for cut in CUTS if precision in cut.precisions]


def ways(call: Call) -> list[Tactic]:
    """Half sums are an offer: where the card's fp32 sums are as quick, it may lose."""
    precise = tactics("precise")
    if call.policy.sums != "fast":
        return precise
    fast = tactics("fast")
    return [*fast[:2], *precise[:1], *fast[2:], *precise[1:]]


def best_cut(m: int, n: int, paired: bool, multiprocessors: int, isa: IsaClass, precision: str = "precise") -> Cut:
    """The least time by rule."""
    able = (cut for cut in CUTS if precision in cut.precisions)
    return min(able, key=lambda cut: cut.cost(m, n, paired, multiprocessors) / CUTS[cut][isa])


def plan(call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    o = Operands.of_call(call)
    new_out = output(o.shape, o.out_dtype, card.index)
    if not o.m * o.n:
        return (lambda *_: new_out()) if o.out is None else (lambda *_: None)
    launch = _prepare(call, o, card, tactic)
    into = "" if o.out is None else "out "
    if o.up is None or call.tensors[-1] is not None:
        names = "x weight bias residual gate" if o.up is None else "x weight up"
        return plan_of(launch, into + names, call.tensors, out=new_out)
    second = o.up.data_ptr() - o.weight.data_ptr()  # of halves of one tensor

    def pair_into(out: Tensor, x: Tensor, weight: Tensor, _: None) -> None:
        at = weight.data_ptr()
        launch(x.data_ptr(), at, at + second, 0, 0, 0, out.data_ptr())

    def pair(x: Tensor, weight: Tensor, _: None) -> Tensor:
        out = new_out()
        pair_into(out, x, weight, None)
        return out

    return pair_into if into else pair


def parameters(o: Operands, x: Rows, weight: Rows) -> dict[str, Any]:
    """All of LinearParams but the pointers. x, weight: where the operands lie, x folded."""
    out = Rows(o.batches, o.tokens, o.n, o.tokens * o.n, o.n) if o.out is None else row_view(o.out)
    residual = out if o.residual is None else row_view(o.residual)
    gate = shared_view(o.gate, out, "gate")
    return {
        **x.places("x"),
        **residual.places("residual"),
        **gate.places("gate"),
        **out.places("out"),
        "weight_row": weight.row_stride,
        "m": x.tokens,
        "n": o.n,
        "k": x.d,
        "tokens": o.tokens,
        "tokens_per_frame": gate.tokens_per_frame,
        "activation": ACTIVATIONS.index(o.activation),
        "scale": o.scale,
        "saturate": o.saturate and o.out_dtype is torch.float16,
        "out_is_float": o.out_dtype is torch.float32,
        **floats(bias=o.bias, residual=o.residual, gate=o.gate),
    }


def _prepare(call: Call, o: Operands, card: Card, tactic: Tactic | None) -> Launch:
    x = folded(row_view(o.x))
    params = LinearParams(**parameters(o, x, row_view(o.weight)))
    sums = call.policy.sums
    isa = card.isa_class("linear")
    tactic = tactic or Tactic(best_cut(o.m, o.n, o.paired, card.multiprocessors, isa, sums), sums)
    cut = tactic.cut
    kernel = card.kernel("linear", kernel_name(tactic, o.paired))
    threads, shared_bytes = kernel.cut
    return kernel.prepare(
        params,
        grid=(cut.tiles(x.tokens, o.n, o.paired), x.batches, 1),
        block=threads,
        shape=call.describe(),
        shared_bytes=shared_bytes,
    )


def kernel_name(tactic: Tactic, paired: bool) -> str:
    return f"linear_{'pair_' if paired else ''}{tactic.cut.rows}x{tactic.cut.columns}_{tactic.precision}"


def shape_class(call: Call) -> str:
    return class_of(Operands.of_call(call), call.policy.sums)


def class_of(o: Operands, *more: str) -> str:
    """Widths exactly, rows to a power of two, and what is done to the product."""
    parts = [row_class(o.x), f"to {o.n}", word(o.out_dtype), *more, o.activation]
    parts += [f"{name} {word(t)}" for name, t in (("bias", o.bias), ("residual", o.residual)) if t is not None]
    if o.gate is not None:
        parts.append(f"gate {row_class(o.gate)}")
    if o.scale != 1 or o.saturate:
        parts.append("scaled")
    strided = any(t is not None and not t.is_contiguous() for t in (o.x, o.weight, o.out))
    return " ".join([*parts, "strided"] if strided else parts)


# ----------------------------------------------------------------------------------------------------------- the ops


def _empty(o: Operands) -> Tensor:
    return o.x.new_empty(o.shape, dtype=o.out_dtype)


_OF, _OF_PAIR = partial(Operands.of, "linear"), partial(Operands.of, "linear_pair")
reference, stock, fake = (by_name(_OF, 5, run) for run in (compute, stock_compute, _empty))
pair_reference, pair_stock, pair_fake = (by_name(_OF_PAIR, 3, run) for run in (compute, stock_compute, _empty))


def _is_plain(o: Operands) -> bool:
    """Whether a product and its bias are all that is wanted, in the operands' one type."""
    types = {t.dtype for t in (o.x, o.weight, o.bias) if t is not None} | {o.out_dtype}
    added = o.residual is not None or o.gate is not None
    return len(types) == 1 and not added and o.activation == "none" and o.scale == 1 and not o.saturate


def stock_plan(call: Call) -> Plan | None:
    """A product and nothing else is one call of torch's, whose operands need not be looked at again."""
    o = Operands.of_call(call)
    if not _is_plain(o):
        return None
    return lambda x, weight, bias, *_: functional.linear(x, weight, bias).contiguous()


def stock_plan_(call: Call) -> Plan | None:
    """The same into rows that follow each other: torch's product has a place for its result.

    Not of x in three axes whose rows have gaps, because torch's Linear adds the bias to a rounded product there.
    """
    o = Operands.of_call(call)
    assert o.out is not None
    if not (_is_plain(o) and o.out.is_contiguous() and (o.x.ndim == 2 or o.x.is_contiguous())):
        return None
    k, n = o.k, o.n

    def run(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> None:
        flat, rows_out = x.reshape(-1, k), out.view(-1, n)
        if bias is None:
            torch.mm(flat, weight.t(), out=rows_out)
        else:
            torch.addmm(bias, flat, weight.t(), out=rows_out)

    return run


def _kernels(paired: bool) -> dict[str, tuple[str, ...]]:
    names = tuple(kernel_name(tactic, paired) for precision in ("precise", "fast") for tactic in tactics(precision))
    return {"linear": names}


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? gate"
_OPTIONS = "str activation, float scale, bool saturate"
_OURS = CudaCandidate("cuda", obstacles, plan, ways)
_CUBLAS = (CublasEpilogue(), CublasFused(), CublasWide())


LINEAR = Op(
    name="linear",
    schema=f"({_TENSORS}, {_OPTIONS}, ScalarType? out_dtype, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(_OURS, StockCandidate(stock, plan=stock_plan, beside=stock_beside), *_CUBLAS),
    shape_class=shape_class,
    validate=validate,
    kernels=_kernels(False),
)

LINEAR_ = LINEAR.into("linear_", stock=stock_plan_)

LINEAR_PAIR = Op(
    name="linear_pair",
    schema=f"(Tensor x, Tensor weight, Tensor? up, {_OPTIONS}, ScalarType? out_dtype, str policy) -> Tensor",
    reference=pair_reference,
    fake=pair_fake,
    candidates=(_OURS, StockCandidate(pair_stock), CublasPair()),
    shape_class=shape_class,
    validate=validate,
    kernels=_kernels(True),
)

LINEAR_PAIR_ = LINEAR_PAIR.into("linear_pair_")
