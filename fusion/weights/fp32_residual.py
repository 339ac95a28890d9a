"""An FP32 stream around FP16 products, for networks that overflow FP16 and that stock computes in
FP32.

The output of a block is added to the stream from a product's FP32 sums, without rounding to FP16.
The input of a product saturates instead of overflowing.

Rounding. With precision `precise` the input of a product is two FP16 numbers, the value and its
rounding error, and is multiplied twice: against FP32, the error is that of the weights. The parts
are adjacent, [2, batch, tokens, k], so that one product reads the weight once and leaves two sums,
fp32 [2, batch, tokens, n], which the next op adds up as it reads them. An addition to the stream
takes two products. `auto` is `precise` here for every file, because stock multiplies no text
encoder in the numbers of its file. The other tiers take one FP16 number: half the arithmetic, at
about a quarter more error (T5, measured). Sums are FP32 in any case; half sums were measured on the
GPU at 1.5 of stock's error, and 1.7 with Turing's instructions. Attention is always `precise`,
because prompts are short.

Overflow. The hidden values of a gated feed-forward are stored times 2^-6, and the second product
multiplies its sums by 2^6. So they saturate at 4 million, not at 65504.

Sizes. Products take multiples of 8. A feed-forward of another size (Qwen2.5-VL's vision tower has
3420 hidden values) gets rows and columns of zeros, in copies of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels_cuda import (
    KernelPolicy,
    gelu,
    join_sums,
    linear,
    linear_,
    linear_pair,
    norm_modulate,
    rms_parts,
)
from ...kernels_cuda.ops.matmul.linear import PACK, Activation
from ...kernels_cuda.ops.views.half_range import saturated
from ...kernels_cuda.ops.views.parts import join, split
from .operands import Weights, operands, packed

TORCHS = KernelPolicy.of("off")
HIDDEN_SCALE = 2.0**-6  # factor of a feed-forward's hidden values
# Rows of a feed-forward at a time: 200 MB of fp32 between its products, for Qwen3 8B.
CHUNK_ROWS = 1024
# Tokens are computed in multiples of this: a kernel's tile takes the same time when part of it is
# empty, and there are fewer shapes.
TILE = 64


class Gate(NamedTuple):
    """The activation of a feed-forward: as our ops call it, and as torch computes it. quick: the
    quick GELU, which has no name because it is an op of its own, and in no product's epilogue."""

    name: Activation
    function: Callable[[Tensor], Tensor]
    quick: bool = False


@dataclass(frozen=True)
class Wide:
    """How a network computes around its FP32 stream."""

    policy: KernelPolicy

    @cached_property
    def splits(self) -> bool:
        """Whether the input of a product is two FP16 numbers."""
        return self.policy.precision in ("auto", "precise")

    @cached_property
    def ops(self) -> KernelPolicy:
        """The policy of every op: FP32 sums."""
        p = self.policy
        return KernelPolicy(p.default, p.ops, "precise", p.isa)

    def rms(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """RMS norm without bias of x [..., width] fp32. Our kernel writes fp16; torch computes
        fp32."""
        policy = self.ops if dtype is torch.float16 else TORCHS
        return norm_modulate(x, weight=norm_weight(weight, x), eps=eps, kind="rms", out_dtype=dtype, policy=policy)

    def operand(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The normalised input of a product: [batch, tokens, width] fp16, or both parts, [2, batch,
        tokens, width]."""
        if not self.splits:
            return self.rms(x, weight, eps, torch.float16)
        return rms_parts(x, norm_weight(weight, x), eps=eps, policy=self.ops)

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        """The same with one of stock's LayerNorms."""
        if self.splits or norm.weight_function or norm.bias_function:  # another node's patches
            return self.rounded(norm(x))
        weight, bias = (norm_weight(one, x) for one in (norm.weight, norm.bias))
        return norm_modulate(x, weight=weight, bias=bias, eps=norm.eps, out_dtype=torch.float16, policy=self.ops)

    def rounded(self, x: Tensor) -> Tensor:
        """x fp32 as the input of a product: fp16, or both parts, [2, *x.shape]."""
        return split(x) if self.splits else saturated(x).half()

    def chunks(self, x: Tensor, rows: int | None = None) -> Sequence[Tensor]:
        """x [batch, tokens, width] in pieces of its tokens that have about so many rows in all;
        None: `CHUNK_ROWS`."""
        most = rows or CHUNK_ROWS
        return torch.split(x, max(min(TILE, most), most // max(x.shape[0], 1)), 1)

    def product(self, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """An `operand` times a weight [n, width], plus a bias: [batch, tokens, n] fp16, or fp32
        sums in two parts, [2, batch, tokens, n], each with half of the bias."""
        dtype = torch.float32 if self.splits else torch.float16
        if bias is not None and self.splits:
            bias = bias.float() / 2
        return linear(h, weight, bias, saturate=True, out_dtype=dtype, policy=self.ops)

    def projections(self, h: Tensor, modules: Sequence[Any], *, halves: bool = True) -> Sequence[Tensor]:
        """The products of an `operand` with several of stock's Linears, [..., batch, tokens, n]
        each; a single product if their weights are adjacent.

        halves: as saturated fp16, instead of the form that `product` returns
        """

        def made(own: Weights) -> Tensor:
            out = self.product(h, own.matrix, own.bias)
            return join_sums(out, parts=False, policy=self.ops) if halves and self.splits else out

        with operands(h, self.ops, *modules) as weights:
            whole = packed(weights)
            if whole is None:
                return [made(one) for one in weights]
            return made(whole).split_with_sizes([one.matrix.shape[0] for one in weights], -1)

    def add(self, x: Tensor, parts: Sequence[Tensor], module: Any, scale: float = 1.0) -> None:
        """x += scale * (h @ weight^T) + bias, for one of stock's Linears. parts: [batch, tokens, k]
        fp16 each, which add up to h. k: the module's, or as `hidden` leaves it."""
        with operands(parts[0], self.ops, module) as [own]:
            self._add(x, parts, own, scale)

    def _add(self, x: Tensor, parts: Sequence[Tensor], own: Weights, scale: float) -> None:
        more = parts[0].shape[-1] - own.matrix.shape[1]
        weight = functional.pad(own.matrix, (0, more)) if more else own.matrix
        for i, part in enumerate(parts):
            bias = own.bias if i == 0 else None
            linear_(x, part, weight, bias, residual=x, scale=scale, saturate=True, policy=self.ops)

    def feed_forward(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        inner: Sequence[Any],
        outer: Any,
        gate: Gate,
        *,
        into: Tensor,
    ) -> None:
        """into += outer(gate(first(n)) * second(n)) with n = rms(x), for stock's Linears.
        `second` may be missing. A chunk of tokens at a time, because the hidden values are wide.

        weight, eps  of the norm
        into         x itself, or what is added to instead, of its shape
        """
        chunks = self.chunks(x)
        like = x.new_empty(0, dtype=torch.float16)
        with operands(like, self.ops, *inner) as weights:
            hidden = [self._hidden(self.operand(rows, weight, eps), weights, gate, HIDDEN_SCALE) for rows in chunks]
        with operands(like, self.ops, outer) as [own]:
            for rows, parts in zip(self.chunks(into), hidden, strict=True):
                self._add(rows, parts, own, 1 / HIDDEN_SCALE)

    def hidden(self, h: Tensor, inner: Sequence[Any], gate: Gate, scale: float = 1.0) -> Sequence[Tensor]:
        """gate(first(h)) * second(h) * scale of an `operand`, for stock's Linears: [batch, tokens,
        n] fp16, once or in two parts that add up to it. `second` may be missing.

        scale  a power of two, which the next product takes back; 1 with the quick GELU. Where n is
               no multiple of 8, zeros follow up to the next one
        """
        with operands(h, self.ops, *inner) as weights:
            return self._hidden(h, weights, gate, scale)

    def _hidden(self, h: Tensor, weights: Sequence[Weights], gate: Gate, scale: float) -> Sequence[Tensor]:
        if weights[0].matrix.shape[0] % PACK:
            weights = [_in_packs(own) for own in weights]
        if not self.splits:
            return (self._in_halves(h, weights, gate, scale),)
        whole = packed(weights) if len(weights) > 1 else None
        sums = [self.product(h, own.matrix, own.bias) for own in ([whole] if whole else weights)]
        if whole:
            sums = list(sums[0].split_with_sizes([own.matrix.shape[0] for own in weights], -1))
        if gate.quick:
            return split(gelu(join(sums[0]), "quick", policy=self.ops)).unbind()
        return join_sums(*sums, activation=gate.name, scale=scale, policy=self.ops).unbind()

    def _in_halves(self, h: Tensor, weights: Sequence[Weights], gate: Gate, scale: float) -> Tensor:
        """The same in one fp16 number."""
        own, *more = weights
        if gate.quick:
            return gelu(self.product(h, own.matrix, own.bias), "quick", policy=self.ops)
        options: Any = {"saturate": True, "policy": self.ops}
        if more and all(one.bias is None for one in weights):
            return linear_pair(h, own.matrix, more[0].matrix, activation=gate.name, scale=scale, **options)
        if not more and scale == 1:
            return linear(h, own.matrix, own.bias, activation=gate.name, **options)
        made = [linear(h, one.matrix, one.bias, out_dtype=torch.float32, **options) for one in weights]
        hidden = gate.function(made[0]).mul_(scale)
        return saturated(hidden.mul_(made[1]) if more else hidden).half()


def _in_packs(own: Weights) -> Weights:
    """The weights with rows of zeros up to the next multiple of 8."""
    more = -own.matrix.shape[0] % PACK
    bias = None if own.bias is None else functional.pad(own.bias, (0, more))
    return Weights(functional.pad(own.matrix, (0, 0, 0, more)), bias)


def norm_weight(weight: Tensor, x: Tensor) -> Tensor:
    """A norm's weight or bias on x's device, of a type that the ops take."""
    if weight.device == x.device and weight.dtype in (torch.float16, torch.float32):
        return weight
    return weight.to(x.device, torch.float32)
