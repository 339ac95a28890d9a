"""An FP32 stream around FP16 products: for networks that overflow FP16 where stock computes them in FP32.

What a block adds to the stream leaves a product's FP32 sums without being rounded to FP16, and what goes into a product saturates
instead of overflowing.

Rounding. With precision `precise` what goes into a product is kept as two FP16 numbers, the value and what rounding took from it,
and multiplied twice: against FP32, the error is that of the weights. Both lie one behind the other, [2, batch, tokens, k], so that
one product reads the weight once and leaves two sums, fp32 [2, batch, tokens, n], which whatever comes next adds up as it reads
them. What is added to the stream is added by two products. `auto` is `precise` here, whatever the file is, because stock multiplies
no text encoder in the numbers of its file. With the other tiers there is one FP16 number: half the
arithmetic, at about a quarter more error (T5, measured). Sums are FP32 all the same; half sums were measured on the GPU at 1.5 of
stock's error, and 1.7 with Turing's instructions. Attention is `precise` throughout: prompts are short.

Overflow. The hidden values of a gated feed-forward are stored times 2^-6, which the second product takes back from its sums. They
overflow at 4 million then, not at 65504, and saturate there.
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
HIDDEN_SCALE = 2.0**-6  # of a feed-forward's hidden values
CHUNK_ROWS = 1024  # of a feed-forward: 200 MB of fp32 between its products, for Qwen3 8B
TILE = 64  # tokens are computed in multiples of this: a tile's time either way, and few shapes


class Gate(NamedTuple):
    """The activation of a feed-forward: as our ops call it, and as torch computes it."""

    name: Activation
    function: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Wide:
    """How a network computes around its stream."""

    policy: KernelPolicy

    @cached_property
    def splits(self) -> bool:
        """Whether what goes into a product is two FP16 numbers."""
        return self.policy.precision in ("auto", "precise")

    @cached_property
    def ops(self) -> KernelPolicy:
        """Of every op: its sums are FP32."""
        p = self.policy
        return KernelPolicy(p.default, p.ops, "precise", p.isa)

    def rms(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """RMS norm without bias of x [..., width] fp32. Our kernel writes fp16; where fp32 is wanted torch's own serves."""
        policy = self.ops if dtype is torch.float16 else TORCHS
        return norm_modulate(x, weight=norm_weight(weight, x), eps=eps, kind="rms", out_dtype=dtype, policy=policy)

    def operand(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """What goes into a product, normalised: [batch, tokens, width] fp16, or both parts, [2, batch, tokens, width]."""
        if not self.splits:
            return self.rms(x, weight, eps, torch.float16)
        return rms_parts(x, norm_weight(weight, x), eps=eps, policy=self.ops)

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        """The same of one of stock's LayerNorms."""
        if self.splits:
            return split(norm(x))
        if norm.weight_function or norm.bias_function:  # another node's patches
            return saturated(norm(x)).half()
        weight, bias = (one.to(x.device) for one in (norm.weight, norm.bias))
        return norm_modulate(x, weight=weight, bias=bias, eps=norm.eps, out_dtype=torch.float16, policy=self.ops)

    def activated(self, h: Tensor, module: Any, activation: Activation) -> Sequence[Tensor]:
        """activation(module(h)) of an `operand`, for one of stock's Linears: as fp16 [batch, tokens, n], or two parts that add up
        to it."""
        with operands(h, self.ops, module) as [own]:
            if self.splits:
                return join_sums(self.product(h, own.matrix, own.bias), activation=activation, policy=self.ops).unbind()
            return (linear(h, own.matrix, own.bias, activation=activation, saturate=True, policy=self.ops),)

    def product(self, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """An `operand` times a weight [n, width], and a bias: [batch, tokens, n] fp16, or fp32 sums in two parts,
        [2, batch, tokens, n], of which each has half of the bias."""
        dtype = torch.float32 if self.splits else torch.float16
        if bias is not None and self.splits:
            bias = bias.float() / 2
        return linear(h, weight, bias, saturate=True, out_dtype=dtype, policy=self.ops)

    def projections(self, h: Tensor, modules: Sequence[Any], *, halves: bool = True) -> Sequence[Tensor]:
        """What several of stock's Linears make of an `operand`, [..., batch, tokens, n] each; of one product where
        their weights lie together.

        halves: as fp16 that saturates, and not as `product` has it
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
        """x += module(h), for one of stock's Linears and the sum h of these parts, [batch, tokens, k] fp16."""
        with operands(parts[0], self.ops, module) as [own]:
            self._add(x, parts, own.matrix, own.bias)

    def _add(
        self, x: Tensor, parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None, scale: float = 1.0
    ) -> None:
        for i, part in enumerate(parts):
            own = bias if i == 0 else None
            linear_(x, part, weight, own, residual=x, scale=scale, saturate=True, policy=self.ops)

    def feed_forward(self, x: Tensor, weight: Tensor, eps: float, inner: Sequence[Any], outer: Any, gate: Gate) -> None:
        """x += outer(gate(first(n)) * second(n)) with n = rms(x), or without the second one: all of them stock's Linears without
        bias. A chunk of tokens at a time: the hidden values are wide.

        weight, eps  of the norm
        """
        chunks = torch.split(x, max(TILE, CHUNK_ROWS // max(x.shape[0], 1)), 1)
        like = x.new_empty(0, dtype=torch.float16)
        with operands(like, self.ops, *inner) as weights:
            matrices = [one.matrix for one in weights]
            whole = packed(weights) if self.splits else None
            hidden = [self._hidden(self.operand(rows, weight, eps), matrices, whole, gate) for rows in chunks]
        with operands(like, self.ops, outer) as [own]:
            for rows, parts in zip(chunks, hidden, strict=True):
                self._add(rows, parts, own.matrix, scale=1 / HIDDEN_SCALE)

    def _hidden(self, h: Tensor, matrices: Sequence[Tensor], whole: Weights | None, gate: Gate) -> Sequence[Tensor]:
        """What the last product is given, times HIDDEN_SCALE, as fp16: [batch, tokens, hidden], or two parts that add up to it.

        whole: the matrices as one, where they lie together and that serves
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
