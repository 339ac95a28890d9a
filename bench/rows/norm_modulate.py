"""norm_modulate at the shapes of Wan 2.1, Wan 2.2 5B and, in bf16, Qwen-Image."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels_cuda.ops.norm.norm_modulate import stock
from ..row import Row, Tensors

LAYER = (1e-6, "layer", None)
BF16 = torch.bfloat16


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").half()


def norm(
    b: int,
    s: int,
    d: int,
    dtype: torch.dtype = torch.float16,
    per_token: bool = False,
    of_x: torch.dtype = torch.float16,
) -> Tensors:
    """As WanAttentionBlock has them: scale and shift, of `dtype`, are chunks of the six modulation rows."""
    rows = torch.randn(b, s if per_token else 1, 6, d, device="cuda").to(dtype).unbind(2)
    return half(b, s, d).to(of_x), rows[1], rows[0], None, None


ROWS = [
    Row("norm_modulate", "Wan 1.3B 480x832x81: 32760x1536", lambda: norm(1, 32760, 1536), LAYER, stock),
    Row("norm_modulate", "Wan 14B 480x832x81: 32760x5120", lambda: norm(1, 32760, 5120), LAYER, stock),
    Row("norm_modulate", "Wan 1.3B, cond and uncond: 2x32760x1536", lambda: norm(2, 32760, 1536), LAYER, stock),
    Row("norm_modulate", "Wan 1.3B one latent frame: 1560x1536", lambda: norm(1, 1560, 1536), LAYER, stock),
    Row(
        "norm_modulate",
        "Wan 1.3B, fp32 modulation: 32760x1536",
        lambda: norm(1, 32760, 1536, torch.float32),
        LAYER,
        stock,
    ),
    Row(
        "norm_modulate", "Wan 2.2 5B, per token: 27280x3072", lambda: norm(1, 27280, 3072, per_token=True), LAYER, stock
    ),
    Row(
        "norm_modulate",
        "Qwen-Image 2048x2048, bf16: 16384x3072",
        lambda: norm(1, 16384, 3072, BF16, of_x=BF16),
        LAYER,
        stock,
    ),
    Row(
        "norm_modulate",
        "Qwen-Image, bf16, fp32 modulation: 16384x3072",
        lambda: norm(1, 16384, 3072, torch.float32, of_x=BF16),
        LAYER,
        stock,
    ),
    Row(
        "norm_modulate",
        "Wan cross attention, weight and bias: 32760x1536",
        lambda: (half(1, 32760, 1536), None, None, half(1536), half(1536)),
        LAYER,
        stock,
    ),
]
