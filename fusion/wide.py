"""An FP32 stream around FP16 products: for networks that overflow FP16 where stock computes them in FP32.

What a block adds to the stream leaves a product's FP32 sums without being rounded to FP16, and what goes into a product saturates
instead of overflowing.

Rounding. With precision `precise`, what goes into a product is kept as two FP16 numbers, the value and what rounding took from it,
and multiplied twice: against FP32, the error is that of the weights. With the other tiers there is one FP16 number: half the
arithmetic, at about a quarter more error (T5, measured). Sums are FP32 all the same; half sums were measured on the GPU at 1.5 of
stock's error, and 1.7 with Turing's instructions. Attention is `precise` throughout: prompts are short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels_cuda import KernelPolicy, linear, norm_modulate

LARGEST = 65504.0
TORCHS = KernelPolicy.of("off")


@dataclass(frozen=True)
class Wide:
    """How a network computes around its stream."""

    policy: KernelPolicy

    @property
    def splits(self) -> bool:
        """Whether what goes into a product is two FP16 numbers."""
        return self.policy.precision == "precise"

    @property
    def ops(self) -> KernelPolicy:
        """Of every op: its sums are FP32."""
        p = self.policy
        return KernelPolicy(p.default, p.ops, "precise", p.isa)

    def rms(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """RMS norm without bias of x [..., width] fp32. Our kernel writes fp16; where fp32 is wanted torch's own serves."""
        if weight.device != x.device or weight.dtype not in (torch.float16, torch.float32):
            weight = weight.to(x.device, torch.float32)
        policy = self.ops if dtype is torch.float16 else TORCHS
        return norm_modulate(x, weight=weight, eps=eps, kind="rms", out_dtype=dtype, policy=policy)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """fp32 numbers as fp16: the value, and what rounding took from it if that counts."""
        value = x.half()
        return (value, (x - value).half()) if self.splits else (value,)

    def operand(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """What goes into a product, normalised: [batch, tokens, width] fp16, or both parts, [2, batch, tokens, width]."""
        if not self.splits:
            return self.rms(x, weight, eps, torch.float16)
        return torch.stack(self.split(self.rms(x, weight, eps, torch.float32)))

    def product(self, h: Tensor, weight: Tensor) -> Tensor:
        """An `operand` times a weight [n, width]: [batch, tokens, n], fp16, or fp32 where it had two parts. The weight is read
        once."""
        if not self.splits:
            return linear(h, weight, saturate=True, policy=self.ops)
        out = linear(h, weight, saturate=True, out_dtype=torch.float32, policy=self.ops)
        return out[0].add_(out[1])


def saturated(x: Tensor) -> Tensor:
    """As fp16; what is too large for it is the largest that is not."""
    return x if x.dtype is torch.float16 else x.clamp_(-LARGEST, LARGEST).half()
