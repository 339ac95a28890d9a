"""silu, gelu, silu_mul, silu_mul_ and gelu_mul.

The maths, the layout, the scale for T5 and the access pattern stand at the head of src/activations.cu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan
from ...launcher import Card, Pointer, output, parameter_struct
from ...plans import floats, plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import (
    beside,
    check_one_of,
    check_scale,
    check_shape,
    check_written,
    unseen,
    wrong_dtype,
    wrong_output,
)
from ..views.half_range import kept
from ..views.rows import row_classes
from ..views.tiles import Tiles, known, packed, place_fields, tiles

Gelu = Literal["tanh", "erf", "quick"]
Layout = Literal["split", "interleaved"]

KINDS = ("silu", "gelu_tanh", "gelu_erf", "gelu_quick")  # enum Kind
TYPES = (torch.float16, torch.float32, torch.bfloat16)
OF_BF16 = ("gelu_tanh", "gelu_erf", "silu_mul")  # what models without fp16 have; the rest is the `any` kernel's


def silu(x: Tensor, *, out_dtype: torch.dtype | None = None, policy: KernelPolicy = STANDARD) -> Tensor:
    """x * sigmoid(x). x: fp16, bf16 or fp32, any shape. Returns a contiguous tensor of `out_dtype` (x's dtype if None)."""
    out: Tensor = SILU((x,), ("silu", out_dtype), policy)
    return out


def gelu(
    x: Tensor, kind: Gelu = "erf", *, out_dtype: torch.dtype | None = None, policy: KernelPolicy = STANDARD
) -> Tensor:
    """GELU, exact ("erf", torch's default), "tanh" (Wan, UMT5) or "quick" (CLIP): x * sigmoid(1.702 x). As `silu`."""
    out: Tensor = GELU((x,), (f"gelu_{kind}", out_dtype), policy)
    return out


def silu_mul(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    layout: Layout = "split",
    scale: float = 1.0,
    saturate: bool = False,
    out_dtype: torch.dtype | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """silu(gate) * up * scale, the gate of SwiGLU.

    gate, up  fp16 or fp32, or bf16 or fp32, of one shape, rows anywhere. Or gate alone: [.., 2 * f] with the gate in
              the first half (layout "split") or at the even places ("interleaved"). Where the gate is the second half,
              pass two views
    scale     a power of two, applied in fp32 before the one rounding: 2^-k keeps what would overflow fp16 (UMT5)
    saturate  what still overflows fp16 becomes +-65504 instead of infinity; NaN stays
    Returns a contiguous tensor of `out_dtype` (gate's dtype if None).
    """
    out: Tensor = SILU_MUL((gate, up), ("silu", layout, scale, saturate, out_dtype), policy)
    return out


def silu_mul_(
    out: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    layout: Layout = "split",
    scale: float = 1.0,
    saturate: bool = False,
    policy: KernelPolicy = STANDARD,
) -> None:
    """`silu_mul`, written to `out`, of the result's shape with rows anywhere: a part of a wider buffer. Its type is as
    `out_dtype` may be."""
    SILU_MUL_((out, gate, up), ("silu", layout, scale, saturate), policy)


def gelu_mul(
    gate: Tensor,
    up: Tensor | None = None,
    kind: Gelu = "tanh",
    *,
    layout: Layout = "split",
    scale: float = 1.0,
    saturate: bool = False,
    out_dtype: torch.dtype | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """gelu(gate) * up * scale, the gate of GeGLU and of UMT5 (kind "tanh"). As `silu_mul`."""
    out: Tensor = GELU_MUL((gate, up), (f"gelu_{kind}", layout, scale, saturate, out_dtype), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def _activate(x: Tensor, kind: str) -> Tensor:
    """As torch computes it, in x's type."""
    if kind == "silu":
        return functional.silu(x)
    if kind == "gelu_quick":
        return x * torch.sigmoid(1.702 * x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def exact_gelu(x: Tensor) -> Tensor:
    """GELU for oracles. torch's own in fp32 makes NaN of Inf on some CPUs."""
    return x * torch.erfc(x * -math.sqrt(0.5)) / 2


def _activate_wide(x: Tensor, kind: str) -> Tensor:
    return exact_gelu(x) if kind == "gelu_erf" else _activate(x, kind)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind {kind.removeprefix('gelu_')!r}, expected tanh, erf or quick")


def reference(x: Tensor, kind: str, out_dtype: torch.dtype | None) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return _activate_wide(x.to(wide), kind).to(out_dtype or x.dtype).contiguous()


def stock(x: Tensor, kind: str, out_dtype: torch.dtype | None) -> Tensor:
    return _activate(x, kind).to(out_dtype or x.dtype).contiguous()


def fake(x: Tensor, _kind: str, out_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


def _halves(gate: Tensor, up: Tensor | None, kind: str, layout: str, scale: float) -> tuple[Tensor, Tensor]:
    """gate and up as two views. Raises ValueError for what does not belong together."""
    _check_kind(kind)
    check_one_of("layout", layout, ("split", "interleaved"))
    check_scale(scale)
    check_shape("up", up, gate, "gate")
    if up is not None:
        return gate, up
    if gate.ndim == 0 or gate.shape[-1] % 2:
        raise ValueError(f"gate: {list(gate.shape)} has no two halves")
    if layout == "interleaved":
        return gate[..., 0::2], gate[..., 1::2]
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def gated_reference(
    gate: Tensor, up: Tensor | None, kind: str, layout: str, scale: float, saturate: bool, out_dtype: torch.dtype | None
) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    first, second = _halves(gate, up, kind, layout, scale)
    wide = torch.promote_types(gate.dtype, torch.float32)
    value = _activate_wide(first.to(wide), kind) * scale * second.to(wide)
    out_dtype = out_dtype or gate.dtype
    return kept(value, out_dtype, saturate).to(out_dtype).contiguous()


def gated_stock(
    gate: Tensor, up: Tensor | None, kind: str, layout: str, scale: float, saturate: bool, out_dtype: torch.dtype | None
) -> Tensor:
    """What stock runs: two operations, in the tensors' type. Where fp16 would overflow it runs them in fp32 (T5)."""
    if scale != 1 or saturate:
        return gated_reference(gate, up, kind, layout, scale, saturate, out_dtype)
    first, second = _halves(gate, up, kind, layout, scale)
    return (_activate(first, kind) * second).to(out_dtype or gate.dtype).contiguous()


def gated_fake(gate: Tensor, up: Tensor | None, *rest: Any) -> Tensor:
    shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
    return gate.new_empty(shape, dtype=rest[-1] or gate.dtype)


# --------------------------------------------------------------------------------------------------------- the kernel


# Mirrors ActivationParams in src/activations.cu.
ActivationParams = parameter_struct(
    "ActivationParams",
    (Pointer, "gate up out"),
    (c_int64, place_fields("gate", "up", "out")),
    (c_float, "scale"),
    (c_int, "saturate kind gate_is_float up_is_float out_is_float"),
)


class Operands(NamedTuple):
    """What is activated and what it is multiplied by, as views, of a call of any of these ops."""

    gate: Tensor
    up: Tensor  # gate again where nothing is multiplied
    out: Tensor | None  # where the result goes, if the caller says so
    out_dtype: torch.dtype
    kind: str
    scale: float = 1.0
    saturate: bool = False
    multiplies: bool = True
    is_packed: bool = False  # whether both are one tensor's
    alternate: bool = False  # ... whose elements they take in turns

    @staticmethod
    def of(call: Call) -> Operands:
        kind, *options = call.options
        _check_kind(kind)
        if len(options) == 1:
            x = call.first
            return Operands(x, x, None, options[0] or x.dtype, kind, multiplies=False)
        *places, gate, up = call.operands
        layout, scale, saturate, *dtypes = options
        first, second = _halves(gate, up, kind, layout, scale)
        out, packed = (places[0] if places else None), up is None
        dtype = dtypes[0] or gate.dtype if out is None else out.dtype
        return Operands(
            first, second, out, dtype, kind, scale, saturate, True, packed, packed and layout == "interleaved"
        )

    @property
    def tiles(self) -> Tiles | str:
        """The view of all three; not of empty ones."""
        shape = self.gate.shape
        written = packed(shape) if self.out is None else self.out.stride()
        return tiles(shape, self.gate.stride(), self.up.stride(), written)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    o = Operands.of(call)
    if o.out is not None:
        check_shape("out", o.out, o.gate, "the result")
        check_written({"out": o.out}, {"gate": o.gate, "up": o.up})


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    o = Operands.of(call)
    yield from wrong_dtype(TYPES, **{"gate" if o.multiplies else "x": o.gate})
    yield from wrong_dtype(beside(o.gate), up=o.up if o.multiplies else None)
    yield from wrong_output(beside(o.gate), o.out_dtype)
    if o.gate.numel():
        yield from unseen(o.tiles)


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    o = Operands.of(call)
    new_out = output(o.gate.shape, o.out_dtype, card.index)
    names = ("" if o.out is None else "out ") + ("gate up" if o.multiplies else "gate")
    if not o.gate.numel():
        return plan_of((), names, call.tensors, out=new_out)
    view = known(o.tiles)
    params = ActivationParams(
        scale=o.scale,
        saturate=o.saturate and o.out_dtype is torch.float16,
        kind=KINDS.index(o.kind),
        out_is_float=o.out_dtype is torch.float32,
        **floats(gate=o.gate, up=o.up),
    )
    view.fill(params, "gate", "up", "out")
    # Of halves of one tensor the second starts where the width puts it; alternating ones are one operand.
    between = (int(o.up.storage_offset()) - int(o.gate.storage_offset())) * o.gate.element_size() if o.is_packed else 0
    if o.alternate:
        wide = view.wide((1, 2)) and [column for _, _, column in view.places] == [2, 2, 1]
    else:
        wide = view.wide() and between % 16 == 0
    short, _ = beside(o.gate)
    wide = wide and {o.gate.dtype, o.up.dtype, o.out_dtype} == {short} and call.aligned
    name = f"{o.kind}{'_mul' if o.multiplies else ''}{'_interleaved' if o.alternate else ''}"
    if short is torch.bfloat16:
        wide = wide and name in OF_BF16
        name = f"{name}_bf16" if wide else "activation_bf16_any"
    elif not wide:
        name = "activation_any"
    grid, threads = view.grid(wide)
    launch = card.kernel("activations", name).prepare(params, grid=grid, block=threads, shape=call.describe())
    if not o.is_packed:
        return plan_of(launch, names, call.tensors, out=new_out)

    def into(out: Tensor, gate: Tensor, _: None) -> None:
        at = gate.data_ptr()
        launch(at, at + between, out.data_ptr())

    def run(gate: Tensor, _: None) -> Tensor:
        out = new_out()
        into(out, gate, None)
        return out

    return run if o.out is None else into


def shape_class(call: Call) -> str:
    """Width exactly, rows to a power of two, layout."""
    return f"{' '.join(map(str, call.options[:2]))} {row_classes(call.tensors, layout=True)}"


def _op(name: str, kinds: tuple[str, ...]) -> Op:
    gated = name.endswith("_mul")
    options = "str kind, str layout, float scale, bool saturate" if gated else "str kind"
    run: tuple[Any, Any, Any] = (gated_reference, gated_fake, gated_stock) if gated else (reference, fake, stock)
    endings = ("_mul", "_mul_interleaved") if gated else ("",)
    of_rows = [f"{kind}{ending}" for kind in kinds for ending in endings]
    of_rows += [f"{one}_bf16" for one in of_rows if one in OF_BF16]
    return Op(
        name=name,
        schema=f"(Tensor {'gate, Tensor? up' if gated else 'x'}, {options}, ScalarType? out_dtype, str policy) -> Tensor",
        reference=run[0],
        fake=run[1],
        candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(run[2])),
        shape_class=shape_class,
        validate=validate,
        kernels={"activations": ("activation_any", "activation_bf16_any", *of_rows)},
    )


SILU = _op("silu", KINDS[:1])
GELU = _op("gelu", KINDS[1:])
SILU_MUL = _op("silu_mul", KINDS[:1])
GELU_MUL = _op("gelu_mul", KINDS[1:])
SILU_MUL_ = SILU_MUL.into("silu_mul_")
