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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels_cuda import (
    KernelPolicy,
    join_sums,
    linear,
    linear_,
    linear_pair,
    norm_modulate,
    rms_parts,
)
from ...kernels_cuda.ops.matmul.linear import Activation
from ...kernels_cuda.ops.views.half_range import LARGEST, saturated
from ...kernels_cuda.ops.views.parts import split
from .operands import Weights, operands, packed

TORCHS = KernelPolicy.of("off")
HIDDEN_SCALE = 2.0**-6  # factor of a feed-forward's hidden values
# Rows of a feed-forward at a time: 200 MB of fp32 between its products, for Qwen3 8B.
CHUNK_ROWS = 1024
# Tokens are computed in multiples of this: a kernel's tile takes the same time when part of it is
# empty, and there are fewer shapes.
TILE = 64


class Gate(NamedTuple):
    """The activation of a feed-forward: as our ops call it, and as torch computes it."""

    name: Activation
    function: Callable[[Tensor], Tensor]


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
        if self.splits:
            return split(norm(x))
        if norm.weight_function or norm.bias_function:  # another node's patches
            return saturated(norm(x)).half()
        weight, bias = (one.to(x.device) for one in (norm.weight, norm.bias))
        return norm_modulate(x, weight=weight, bias=bias, eps=norm.eps, out_dtype=torch.float16, policy=self.ops)

    def activated(self, h: Tensor, module: Any, activation: Activation) -> Sequence[Tensor]:
        """activation(module(h)) of an `operand`, for one of stock's Linears: [batch, tokens, n]
        fp16, once or in two parts that add up to it."""
        with operands(h, self.ops, module) as [own]:
            if self.splits:
                return join_sums(self.product(h, own.matrix, own.bias), activation=activation, policy=self.ops).unbind()
            return (linear(h, own.matrix, own.bias, activation=activation, saturate=True, policy=self.ops),)

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

    def add(self, x: Tensor, parts: Sequence[Tensor], module: Any) -> None:
        """x += module(h), for one of stock's Linears. parts: [batch, tokens, k] fp16 each, which
        add up to h."""
        with operands(parts[0], self.ops, module) as [own]:
            self._add(x, parts, own.matrix, own.bias)

    def _add(
        self, x: Tensor, parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None, scale: float = 1.0
    ) -> None:
        for i, part in enumerate(parts):
            own = bias if i == 0 else None
            linear_(x, part, weight, own, residual=x, scale=scale, saturate=True, policy=self.ops)

    def feed_forward(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        inner: Sequence[Any],
        outer: Any,
        gate: Gate,
        *,
        into: Tensor | None = None,
    ) -> None:
        """x += outer(gate(first(n)) * second(n)) with n = rms(x), for stock's Linears without bias.
        `second` may be missing. A chunk of tokens at a time, because the hidden values are wide.

        weight, eps  of the norm
        into         what is added to instead of x, of its shape
        """
        rows_at_a_time = max(TILE, CHUNK_ROWS // max(x.shape[0], 1))
        chunks = torch.split(x, rows_at_a_time, 1)
        like = x.new_empty(0, dtype=torch.float16)
        with operands(like, self.ops, *inner) as weights:
            matrices = [one.matrix for one in weights]
            whole = packed(weights) if self.splits else None
            hidden = [self._hidden(self.operand(rows, weight, eps), matrices, whole, gate) for rows in chunks]
        with operands(like, self.ops, outer) as [own]:
            added = torch.split(x if into is None else into, rows_at_a_time, 1)
            for rows, parts in zip(added, hidden, strict=True):
                self._add(rows, parts, own.matrix, scale=1 / HIDDEN_SCALE)

    def _hidden(self, h: Tensor, matrices: Sequence[Tensor], whole: Weights | None, gate: Gate) -> Sequence[Tensor]:
        """The input of the last product, times HIDDEN_SCALE, as fp16: [batch, tokens, hidden], once
        or in two parts that add up to it.

        whole: the matrices as one, if they are adjacent and `splits`; else None
        """
        if self.splits:
            found = [self.product(h, matrix) for matrix in ([whole.matrix] if whole else matrices)]
            sums = found[0].split_with_sizes([m.shape[0] for m in matrices], -1) if whole else found
            options: Any = {"activation": gate.name, "scale": HIDDEN_SCALE}
            return join_sums(*sums, **options, policy=self.ops).unbind()
        if len(matrices) == 2:
            options = {"activation": gate.name, "scale": HIDDEN_SCALE, "saturate": True}
            return (linear_pair(h, *matrices, **options, policy=self.ops),)
        hidden = gate.function(self.product(h, matrices[0]).float())
        return (hidden.mul_(HIDDEN_SCALE).clamp_(-LARGEST, LARGEST).half(),)


def norm_weight(weight: Tensor, x: Tensor) -> Tensor:
    """A norm's weight on x's device, of a type that the ops take."""
    if weight.device == x.device and weight.dtype in (torch.float16, torch.float32):
        return weight
    return weight.to(x.device, torch.float32)
