"""The operands of linear by name, the checks of their shapes, the maths, and what stock runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Options, Tensors
from ..elementwise.activations import exact_gelu
from ..views.checks import check_one_of, check_result, check_shape, check_vector, check_written
from ..views.half_range import in_type, kept
from ..views.rows import batch_sizes, check_frames, spread

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")  # enum Activation
PAIRS = ("linear_pair", "linear_pair_")
WRITTEN = ("linear_", "linear_pair_")  # whose first tensor is where the result goes


@dataclass(frozen=True)
class Operands:
    """The tensors and options of a call, by name."""

    x: Tensor
    weight: Tensor
    up: Tensor | None  # of a pair: the weight whose product is not activated
    bias: Tensor | None
    residual: Tensor | None
    gate: Tensor | None
    activation: str
    scale: float
    saturate: bool
    out_dtype: torch.dtype
    out: Tensor | None  # where the result goes, if the caller says so
    paired: bool

    @staticmethod
    def of(op: str, tensors: Tensors, options: Options) -> Operands:
        out = tensors[0] if op in WRITTEN else None
        x, weight, *rest = cast(tuple[Any, ...], tensors[1:] if op in WRITTEN else tensors)
        activation, scale, saturate = options[:3]
        if op in PAIRS:
            gate_weight, up = halves(weight, rest[0])
            dtype = out.dtype if out is not None else options[3] or x.dtype
            return Operands(x, gate_weight, up, None, None, None, activation, scale, saturate, dtype, out, True)
        bias, residual, gate = rest
        natural = (x if residual is None else residual).dtype
        dtype = out.dtype if out is not None else options[3] or natural
        return Operands(x, weight, None, bias, residual, gate, activation, scale, saturate, dtype, out, False)

    @staticmethod
    def of_call(call: Call) -> Operands:
        return Operands.of(call.op, call.tensors, call.options)

    @property
    def m(self) -> int:
        return self.batches * self.tokens

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.n)

    @property
    def batches(self) -> int:
        return batch_sizes(self.x)[0]

    @property
    def tokens(self) -> int:
        return batch_sizes(self.x)[1]

    @property
    def gate_over_rows(self) -> Tensor | None:
        """The gate so that it broadcasts against [batches, tokens, n]."""
        return None if self.gate is None else spread(self.gate, self.tokens, self.batches, self.n, "gate")


def halves(weight: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two weights of a pair: as they are, or the halves of one [2 n, k]."""
    if up is not None:
        return weight, up
    if weight.ndim != 2 or weight.shape[0] % 2:
        raise ValueError(f"weight: {list(weight.shape)} is not [2 n, k]")
    half = weight.shape[0] // 2
    return weight[:half], weight[half:]


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    check_operands(Operands.of_call(call))


def check_operands(o: Operands, *, in_element: int = 1) -> None:
    """in_element: numbers of the weight in each of its elements, where those of x are single ones."""
    check_one_of("activation", o.activation, ACTIVATIONS)
    if o.weight.ndim != 2:
        raise ValueError(f"weight: {list(o.weight.shape)} is not [n, k]")
    if o.x.ndim == 0 or o.x.shape[-1] != o.k * in_element:
        raise ValueError(f"x: {list(o.x.shape)} does not go with the weight {list(o.weight.shape)}")
    check_shape("up", o.up, o.weight, "the weight")
    check_vector("bias", o.bias, o.n)
    check_result("residual", o.residual, o.shape)
    check_result("out", o.out, o.shape)
    if o.gate is not None:
        check_frames(o.gate, o.x, o.n, "gate")
    if not (math.isfinite(o.scale) and o.scale != 0):
        raise ValueError(f"scale is {o.scale}, expected a finite number that is not zero")
    if o.out is not None:
        read = {"x": o.x, "weight": o.weight, "up": o.up, "bias": o.bias, "residual": o.residual, "gate": o.gate}
        check_written({"out": o.out}, read, itself=("residual",))


def activate(value: Tensor, kind: str) -> Tensor:
    """As torch computes it, in the value's type."""
    if kind == "gelu":
        return functional.gelu(value)
    if kind == "gelu_tanh":
        return functional.gelu(value, approximate="tanh")
    if kind == "silu":
        return functional.silu(value)
    return functional.relu(value) if kind == "relu" else value


def activate_wide(value: Tensor, kind: str) -> Tensor:
    """The same for the oracle."""
    return exact_gelu(value) if kind == "gelu" else activate(value, kind)


def combine(o: Operands, value: Tensor) -> Tensor:
    """Gate, residual and the result's type, over an activated [.., n]."""
    gate, shape = o.gate_over_rows, value.shape
    if gate is not None:
        flat = value.reshape(o.batches, o.tokens, o.n)
        if o.residual is None:
            value = (flat * gate).reshape(shape)
        else:
            value = torch.addcmul(o.residual.reshape(flat.shape), flat, gate).reshape(shape)
    elif o.residual is not None:
        value = o.residual + value
    return kept(value, o.out_dtype, o.saturate).to(o.out_dtype)


def compute(o: Operands) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(o.x.dtype, torch.float32)
    x, weight, up, bias, residual, gate = in_type(wide, o.x, o.weight, o.up, o.bias, o.residual, o.gate)
    value = (x @ weight.t()) * (1.0 if o.paired else o.scale)
    if bias is not None:
        value = value + bias
    value = activate_wide(value, o.activation)
    if up is not None:
        value = value * (x @ up.t()) * o.scale
    return combine(replace(o, residual=residual, gate=gate), value).contiguous()


def product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """torch's Linear. A scale is cuBLAS' alpha: it is applied to the sums, before they are rounded."""
    bias = None if bias is None else bias.to(x.dtype)
    if scale == 1:
        return functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    added = x.new_zeros(1) if bias is None else bias
    value = torch.addmm(added, flat, weight.t(), beta=0 if bias is None else 1, alpha=scale)
    return value.reshape(*x.shape[:-1], weight.shape[0])


def _is_wide(o: Operands) -> bool:
    """Whether stock multiplies in fp32: an fp16 product on its way there could overflow."""
    return o.up is None and o.saturate and o.out_dtype is torch.float32


def stock_beside(call: Call) -> int:
    """Bytes that stock's way takes on the way: operands in fp32, where they are not."""
    o = Operands.of_call(call)
    narrow = [t for t in (o.x, o.weight) if t.dtype is not torch.float32] if _is_wide(o) else []
    return sum(4 * t.numel() for t in narrow)


def stock_compute(o: Operands) -> Tensor:
    """What stock runs: torch's Linear, then one operation after the other, in the tensors' own types."""
    if o.up is None:
        x, weight = o.x, o.weight
        if _is_wide(o):
            x, weight = x.float(), weight.float()
        return combine(o, activate(product(x, weight, o.bias, o.scale), o.activation)).contiguous()
    gated, up = functional.linear(o.x, o.weight), functional.linear(o.x, o.up)
    if o.scale != 1 or o.saturate:  # where fp16 would overflow, stock's T5 runs in fp32
        gated, up = gated.float(), up.float() * o.scale
    return combine(o, activate(gated, o.activation) * up).contiguous()
