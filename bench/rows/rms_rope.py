"""rms_rope_ at the shapes of Wan 2.1, Flux, Qwen-Image and Qwen3, q and k inside a packed projection.

Stock turns q and k of Wan and Flux with comfy-kitchen's kernel, where that is installed and torch is built for CUDA 13
or newer; for older torch (most Turing users) comfy-kitchen itself falls back to torch. The
results say which it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels_cuda.ops.norm.rms_rope import stock
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


def flux(s: int, dtype: torch.dtype = torch.float16) -> Tensors:
    q, k, _ = half(1, s, 3, 24, 128).to(dtype).unbind(2)
    return q, k, half(128).to(dtype), half(128).to(dtype), matrices(s, 128).transpose(1, 2), None


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


try:
    from comfy_kitchen import apply_rope1  # type: ignore[import-untyped]
except ImportError:
    apply_rope1 = None


def stock_kitchen(q, k, q_weight, k_weight, rotation, _sin, eps, norm, _interleaved):  # type: ignore[no-untyped-def]
    """WanSelfAttention.forward and Flux's QKNorm + attention: rms_norm, then apply_rope1, q and k apart."""
    out = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        value = x.flatten(2) if norm == "token" else x
        value = functional.rms_norm(value, value.shape[-1:], weight, eps).view(x.shape)
        if rotation.shape[2] != 1:  # Flux: [b, h, s, d]
            value = value.transpose(1, 2)
        out.append(apply_rope1(value, rotation))
    return out


def row(op: str, label: str, inputs: Callable[[], Tensors], options: tuple[object, ...]) -> Row:
    """Interleaved rows with a rotation: what stock runs depends on comfy-kitchen."""
    if apply_rope1 is None:
        return Row(op, label, inputs, options, stock, moved)
    return Row(op, label, inputs, options, stock_kitchen, moved, "torch and comfy-kitchen")


ROWS = [
    row("rms_rope_", "Wan 1.3B 480x832x81: 32760x12x128 packed", lambda: wan(1, 32760, 12), WAN),
    row("rms_rope_", "Wan 14B 480x832x81: 32760x40x128 packed", lambda: wan(1, 32760, 40), WAN),
    row("rms_rope_", "Wan 14B 720x1280x81: 75600x40x128 packed", lambda: wan(1, 75600, 40), WAN),
    row("rms_rope_", "Wan 1.3B, cond and uncond: 2x32760x12x128", lambda: wan(2, 32760, 12), WAN),
    row("rms_rope_", "Wan 1.3B one latent frame: 1560x12x128", lambda: wan(1, 1560, 12), WAN),
    Row("rms_rope_", "Wan 14B cross attention, no rope: 32760x40x128", lambda: cross(32760, 40), WAN, stock, moved),
    row("rms_rope_", "Flux 1024x1024: 4608x24x128 packed", lambda: flux(4608), FLUX),
    row("rms_rope_", "Flux 2048x2048: 16896x24x128 packed", lambda: flux(16896), FLUX),
    row("rms_rope_", "Qwen-Image 2048x2048, bf16: 16384x24x128", lambda: flux(16384, torch.bfloat16), FLUX),
    Row("rms_rope_", "Qwen3 8B, halves: 512x(32+8)x128 packed", lambda: qwen(512), QWEN, stock, moved),
    Row("rms_rope_", "Qwen3 8B, halves: 16384x(32+8)x128 packed", lambda: qwen(16384), QWEN, stock, moved),
]
