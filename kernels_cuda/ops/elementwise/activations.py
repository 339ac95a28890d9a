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
from ...plans import floats
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_one_of, check_scale, check_shape, check_written, word, wrong_dtype
from ..views.half_range import kept
from ..views.rows import row_class
from ..views.tiles import Tiles, known, packed, place_fields, tiles

Gelu = Literal["tanh", "erf", "quick"]
Layout = Literal["split", "interleaved"]

KINDS = ("silu", "gelu_tanh", "gelu_erf", "gelu_quick")  # enum Kind
TYPES = (torch.float16, torch.float32)


def silu(x: Tensor, *, out_dtype: torch.dtype | None = None, policy: KernelPolicy = STANDARD) -> Tensor:
    """x * sigmoid(x). x: fp16 or fp32, any shape. Returns a contiguous tensor of `out_dtype` (x's dtype if None)."""
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

    gate, up  fp16 or fp32 of one shape, rows anywhere. Or gate alone: [.., 2 * f] with the gate in the first half
              (layout "split") or at the even places ("interleaved"). Where the gate is the second half, pass two views
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
    """`silu_mul`, written to `out`, fp16 or fp32 of the result's shape with rows anywhere: a part of a wider buffer."""
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


def _activate_wide(x: Tensor, kind: str) -> Tensor:
    """The same for the oracle. torch's own GELU in fp32 makes NaN of Inf on some CPUs."""
    return x * torch.erfc(x * -math.sqrt(0.5)) / 2 if kind == "gelu_erf" else _activate(x, kind)


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


class _Given(NamedTuple):
    """The tensors of a call of any of these ops. out: where the result goes, if the caller says so."""

    out: Tensor | None
    gate: Tensor
    up: Tensor | None
    multiplies: bool

    @staticmethod
    def of(call: Call) -> _Given:
        out, *rest = call.tensors if call.op == SILU_MUL_.name else (None, *call.tensors)
        gate = rest[0]
        assert gate is not None
        return _Given(out, gate, rest[1] if len(rest) > 1 else None, len(rest) > 1)

    def views(self, call: Call) -> tuple[Tensor, Tensor]:
        """gate and up as views; twice x where nothing is multiplied."""
        if not self.multiplies:
            return self.gate, self.gate
        return _halves(self.gate, self.up, *call.options[:3])

    def out_dtype(self, call: Call) -> torch.dtype:
        if self.out is not None:
            return self.out.dtype
        wanted: torch.dtype | None = call.options[-1]
        return wanted or self.gate.dtype


def _tiles(call: Call) -> Tiles | str:
    given = _Given.of(call)
    gate, up = given.views(call)
    return tiles(
        gate.shape, gate.stride(), up.stride(), packed(gate.shape) if given.out is None else given.out.stride()
    )


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    _check_kind(call.options[0])
    given = _Given.of(call)
    gate, up = given.views(call)
    if given.out is not None:
        check_shape("out", given.out, gate, "the result")
        check_written({"out": given.out}, {"gate": gate, "up": up})


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    given = _Given.of(call)
    gate, up = given.views(call)
    names = ("gate", "up") if given.multiplies else ("x",)
    yield from wrong_dtype(TYPES, **dict(zip(names, (gate, up), strict=False)))
    if given.out_dtype(call) not in TYPES:
        yield f"the output is {word(given.out_dtype(call))}, the kernels write float16 and float32"
    if gate.numel():
        view = _tiles(call)
        if isinstance(view, str):
            yield view


def plan(call: Call, card: Card, _tactic: object = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    given = _Given.of(call)
    gate, up = given.views(call)
    out_dtype = given.out_dtype(call)
    new_out = output(gate.shape, out_dtype, card.index)
    if not gate.numel():
        return (lambda *_: new_out()) if given.out is None else (lambda *_: None)
    kind, scale, saturate = call.options[0], *(call.options[2:4] if given.multiplies else (1.0, False))
    view = known(_tiles(call))
    params = ActivationParams(
        scale=scale,
        saturate=saturate and out_dtype is torch.float16,
        kind=KINDS.index(kind),
        out_is_float=out_dtype is torch.float32,
        **floats(gate=gate, up=up),
    )
    view.fill(params, "gate", "up", "out")
    is_packed = given.multiplies and given.up is None
    between = (int(up.storage_offset()) - int(gate.storage_offset())) * gate.element_size() if is_packed else 0
    # Of halves of one tensor the second starts where the width puts it; alternating ones are one operand.
    alternating = is_packed and call.options[1] == "interleaved"
    half = all(dtype is torch.float16 for dtype in (gate.dtype, up.dtype, out_dtype))
    if alternating:
        columns = tuple(column for _, _, column in view.places)
        wide = view.wide((1, 2)) and columns == (2, 2, 1)
    else:
        wide = view.wide() and between % 16 == 0
    wide = wide and half and call.aligned
    ending = f"{'_mul' if given.multiplies else ''}{'_interleaved' if alternating else ''}"
    name = f"{kind}{ending}" if wide else "activation_any"
    grid, threads = view.grid(wide)
    launch = card.kernel("activations", name).prepare(params, grid=grid, block=threads, shape=call.describe())

    def into(out: Tensor, gate: Tensor, up: Tensor | None = None) -> None:
        at = gate.data_ptr()
        launch(at, up.data_ptr() if up is not None else at + between if is_packed else 0, out.data_ptr())

    def run(gate: Tensor, up: Tensor | None = None) -> Tensor:
        out = new_out()
        into(out, gate, up)
        return out

    return run if given.out is None else into


def shape_class(call: Call) -> str:
    """Width exactly, rows to a power of two, layout."""
    sizes = " ".join(
        "-" if t is None else row_class(t) + ("" if t.is_contiguous() else " strided") for t in call.tensors
    )
    return f"{' '.join(map(str, call.options[:2]))} {sizes}"


def _op(name: str, kinds: tuple[str, ...]) -> Op:
    gated = name.endswith("_mul")
    schema = (
        (
            "(Tensor gate, Tensor? up, str kind, str layout, float scale, bool saturate, ScalarType? out_dtype, "
            "str policy) -> Tensor"
        )
        if gated
        else "(Tensor x, str kind, ScalarType? out_dtype, str policy) -> Tensor"
    )
    run: tuple[Any, Any, Any] = (gated_reference, gated_fake, gated_stock) if gated else (reference, fake, stock)
    endings = ("_mul", "_mul_interleaved") if gated else ("",)
    kernels = ("activation_any", *(f"{kind}{ending}" for kind in kinds for ending in endings))
    return Op(
        name=name,
        schema=schema,
        reference=run[0],
        fake=run[1],
        candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(run[2])),
        shape_class=shape_class,
        validate=validate,
        kernels={"activations": kernels},
    )


SILU = _op("silu", KINDS[:1])
GELU = _op("gelu", KINDS[1:])
SILU_MUL = _op("silu_mul", KINDS[:1])
GELU_MUL = _op("gelu_mul", KINDS[1:])
SILU_MUL_ = SILU_MUL.into("silu_mul_")
