"""silu, gelu, silu_mul and gelu_mul at the shapes of Wan 2.1, UMT5, Flux, Qwen3, Qwen-Image and Z-Image."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels_cuda.ops.elementwise.activations import gated_stock, stock
from ..row import Row, Tensors

TANH = ("gelu_tanh", None)
SWIGLU = ("silu", "split", 1.0, False, None)


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").half()


def two(*shape: int) -> Tensors:
    return half(*shape), half(*shape)


ROWS = [
    Row("gelu", "Wan 1.3B feed-forward, tanh: 32760x8960", lambda: (half(1, 32760, 8960),), TANH, stock),
    Row("gelu", "Wan 14B feed-forward, tanh: 8192x13824", lambda: (half(1, 8192, 13824),), TANH, stock),
    Row("gelu", "the same, erf: 8192x13824", lambda: (half(1, 8192, 13824),), ("gelu_erf", None), stock),
    Row("gelu", "the same, quick: 8192x13824", lambda: (half(1, 8192, 13824),), ("gelu_quick", None), stock),
    Row("gelu", "Wan 1.3B one latent frame, tanh: 1560x8960", lambda: (half(1, 1560, 8960),), TANH, stock),
    Row(
        "gelu",
        "Qwen-Image 2048x2048, bf16, tanh: 16384x12288",
        lambda: (half(1, 16384, 12288).bfloat16(),),
        TANH,
        stock,
    ),
    Row("silu", "VAE decoder: 96x4x480x832", lambda: (half(1, 96, 4, 480, 832),), ("silu", None), stock),
    Row("silu", "Wan 14B time embedding: 1x5120", lambda: (half(1, 5120),), ("silu", None), stock),
    Row(
        "gelu_mul",
        "UMT5 feed-forward: 512x10240",
        lambda: two(1, 512, 10240),
        ("gelu_tanh", "split", 1.0, False, None),
        gated_stock,
    ),
    Row(
        "gelu_mul",
        "UMT5, scaled and saturated: 512x10240",
        lambda: two(1, 512, 10240),
        ("gelu_tanh", "split", 2.0**-6, True, None),
        gated_stock,
    ),
    Row(
        "gelu_mul",
        "UMT5, 8 prompts: 4096x10240",
        lambda: two(8, 512, 10240),
        ("gelu_tanh", "split", 2.0**-6, True, None),
        gated_stock,
    ),
    Row(
        "silu_mul",
        "Flux.2 feed-forward, packed: 4608x(2x9216)",
        lambda: (half(1, 4608, 2 * 9216), None),
        SWIGLU,
        gated_stock,
    ),
    Row("silu_mul", "Qwen3 8B, two tensors: 4096x12288", lambda: two(1, 4096, 12288), SWIGLU, gated_stock),
    Row("silu_mul", "Qwen3 8B, two tensors: 512x12288", lambda: two(1, 512, 12288), SWIGLU, gated_stock),
    Row(
        "silu_mul",
        "Z-Image 2048x2048, bf16, two tensors: 16384x10240",
        lambda: (half(1, 16384, 10240).bfloat16(), half(1, 16384, 10240).bfloat16()),
        SWIGLU,
        gated_stock,
    ),
    Row(
        "silu_mul",
        "interleaved: 4096x(2x12288)",
        lambda: (half(1, 4096, 2 * 12288), None),
        ("silu", "interleaved", 1.0, False, None),
        gated_stock,
    ),
]
