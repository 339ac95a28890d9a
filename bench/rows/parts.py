"""rms_parts, join_sums and rms_rope_sums at the shapes of Qwen3 4B and UMT5: what precision `precise` does between products."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels_cuda.ops.matmul import join_sums
from ...kernels_cuda.ops.norm import rms_parts, rms_rope_sums
from ..row import Row, Tensors


def sums(*shape: int) -> Tensor:
    """As a product of two parts leaves them: the second is small."""
    found = torch.randn(2, *shape, device="cuda")
    found[1] *= 2.0**-11
    return found


def norm(tokens: int, width: int) -> Tensors:
    return torch.randn(1, tokens, width, device="cuda"), torch.randn(width, device="cuda").half()


def heads(tokens: int) -> Tensors:
    """Views of q, k and v in one product, and cosines that repeat for the upper half."""
    packed = sums(1, tokens, 48, 128)
    angle = torch.rand(1, 1, tokens, 128, device="cuda")
    weights = (torch.randn(128, device="cuda").half() for _ in range(2))
    return packed[..., :32, :], packed[..., 32:40, :], *weights, angle.cos()[..., :64], angle.sin()[..., :64]


def two(tokens: int, width: int) -> Tensors:
    return sums(1, tokens, width), sums(1, tokens, width)


SILU = ("silu", 2.0**-6, True)
GELU = ("gelu_tanh", 2.0**-6, True)

ROWS = [
    Row("rms_parts", "Qwen3 4B: 512x2560", lambda: norm(512, 2560), (1e-6,), rms_parts.stock),
    Row("rms_parts", "UMT5: 512x4096", lambda: norm(512, 4096), (1e-6,), rms_parts.stock),
    Row("join_sums", "Qwen3 4B feed-forward: 512x9728", lambda: two(512, 9728), SILU, join_sums.reference),
    Row(
        "join_sums", "Qwen3 4B feed-forward, a short prompt: 60x9728", lambda: two(60, 9728), SILU, join_sums.reference
    ),
    Row("join_sums", "UMT5 feed-forward: 512x10240", lambda: two(512, 10240), GELU, join_sums.reference),
    Row(
        "join_sums",
        "UMT5 q, k and v, as halves: 512x12288",
        lambda: (sums(1, 512, 12288), None),
        ("none", 1.0, False),
        join_sums.reference,
    ),
    Row("rms_rope_sums", "Qwen3 4B, packed: 512x(32+8)x128", lambda: heads(512), (1e-6,), rms_rope_sums.stock),
]
