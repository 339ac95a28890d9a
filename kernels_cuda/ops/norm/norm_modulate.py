"""norm_modulate: LayerNorm or RMSNorm, and modulation.

The maths, the layout and the access pattern stand at the head of src/norm_modulate.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_float, c_int, c_int64
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan
from ...launcher import MAX_GRID, Card, Kernel, Launch, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import beside, mixed_dtypes, not_contiguous, unseen, wrong_dtype, wrong_output
from ..views.half_range import in_type
from ..views.rows import (
    MOST_ROWS,
    SharedRow,
    batch_sizes,
    check_frames,
    row_classes,
    row_view,
    rows,
    shared_row,
    shared_view,
    spread,
)
from .rms import by_its_rms

Kind = Literal["layer", "rms"]
Maybe = Tensor | None
Dtype = torch.dtype | None

TYPES = {torch.float16: "f16", torch.float32: "f32", torch.bfloat16: "bf16"}
PACK = 8  # kPack: elements a thread moves at once
BLOCKS = {2: 384, 3: 256, 4: 256}  # packs per thread -> most threads, as the register kernels were compiled
WIDEST = max(packs * threads * PACK for packs, threads in BLOCKS.items())
ANY_THREADS = 256


@dataclass(frozen=True)
class Tactic:
    """How the work of a register kernel is cut: packs per thread, and rounds of blocks over the whole card."""

    packs: int
    rounds: int = 2

    def __str__(self) -> str:
        return f"{self.packs} packs {self.rounds} rounds"


def norm_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    kind: Kind = "layer",
    out_dtype: torch.dtype | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """norm(x) * weight + bias, then * (1 + scale) + shift, each part optional.

    x             [batch, ..., d] fp16, bf16 or fp32; rows may be anywhere, their elements adjacent
    scale, shift  fp16 or fp32, beside bf16 rows bf16 or fp32: [d], [1 or batch, 1, d], [.., frames, d] or
                  [.., frames, 1, d]. Frames are spread over the tokens as stock does; one per token is Wan 2.2 5B's
                  way. Chunks of [b, 6, d] are read in place
    weight, bias  [d], of the same types
    kind          "layer" subtracts the mean, "rms" does not
    Returns a contiguous tensor of x's shape, of `out_dtype` (x's dtype if None), which of bf16 rows may be fp16.
    Statistics are fp32.
    """
    out: Tensor = NORM((x, scale, shift, weight, bias), (eps, kind, out_dtype), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(
    x: Tensor, scale: Maybe, shift: Maybe, weight: Maybe, bias: Maybe, eps: float, kind: str, out_dtype: Dtype
) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    if kind == "layer":
        value = value - value.mean(-1, keepdim=True)
    value = by_its_rms(value, eps)
    if weight is not None:
        value = value * weight.to(wide)
    if bias is not None:
        value = value + bias.to(wide)
    b, s, d = batch_sizes(value)
    flat = value.reshape(b, s, d)
    if scale is not None:
        flat = flat * (1 + spread(scale.to(wide), s, b, d, "scale"))
    if shift is not None:
        flat = flat + spread(shift.to(wide), s, b, d, "shift")
    return flat.reshape(x.shape).to(out_dtype or x.dtype).contiguous()


def stock(
    x: Tensor, scale: Maybe, shift: Maybe, weight: Maybe, bias: Maybe, eps: float, kind: str, out_dtype: Dtype
) -> Tensor:
    """What stock runs (WanAttentionBlock.forward): the norm, then addcmul with modulation repeated over the tokens."""
    weight, bias = in_type(x.dtype, weight, bias)
    if kind == "layer":
        value = functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    else:
        value = functional.rms_norm(x, x.shape[-1:], weight, eps)
        if bias is not None:
            value = value + bias
    if scale is not None or shift is not None:
        b, s, d = batch_sizes(value)
        flat = value.reshape(b, s, d)
        plus = None if shift is None else spread(shift, s, b, d, "shift")
        if scale is not None:
            by = 1 + spread(scale, s, b, d, "scale")
            flat = flat * by if plus is None else torch.addcmul(plus, flat, by)
        elif plus is not None:
            flat = flat + plus
        value = flat.reshape(x.shape)
    return value.to(out_dtype or x.dtype).contiguous()


def fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=rest[-1] or x.dtype)


# --------------------------------------------------------------------------------------------------------- the kernel


POINTERS = "x scale shift weight bias out"
# Mirrors NormParams in src/norm_rows.cuh.
FIELDS = (
    (Pointer, POINTERS),
    (c_int64, "x_batch x_row scale_batch scale_frame shift_batch shift_frame"),
    (c_int, "batches tokens tokens_per_frame d rows_per_block is_rms"),
    (c_float, "eps offset inverse_d"),
    (c_int, "modulation_is_float affine_is_float out_is_bf16"),
)
NormParams = parameter_struct("NormParams", *FIELDS)


class Operands(NamedTuple):
    """The tensors of a call: x [batch, ..., d], modulation as rows.py spreads it, weight and bias [d]."""

    x: Tensor
    scale: Tensor | None
    shift: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(call: Call) -> Operands:
        return Operands(*call.tensors)  # type: ignore[arg-type]

    @property
    def modulation(self) -> dict[str, Tensor]:
        return {name: t for name, t in (("scale", self.scale), ("shift", self.shift)) if t is not None}

    @property
    def affine(self) -> dict[str, Tensor]:
        return {name: t for name, t in (("weight", self.weight), ("bias", self.bias)) if t is not None}


def validate(call: Call) -> None:
    """Shapes that no implementation could serve. What broadcasts, and how, is judged in rows.py."""
    o = Operands.of(call)
    d = o.x.shape[-1]
    for name, t in o.affine.items():
        if t.shape != (d,):
            raise ValueError(f"{name} {list(t.shape)} is not [{d}]")
    for name, t in o.modulation.items():
        check_frames(t, o.x, d, name)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    o = Operands.of(call)
    yield from wrong_dtype(TYPES, x=o.x)
    yield from wrong_output(dict.fromkeys((torch.float16, beside(o.x)[0])), call.options[2] or o.x.dtype)
    yield from operand_obstacles(o)


def operand_obstacles(o: Operands) -> Iterator[str]:
    """What keeps the kernels from the operands. Later checks rely on earlier ones having passed."""
    yield from wrong_dtype(TYPES, x=o.x)
    yield from wrong_dtype(beside(o.x), **o.modulation, **o.affine)
    yield from mixed_dtypes(o.modulation)
    yield from mixed_dtypes(o.affine)
    yield from unseen(rows(o.x), "x")
    yield from not_contiguous(**o.affine)
    like = row_view(o.x)
    if max(like.batches, like.tokens, like.d) > MOST_ROWS:
        yield f"a dimension of {tuple(o.x.shape)} exceeds {MOST_ROWS}"
    shared = [shared_row(t, like, name) for name, t in o.modulation.items()]
    yield from (reason for reason in shared if isinstance(reason, str))
    runs = {s.tokens_per_frame for s in shared if isinstance(s, SharedRow) and s.frame_stride}
    if len(runs) > 1:
        yield f"{', '.join(o.modulation)} are spread over the tokens in different ways ({sorted(runs)} tokens per row)"


def plan(call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the outputs and the pointers."""
    o = Operands.of(call)
    new_out = output(o.x.shape, call.options[2] or o.x.dtype, card.index)
    if o.x.numel() == 0:
        return lambda *_: new_out()
    launch, affine_is_modulation = _prepare(call, o, card, tactic or best_tactic(o.x.shape[-1]))
    names = "x weight bias scale shift" if affine_is_modulation else "x scale shift weight bias"
    return plan_of(launch, names, call.tensors, out=new_out)


def _prepare(call: Call, o: Operands, card: Card, tactic: Tactic) -> tuple[Launch, bool]:
    """The launch of a call, and whether weight and bias go where scale and shift do (see `offset` in the .cu)."""
    eps, kind, out_dtype = call.options
    name = f"norm_modulate_{TYPES[o.x.dtype]}"
    more = {"out_is_bf16": (out_dtype or o.x.dtype) is torch.bfloat16}
    if next(register_obstacles(o), None) is None:
        return launch_in_registers(
            card, "norm_modulate", name, NormParams, o, tactic, call.describe(), eps, kind, **more
        )
    x = row_view(o.x)
    kernel = card.kernel("norm_modulate", f"{name}_any")
    threads = min(ANY_THREADS, -(-x.d // 32) * 32)
    blocks = resident(kernel, threads, card, tactic)
    params = NormParams(
        rows_per_block=-(-x.batches * x.tokens // blocks), **fields_of(o, eps, kind, swap=False), **more
    )
    grid = (min(x.batches * x.tokens, blocks), 1, 1)
    return kernel.prepare(params, grid=grid, block=threads, shape=call.describe()), False


def launch_in_registers(
    card: Card,
    unit: str,
    name: str,
    params: Callable[..., Any],
    o: Operands,
    tactic: Tactic,
    describe: str,
    eps: float,
    kind: str,
    **more: Any,
) -> tuple[Launch, bool]:
    """The launch of a kernel that holds rows in registers, and whether weight and bias go where scale and shift do. name: of the
    kernel, up to the type of the modulation. more: parameters beside those that all such kernels have."""
    x = row_view(o.x)
    swap = bool(o.affine) and not o.modulation
    pair = (o.weight, o.bias) if swap else (o.scale, o.shift)
    modulation = next((t.dtype for t in pair if t is not None), beside(o.x)[0])
    kernel = card.kernel(unit, f"{name}_{TYPES[modulation]}_{tactic.packs}")
    threads = threads_for(x.d, tactic.packs)
    rows_per_block = -(-x.batches * x.tokens // resident(kernel, threads, card, tactic))
    grid = (-(-x.tokens // rows_per_block), min(x.batches, MAX_GRID[1]), 1)
    given = params(rows_per_block=rows_per_block, **fields_of(o, eps, kind, swap), **more)
    return kernel.prepare(given, grid=grid, block=threads, shape=describe), swap


def resident(kernel: Kernel, threads: int, card: Card, tactic: Tactic) -> int:
    """Blocks: as many as the card holds at once, a few times over. A block then works through a run of rows."""
    return kernel.resident_blocks(threads) * card.multiprocessors * tactic.rounds


def fields_of(o: Operands, eps: float, kind: str, swap: bool) -> dict[str, Any]:
    """The parameters that all kernels have, but for pointers and how the work is cut."""
    x = row_view(o.x)
    by, plus = (o.weight, o.bias) if swap else (o.scale, o.shift)
    scale, shift = shared_view(by, x, "scale"), shared_view(plus, x, "shift")
    return {
        "batches": x.batches,
        "tokens": x.tokens,
        "d": x.d,
        "is_rms": kind == "rms",
        "tokens_per_frame": min(scale.tokens_per_frame, shift.tokens_per_frame),
        "eps": eps,
        "inverse_d": 1 / x.d,
        "offset": 0.0 if swap and o.weight is not None else 1.0,
        "modulation_is_float": any(t.dtype is torch.float32 for t in o.modulation.values()),
        "affine_is_float": any(t.dtype is torch.float32 for t in o.affine.values()),
        **x.places("x"),
        **scale.places("scale"),
        **shift.places("shift"),
    }


def register_obstacles(o: Operands) -> Iterator[str]:
    """What keeps the fast kernels from a call: 16-byte accesses everywhere, one scale and shift of one type, a row that fits.
    Everything else is for the `any` kernel."""
    x = row_view(o.x)
    operands = {**o.modulation, **o.affine}
    if o.affine and o.modulation:
        yield "weight or bias beside modulation"
    if x.d % PACK or x.d > WIDEST:
        yield f"rows of {x.d}, not a multiple of {PACK} up to {WIDEST}"
    strides = [x.batch_stride, x.row_stride]
    for t in operands.values():
        strides += [stride for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1]
    if any(t.data_ptr() % 16 for t in (o.x, *operands.values())) or any(stride % PACK for stride in strides):
        yield "rows or modulation do not start at multiples of 16 bytes"
    if len({t.dtype for t in operands.values()}) > 1:
        yield "scale and shift, or weight and bias, of two types"
    if o.x.dtype is torch.float32 and any(t.dtype is torch.float32 for t in operands.values()):
        yield "modulation of float32 beside rows of float32"


def threads_for(d: int, packs: int) -> int:
    """Whole warps that hold a row of d."""
    return -(-d // (PACK * packs * 32)) * 32


def tactics(d: int) -> list[Tactic]:
    """Every way to cut rows of d, the best known first: fewest idle lanes, then nearest to three packs.

    Few packs mean more warps to reduce over, many mean more registers and so fewer rows in flight.
    """
    fitting = [packs for packs, most in BLOCKS.items() if threads_for(d, packs) <= most]
    fitting.sort(key=lambda packs: (threads_for(d, packs) * packs, abs(packs - 3), -packs))
    return [Tactic(packs, rounds) for rounds in (2, 1, 4, 8) for packs in fitting]


def ways(call: Call) -> list[Tactic]:
    """What may be measured for a call: nothing where only the `any` kernel serves."""
    o = Operands.of(call)
    served = o.x.numel() > 0 and next(register_obstacles(o), None) is None
    return tactics(o.x.shape[-1]) if served else []


def best_tactic(d: int) -> Tactic:
    return next(iter(tactics(d)), Tactic(0))  # no register kernel holds such a row


def shape_class(call: Call) -> str:
    """Width exactly, rows to a power of two, and how much modulation each row has to read."""
    return f"{call.options[1]} {row_classes(call.tensors)}"


OF_ROWS = ("f16_f16", "f16_f32", "f32_f16", "bf16_bf16", "bf16_f32")  # types of x and of the modulation
KERNELS = (
    *(f"norm_modulate_{types}_{packs}" for types in OF_ROWS for packs in BLOCKS),
    *(f"norm_modulate_{x}_any" for x in TYPES.values()),
)

NORM = Op(
    name="norm_modulate",
    schema=(
        "(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, str kind, ScalarType? out_dtype, "
        "str policy) -> Tensor"
    ),
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan, ways), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels={"norm_modulate": KERNELS},
)
