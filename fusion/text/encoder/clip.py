"""Stock's CLIPEncoder over our kernels: the layers of CLIP for text, and of SigLIP within a language
model that sees.

    x ─ norm ─ q, k, v ─ attention ─ out_proj, + x ─ norm ─ fc1, GELU, fc2, + x

Stock computes them in FP32 and widens every weight at every use. Here products are FP16 with FP32
sums (`block.py`). CLIP-L has the quick GELU, x * sigmoid(1.702 x). CLIP-G has the exact one and
SigLIP that by tanh, which are computed in the product's epilogue, or where its sums are added up.

Layers are still called as modules, so their weights may stream. Embeddings, the norms around the
encoder, pooling and projections stay stock's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels_cuda import KernelPolicy
from ...base.policy import all_off, standing
from ...base.subclassing import mix
from ...weights.fp32_residual import Wide
from ..common import HAND_BACK
from .block import PATCHES, Call, compute
from .described import described, obstacle

OPS = ("norm_modulate", "linear", "linear_", "join_sums", "attention", "gelu")


def fuse_encoder(encoder: Any, policy: KernelPolicy, *, on_cpu: bool) -> int:
    """Let one CLIPEncoder compute through our ops, in place. Returns how many layers."""
    mix(encoder, FusedEncoder, **standing(policy), fusestream_on_cpu=on_cpu)
    for layer in encoder.layers:
        mix(layer, FusedLayer)
    return len(encoder.layers)


class FusedEncoder:
    """Mixed into the class of a fused CLIPEncoder. fusestream_on_cpu: also computes on the CPU,
    over the references."""

    layers: Any
    fusestream_policy: KernelPolicy
    fusestream_on_cpu: bool

    def forward(
        self, x: Tensor, mask: Tensor | None = None, intermediate_output: int | str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Stock's CLIPEncoder: x [batch, tokens, width] fp32. mask is added to scores: the causal
        one [tokens, tokens], with padding [batch, 1, tokens, tokens], or None for patches, which
        see all. Returns the output of the last layer and, if asked for, of another layer or of
        all."""
        policy = self.fusestream_policy
        if not all_off(policy, OPS):
            reason = obstacle(self.layers, x, policy, on_cpu=self.fusestream_on_cpu) or _unlike_a_text(x, mask)
            if reason is None:
                visible = None if mask is None or mask.ndim == 2 else mask >= 0
                causal = mask is not None and mask.ndim == 2
                return encode(self, Call(Wide(policy), visible, causal, rows=PATCHES), x, intermediate_output)
            HAND_BACK(reason, x, forced=policy.default == "on", quietly=not x.is_cuda)
        found: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
            x, mask=mask, intermediate_output=intermediate_output
        )
        return found


def encode(encoder: Any, call: Call, x: Tensor, intermediate_output: int | str | None) -> tuple[Tensor, Tensor | None]:
    """Run the layers one after the other over a copy of x."""
    wanted = range(len(encoder.layers))[intermediate_output] if isinstance(intermediate_output, int) else None
    x, kept = x.clone(memory_format=torch.contiguous_format), []
    for i, layer in enumerate(encoder.layers):
        x = layer(x, call)
        if intermediate_output == "all" or i == wanted:
            kept.append(x.clone())
    if intermediate_output == "all":
        return x, torch.stack(kept, 1)
    return x, kept[0] if kept else None


def _unlike_a_text(x: Tensor, mask: Tensor | None) -> str | None:
    """Why stock must compute a call with this mask, in words a user understands; None if we may."""
    if mask is None or mask.shape[-2:] == (x.shape[1], x.shape[1]):
        return None
    return "the attention has not the mask of a text"


class FusedLayer:
    """Mixed into the class of a fused CLIPLayer."""

    def forward(self, x: Tensor, mask: Any = None, optimized_attention: Any = None) -> Tensor:
        """Stock's CLIPLayer. If the encoder is ours, `mask` is its `Call`, and x [batch, tokens,
        width] its own fp32 stream, which is added to in place; otherwise it is a call of
        stock's."""
        if not isinstance(mask, Call):
            found: Tensor = super().forward(x, mask, optimized_attention)  # type: ignore[misc]
            return found
        return compute(described(self), x, mask)
