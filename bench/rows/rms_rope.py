"""rms_rope and rms_rope_ at the shapes of Wan 2.1, Flux and Qwen3, q and k inside a packed projection."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels_cuda.ops.rms_rope import stock, stock_
from ..measure import sum_bytes
from ..row import Row, Tensors

WAN = (1e-6, "token", True)
FLUX = (1e-6, "head", True)
QWEN = (1e-6, "head", False)


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").half()


def matrices(s: int, d: int) -> Tensor:
    angle = torch.rand(1, s, 1, d // 2, device="cuda") * 6.28
    c, n = angle.cos(), angle.sin()
    return torch.stack((c, -n, n, c), -1).view(1, s, 1, d // 2, 2, 2)


def wan(b: int, s: int, h: int) -> Tensors:
    """Views of a packed projection, full-dim weights, fp32 matrices as [1, s, 1, d/2, 2, 2]."""
    q, k, _ = half(b, s, 3, h, 128).unbind(2)
    return q, k, half(h * 128), half(h * 128), matrices(s, 128), None


def flux(s: int) -> Tensors:
    q, k, _ = half(1, s, 3, 24, 128).unbind(2)
    return q, k, half(128), half(128), matrices(s, 128).transpose(1, 2), None


def qwen(s: int) -> Tensors:
    """Grouped heads and tables of cosines that repeat for the upper half."""
    angle = torch.rand(1, 1, s, 128, device="cuda")
    packed = half(1, s, 48, 128)
    q, k = packed[:, :, :32], packed[:, :, 32:40]
    return q, k, half(128), half(128), angle.cos()[..., :64], angle.sin()[..., :64]


def cross(s: int, h: int) -> Tensors:
    return half(1, s, h, 128), half(1, 512, h, 128), half(h * 128), half(h * 128), None, None


def moved(tensors: Tensors, _: tuple[Tensor, ...]) -> int:
    """Everything is read once, q and k are written once."""
    return sum_bytes(*tensors, *tensors[:2])


ROWS = [
    Row("rms_rope_", "Wan 1.3B 480x832x81: 32760x12x128 packed", lambda: wan(1, 32760, 12), WAN, stock_, moved),
    Row("rms_rope_", "Wan 14B 480x832x81: 32760x40x128 packed", lambda: wan(1, 32760, 40), WAN, stock_, moved),
    Row("rms_rope_", "Wan 14B 720x1280x81: 75600x40x128 packed", lambda: wan(1, 75600, 40), WAN, stock_, moved),
    Row("rms_rope_", "Wan 1.3B, cond and uncond: 2x32760x12x128", lambda: wan(2, 32760, 12), WAN, stock_, moved),
    Row("rms_rope_", "Wan 1.3B one latent frame: 1560x12x128", lambda: wan(1, 1560, 12), WAN, stock_, moved),
    Row("rms_rope_", "Wan 14B cross attention, no rope: 32760x40x128", lambda: cross(32760, 40), WAN, stock_, moved),
    Row("rms_rope", "Wan 1.3B 480x832x81: 32760x12x128", lambda: wan(1, 32760, 12), WAN, stock, moved),
    Row("rms_rope_", "Flux 1024x1024: 4608x24x128 packed", lambda: flux(4608), FLUX, stock_, moved),
    Row("rms_rope_", "Flux 2048x2048: 16896x24x128 packed", lambda: flux(16896), FLUX, stock_, moved),
    Row("rms_rope_", "Qwen3 8B, halves: 512x(32+8)x128 packed", lambda: qwen(512), QWEN, stock_, moved),
    Row("rms_rope_", "Qwen3 8B, halves: 16384x(32+8)x128 packed", lambda: qwen(16384), QWEN, stock_, moved),
]
