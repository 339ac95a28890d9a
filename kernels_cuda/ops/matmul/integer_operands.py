"""The operands of linear_int8, linear_int4 and their pairs by name, the checks of their shapes, the maths, and what stock runs.

Stock has two ways for 8 bits. Its own library multiplies them where it can; what that has registered with torch is asked, if it
is there. Else stock rounds x, multiplies by torch's own product of 8-bit matrices and scales the sums in fp32. Of numbers of 4
bits it makes bytes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Options, Plan, Tensors
from ...errors import KernelError
from ...registry import OneWay
from ..quant.integer_rows import IntegerRows
from ..quant.rotation import GROUPS, check_rotation
from ..quant.rows_to_int4 import INT4_ROWS
from ..quant.rows_to_int8 import INT8_ROWS
from ..views.checks import word
from ..views.half_range import in_type
from .linear_operands import Operands, activate, activate_wide, check_operands, combine

LEAST_ROWS = 32  # of torch's product of 8-bit matrices on a card: fewer are filled up
PACKS = (8, 32)  # ... of which k and n are multiples, or it refuses them on some card
SCALED_BYTES = 2**28  # of sums that are scaled at a time


ROUNDINGS = {"linear_int8": INT8_ROWS, "linear_int4": INT4_ROWS}


@dataclass(frozen=True)
class IntegerOperands:
    """The tensors and options of a call, by name."""

    plain: Operands  # those that `linear` has, too
    x_scale: Tensor | None  # of rows that are rounded already
    weight_scale: Tensor
    up_scale: Tensor | None  # of a pair: the scales of the weight whose product is not activated
    rotation: int
    rounding: IntegerRows  # what the weight's rows are of, and x's become

    @staticmethod
    def of(op: str, tensors: Tensors, options: Options) -> IntegerOperands:
        written = op.endswith("_")
        name = op.removesuffix("_")
        single = name.removesuffix("_pair")
        paired = name != single
        out = tensors[0] if written else None
        x, x_scale, weight, weight_scale, *rest = cast(tuple[Any, ...], tensors[1:] if written else tensors)
        up, up_scale, bias, residual, gate = (*rest, None, None, None) if paired else (None, None, *rest)
        activation, scale, saturate, rotation = options[:4]
        dtype = residual.dtype if residual is not None else torch.float16 if x_scale is not None else x.dtype
        dtype = out.dtype if out is not None else options[4] or dtype
        plain = Operands(x, weight, up, bias, residual, gate, activation, scale, saturate, dtype, out, paired)
        return IntegerOperands(plain, x_scale, weight_scale, up_scale, rotation, ROUNDINGS[single])

    @staticmethod
    def of_call(call: Call) -> IntegerOperands:
        return IntegerOperands.of(call.op, call.tensors, call.options)

    @property
    def k(self) -> int:
        """Numbers of a row; `plain` counts bytes."""
        return self.plain.k * self.rounding.in_byte

    def rounded(self) -> IntegerOperands:
        """As they will be once x is rounded."""
        shape = self.rounding.stored_shape(self.plain.x)
        return replace(self, plain=replace(self.plain, x=torch.empty(shape, dtype=torch.int8, device="meta")))

    @property
    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """Each weight and its scales, [1] or [n]."""
        scales = self.weight_scale.reshape(-1)
        if self.plain.up is None or self.up_scale is None:
            return [(self.plain.weight, scales)]
        return [(self.plain.weight, scales), (self.plain.up, self.up_scale.reshape(-1))]

    @property
    def factors(self) -> tuple[float, ...]:
        """What the sums of each weight are multiplied with: of a pair only those that are not activated."""
        return (self.plain.scale,) if self.plain.up is None else (1.0, self.plain.scale)


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    o = IntegerOperands.of_call(call)
    rounded = o.plain.x.dtype is torch.int8
    check_operands(o.plain, in_element=1 if rounded else o.rounding.in_byte)
    for name, scales in (("weight_scale", o.weight_scale), ("up_scale", o.up_scale)):
        if scales is not None and (scales.numel() not in (1, o.plain.n) or scales.shape[1:].numel() != 1):
            raise ValueError(f"{name}: {list(scales.shape)} is neither one value nor one for each of {o.plain.n} rows")
    if o.up_scale is not None and o.up_scale.numel() != o.weight_scale.numel():
        raise ValueError(f"up_scale: {list(o.up_scale.shape)} is not as weight_scale is, {list(o.weight_scale.shape)}")
    if rounded != (o.x_scale is not None):
        raise ValueError(f"x is {word(o.plain.x)}, and rows of int8 come with their scales, others without")
    if o.x_scale is None:
        check_rotation(o.rotation, o.k)
        return
    if o.rotation:
        raise ValueError(f"rotation is {o.rotation}, and x is rounded already: rows are turned before they are rounded")
    if o.x_scale.shape != o.plain.x.shape[:-1]:
        raise ValueError(f"x_scale: {list(o.x_scale.shape)} is not one for each row of x {list(o.plain.x.shape)}")


def compute(o: IntegerOperands) -> Tensor:
    """The oracle: exact sums, and from there on fp32, or float64 where that is asked for."""
    p = o.plain
    wide = torch.float64 if p.out_dtype is torch.float64 else torch.float32
    stored, x_scale = o.rounding.reference(p.x, o.rotation) if o.x_scale is None else (p.x, o.x_scale)
    numbers = o.rounding.bytes_as_numbers(stored).double()

    def scaled(weight: Tensor, scales: Tensor, factor: float) -> Tensor:
        # float64 holds every sum of fewer than 2^39 such products: whatever order they are added in, they are exact.
        sums = (numbers @ o.rounding.bytes_as_numbers(weight).double().t()).to(wide)
        return sums * (x_scale.to(wide)[..., None] * (scales.to(wide) * factor))

    value, *others = (scaled(*one, factor) for one, factor in zip(o.weights, o.factors, strict=True))
    bias, residual, gate = in_type(wide, p.bias, p.residual, p.gate)
    if bias is not None:
        value = value + bias
    value = activate_wide(value, p.activation)
    for up in others:
        value = value * up
    asked = replace(p, x=value, residual=residual, gate=gate)
    return combine(asked, value).contiguous()


def product(x8: Tensor, weight: Tensor) -> Tensor:
    """[m, n], int32 by torch's own product of 8-bit matrices, or fp32 where that one does not serve."""
    (m, k), n = x8.shape, weight.shape[0]
    if k % PACKS[0] or n % PACKS[1] or not x8.numel():
        return x8.float() @ weight.float().t()
    if x8.is_cuda and m < LEAST_ROWS:
        x8 = functional.pad(x8, (0, 0, 0, LEAST_ROWS - m))
    found: Tensor = torch._int_mm(x8, weight.t())
    return found[:m]


def stock_compute(o: IntegerOperands) -> Tensor:
    """Rows rounded, the product, its scales and then one operation after the other, in the type of the result."""
    p = o.plain
    stored, x_scale = o.rounding.stock(p.x, o.rotation) if o.x_scale is None else (p.x, o.x_scale)
    flat = o.rounding.bytes_as_numbers(stored).reshape(-1, o.k).contiguous()
    of_rows = x_scale.reshape(-1, 1)
    rows = max(SCALED_BYTES // max(4 * p.n, 1), 1)
    # What would overflow between the two of a pair is kept in fp32, as `linear_pair` keeps it.
    dtype = torch.float32 if p.paired and (p.saturate or p.scale != 1) else p.out_dtype

    def scaled(weight: Tensor, scales: Tensor, factor: float) -> Tensor:
        sums = product(flat, o.rounding.bytes_as_numbers(weight))
        parts = [
            (sums[at : at + rows].float() * (of_rows[at : at + rows] * (scales * factor))).to(dtype)
            for at in range(0, max(sums.shape[0], 1), rows)
        ]
        return torch.cat(parts).reshape(p.shape)

    value, *others = (scaled(*one, factor) for one, factor in zip(o.weights, o.factors, strict=True))
    if p.bias is not None:
        value = value + p.bias.to(value.dtype)
    value = activate(value, p.activation)
    for up in others:
        value = value * up
    return combine(p, value).contiguous()


CODES = {torch.float16: 1, torch.bfloat16: 2}  # what the library calls them
EXPECTED = ("x", "weight", "weight_scale", "bias", "output_dtype_code", "convrot", "convrot_groupsize")


def kitchen() -> Callable[..., Tensor] | None:
    """The product of stock's own library, if that is loaded and has it as it is known here."""
    found: Any = getattr(torch.ops.comfy_kitchen, "int8_linear", None)
    if found is None or tuple(a.name for a in found.default._schema.arguments[: len(EXPECTED)]) != EXPECTED:
        return None
    chosen: Callable[..., Tensor] = found.default
    return chosen


@dataclass(frozen=True)
class KitchenLinear(OneWay):
    """The library that stock multiplies such weights with; what follows the product is torch's, as in stock."""

    name: str = "comfy-kitchen"
    ours: bool = False

    def refuse(self, call: Call) -> str | None:
        o = IntegerOperands.of_call(call)
        if call.device.type != "cuda":
            return f"tensor is on the {call.device.type.upper()}"
        if o.x_scale is not None or o.plain.x.dtype not in CODES:
            return "it rounds x itself, from float16 or bfloat16"
        if o.plain.saturate or o.plain.scale != 1:
            return "the sums are to be scaled or saturated"
        if not o.plain.m * o.plain.n * o.plain.k:
            return "there is nothing to compute"
        return "comfy-kitchen is not loaded, or has no int8_linear as it is known here" if kitchen() is None else None

    def prepare(self, call: Call) -> Plan:
        o = IntegerOperands.of_call(call)
        run = kitchen()
        assert run is not None  # `refuse` found it

        def multiplied(*tensors: Any) -> Tensor:
            x, _, weight, weight_scale, bias, residual, gate = tensors
            turned = (o.rotation > 0, o.rotation or GROUPS[-1])
            try:
                value = run(x.contiguous(), weight.contiguous(), weight_scale, bias, CODES[x.dtype], *turned)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # it has its own ways to say that it does not serve: that loses a measurement
                raise KernelError(f"comfy-kitchen: {error}") from error
            value = activate(value, o.plain.activation)
            return combine(replace(o.plain, x=x, residual=residual, gate=gate), value).contiguous()

        if o.plain.out is None:
            return multiplied
        return lambda out, *tensors: out.copy_(multiplied(*tensors))
