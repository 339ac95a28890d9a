"""gated_residual and gated_residual_ at the shapes of Wan 2.1, Wan 2.2 5B, Flux, Qwen-Image and UMT5."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels_cuda.ops.elementwise.gated_residual import stock
from ..measure import sum_bytes
from ..row import Row, Tensors


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").half()


def gated(b: int, s: int, d: int, dtype: torch.dtype = torch.float16, per_token: bool = False) -> Tensors:
    """As WanAttentionBlock has them: the gate is a chunk of the six modulation rows."""
    rows = torch.randn(b, s if per_token else 1, 6, d, device="cuda").to(dtype) * 1e-3
    return half(b, s, d), half(b, s, d), rows[:, :, 2]


def moved(tensors: Tensors, _: tuple[Tensor, ...]) -> int:
    """In place: everything is read, x is written. Stock writes a new x, and is timed so."""
    return sum_bytes(*tensors, tensors[0])


ROWS = [
    Row("gated_residual", "Wan 1.3B 480x832x81: 32760x1536", lambda: gated(1, 32760, 1536), (False,), stock),
    Row("gated_residual", "Wan 14B 480x832x81: 32760x5120", lambda: gated(1, 32760, 5120), (False,), stock),
    Row("gated_residual_", "Wan 1.3B 480x832x81: 32760x1536", lambda: gated(1, 32760, 1536), (False,), stock, moved),
    Row("gated_residual_", "Wan 14B 480x832x81: 32760x5120", lambda: gated(1, 32760, 5120), (False,), stock, moved),
    Row("gated_residual_", "Wan 14B 720x1280x81: 75600x5120", lambda: gated(1, 75600, 5120), (False,), stock, moved),
    Row(
        "gated_residual_",
        "Wan 1.3B, fp32 gate: 32760x1536",
        lambda: gated(1, 32760, 1536, torch.float32),
        (False,),
        stock,
        moved,
    ),
    Row(
        "gated_residual_",
        "Wan 2.2 5B, per token: 27280x3072",
        lambda: gated(1, 27280, 3072, per_token=True),
        (False,),
        stock,
        moved,
    ),
    Row(
        "gated_residual_",
        "Wan cross attention, no gate: 32760x1536",
        lambda: (*gated(1, 32760, 1536)[:2], None),
        (False,),
        stock,
        moved,
    ),
    Row("gated_residual_", "Flux 1024x1024: 4608x3072", lambda: gated(1, 4608, 3072), (False,), stock, moved),
    Row(
        "gated_residual_", "Wan 1.3B one latent frame: 1560x1536", lambda: gated(1, 1560, 1536), (False,), stock, moved
    ),
    Row(
        "gated_residual_",
        "Qwen-Image 2048x2048, bf16: 16384x3072",
        lambda: tuple(None if t is None else t.bfloat16() for t in gated(1, 16384, 3072)),
        (False,),
        stock,
        moved,
    ),
    Row(
        "gated_residual_",
        "UMT5, fp32 stream: 4096x4096",
        lambda: (torch.randn(1, 4096, 4096, device="cuda"), half(1, 4096, 4096), None),
        (False,),
        stock,
        moved,
    ),
]
