"""What torch's own matrix products can do of `linear`, beside plain stock.

cuBLAS has epilogues of its own: bias with GELU or ReLU, and adding what is there already, in fp32 if that is the result's type.
Where they do not reach, one fused pass of ours over the product is still fewer bytes than stock's operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan, place
from ...policy import KernelPolicy
from ...registry import OneWay
from ..elementwise import activations
from ..elementwise import gated_residual as residuals
from ..elementwise.activations import gelu, silu, silu_mul, silu_mul_
from ..elementwise.gated_residual import gated_residual, gated_residual_
from ..views.checks import word
from ..views.rows import folded, rows
from .linear_operands import Operands

Maybe = Tensor | None
# Which GELU: torch computes the tanh form, on every device and by either library.
EPILOGUES = {"gelu_tanh": True, "relu": False}  # activation -> use_gelu of torch._addmm_activation
PASSES: dict[str, Callable[[Tensor, KernelPolicy], Tensor]] = {
    "gelu": lambda y, policy: gelu(y, "erf", policy=policy),
    "gelu_tanh": lambda y, policy: gelu(y, "tanh", policy=policy),
    "silu": lambda y, policy: silu(y, policy=policy),
    "relu": lambda y, _: y.relu_(),
    "none": lambda y, _: y,
}


# torch multiplies halves into floats from 2.8 on.
WRITES_FLOATS = hasattr(torch.ops.aten.baddbmm, "dtype_out")


@dataclass(frozen=True)
class Cublas(OneWay):
    """What all candidates here have in common."""

    name: str = ""
    ours: bool = False

    def refuse(self, call: Call) -> str | None:
        o = Operands.of_call(call)
        return _unlike_torch(call, o) or self.obstacle(o)

    def obstacle(self, o: Operands) -> str | None:
        """What keeps this one from serving operands that torch multiplies."""
        raise NotImplementedError


def _unlike_torch(call: Call, o: Operands) -> str | None:
    """What no candidate here serves."""
    if call.device.type != "cuda":
        return f"tensor is on the {call.device.type.upper()}"
    if o.x.dtype is not torch.float16 or o.weight.dtype is not o.x.dtype:
        return "x and weight are not float16"
    if o.bias is not None and o.bias.dtype is not o.x.dtype:
        return "bias is not float16"
    if not o.x.numel() or not o.weight.numel():
        return "there is nothing to compute"
    return None


@dataclass(frozen=True)
class CublasEpilogue(Cublas):
    """One call of cuBLAS: bias and GELU or ReLU, or the product added to a residual."""

    name: str = "cublas epilogue"

    def obstacle(self, o: Operands) -> str | None:
        if o.saturate or o.scale != 1:
            return "the sums are to be scaled or saturated"
        if o.gate is not None:
            return "cuBLAS has no gate"
        if o.out_dtype is not torch.float16:
            return "the output is not float16"
        if o.residual is not None:
            adds = o.activation == "none" and o.bias is None and o.residual.dtype is torch.float16
            return None if adds else "cuBLAS adds a residual to a plain product only"
        if o.activation not in EPILOGUES:
            return f"cuBLAS has no epilogue for activation {o.activation}"
        return "cuBLAS activates together with a bias only" if o.bias is None else None

    def prepare(self, call: Call) -> Plan:
        o = Operands.of_call(call)
        k, n, shape = o.k, o.n, o.shape
        use_gelu = EPILOGUES.get(o.activation, False)

        def run(x: Tensor, weight: Tensor, bias: Maybe, residual: Maybe, _gate: None) -> Tensor:
            flat, turned = x.reshape(-1, k), weight.t()
            if residual is not None:
                return torch.addmm(residual.reshape(-1, n), flat, turned).reshape(shape)
            assert bias is not None
            out: Tensor = torch._addmm_activation(bias, flat, turned, use_gelu=use_gelu)
            return out.reshape(shape)

        return run if o.out is None else lambda out, *tensors: _copy(out, run(*tensors))


@dataclass(frozen=True)
class CublasFused(Cublas):
    """torch's Linear, then our fused pass for the activation and our fused pass for gate and residual."""

    name: str = "cublas + fused pass"

    def obstacle(self, o: Operands) -> str | None:
        if o.scale != 1 or (o.saturate and o.residual is None):
            return "the sums are to be scaled or saturated"
        if o.saturate and o.out_dtype is torch.float32:
            return "an fp16 product on its way to fp32 could overflow"
        if o.gate is not None and o.residual is None:
            return "no fused pass multiplies by a gate alone"
        if o.out_dtype is not (torch.float16 if o.residual is None else o.residual.dtype):
            return "no fused pass changes the type"
        if o.residual is None:
            return "there is nothing to fuse" if o.activation in ("none", "relu") else None
        product = torch.empty(o.shape, dtype=torch.float16, device="meta")
        added = Call(residuals.GATED.name, (o.residual, product, o.gate), (o.saturate,))
        return next(residuals.obstacles(added), None)

    def prepare(self, call: Call) -> Plan:
        o = Operands.of_call(call)
        policy, activated, saturate = KernelPolicy.of("on", isa=call.policy.isa), PASSES[o.activation], o.saturate

        def run(x: Tensor, weight: Tensor, bias: Maybe, residual: Maybe, gate: Maybe) -> Tensor:
            value = activated(functional.linear(x, weight, bias), policy)
            if residual is None:
                return value
            return gated_residual(residual, value, gate, saturate=saturate, policy=policy)

        def into(out: Tensor, x: Tensor, weight: Tensor, bias: Maybe, residual: Maybe, gate: Maybe) -> None:
            if residual is None or place(out) != place(residual):
                _copy(out, run(x, weight, bias, residual, gate))
            else:
                value = activated(functional.linear(x, weight, bias), policy)
                gated_residual_(out, value, gate, saturate=saturate, policy=policy)

        return run if o.out is None else into


@dataclass(frozen=True)
class CublasWide(Cublas):
    """One call of cuBLAS whose result stays fp32: sums times a scale, or added to a residual where it lies. To saturate means
    nothing for it."""

    name: str = "cublas fp32"

    def obstacle(self, o: Operands) -> str | None:
        if o.out_dtype is not torch.float32:
            return "the output is not float32"
        if o.bias is not None or o.gate is not None or o.activation != "none":
            return "cuBLAS adds a residual to a plain product only"
        if not WRITES_FLOATS:
            return f"torch {torch.__version__} has no product of float16 into float32"
        if o.out is not None and not o.out.is_contiguous():
            return "the output's rows do not follow each other"
        for name, t in (("x", o.x), ("weight", o.weight)):
            step = row_step(t)
            if isinstance(step, str):
                return f"{name}: {step}"
        return None

    def prepare(self, call: Call) -> Plan:
        o = Operands.of_call(call)
        shape, m, n, scale = o.shape, o.m, o.n, o.scale
        of_x, of_weight = _as_one(o.x, m), _as_one(o.weight, n)

        def into(out: Tensor, x: Tensor, weight: Tensor, _bias: None, residual: Maybe, _gate: None) -> None:
            if residual is not None and place(residual) != place(out):
                out.copy_(residual)
            operands = x.as_strided(*of_x), weight.as_strided(*of_weight)
            multiply(out.view(1, m, n), *operands, scale, added=residual is not None)

        def run(x: Tensor, *tensors: Any) -> Tensor:
            out = torch.empty(shape, dtype=torch.float32, device=x.device)
            into(out, x, *tensors)
            return out

        return run if o.out is None else into


def row_step(t: Tensor) -> int | str:
    """How far apart the rows of [..., k] lie, as one matrix; or why torch would have to copy it."""
    view = rows(t)
    if isinstance(view, str):
        return view
    view = folded(view)
    if view.batches > 1:
        return "rows are not equally far apart"
    if view.tokens > 1 and view.row_stride < view.d:
        return "rows overlap"
    return max(view.row_stride, view.d)


def _as_one(t: Tensor, rows_: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Sizes and strides of [..., k] as a batch of one matrix."""
    step = row_step(t)
    assert isinstance(step, int)  # no string here: `refuse` found none
    return (1, rows_, t.shape[-1]), (rows_ * step, step, 1)


def multiply(out: Tensor, x: Tensor, weight: Tensor, scale: float, *, added: bool) -> None:
    """out [1, m, n] fp32 is, or has added to it, scale * (x [1, m, k] @ weight [1, n, k]^T), both fp16.

    Of torch's products this is the one that adds in place to fp32 in every version: until 2.9 addmm wants what is added in fp16.
    Sums are fp32. Reductions in reduced precision, which torch allows cuBLAS, are those of a result narrower than its sums. Sums in
    fp16, where somebody allowed them, torch does not make into fp32: that is taken back for the moment.
    """
    matmul = torch.backends.cuda.matmul
    half_sums = matmul.allow_fp16_accumulation
    if half_sums:
        matmul.allow_fp16_accumulation = False
    try:
        torch.baddbmm(out, x, weight.transpose(1, 2), torch.float32, beta=int(added), alpha=scale, out=out)
    finally:
        if half_sums:
            matmul.allow_fp16_accumulation = True


@dataclass(frozen=True)
class CublasPair(Cublas):
    """torch's Linear for both products of a pair, and our fused pass. Both are rounded in between, as stock's are."""

    name: str = "cublas + fused pass"

    def obstacle(self, o: Operands) -> str | None:
        if o.out_dtype not in (torch.float16, torch.float32):
            return f"the output is {word(o.out_dtype)}, the fused pass writes float16 and float32"
        if o.activation != "silu":
            return f"no fused pass has activation {o.activation} and the product"
        if math.frexp(o.scale)[0] != 0.5:
            return "the fused pass scales by powers of two"
        if o.out is None:
            return None
        made = torch.empty((*o.shape[:-1], 2 * o.n), dtype=torch.float16, device="meta")
        return next(activations.obstacles(Call("silu_mul_", (o.out, made, None), ("silu", "split", 1.0, False))), None)

    def prepare(self, call: Call) -> Plan:
        o = Operands.of_call(call)
        policy = KernelPolicy.of("on", isa=call.policy.isa)
        scale, saturate, dtype = o.scale, o.saturate, o.out_dtype

        def products(x: Tensor, weight: Tensor, up: Maybe) -> tuple[Tensor, Maybe]:
            return functional.linear(x, weight), None if up is None else functional.linear(x, up)

        def run(x: Tensor, weight: Tensor, up: Maybe) -> Tensor:
            return silu_mul(*products(x, weight, up), scale=scale, saturate=saturate, out_dtype=dtype, policy=policy)

        def into(out: Tensor, x: Tensor, weight: Tensor, up: Maybe) -> None:
            silu_mul_(out, *products(x, weight, up), scale=scale, saturate=saturate, policy=policy)

        return run if o.out is None else into


def _copy(out: Tensor, value: Tensor) -> None:
    out.copy_(value)
