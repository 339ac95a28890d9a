"""to_half at the weights of Wan and UMT5, as their files store them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusestream.kernels_cuda.ops.quant.to_half import unsaturated

from ..row import Row

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def weight(rows: int, cols: int, dtype: torch.dtype, scales: int = 0) -> Callable[[], tuple[Tensor | None, ...]]:
    def make() -> tuple[Tensor | None, ...]:
        x = torch.randn(rows, cols, device="cuda", dtype=torch.float16).to(dtype)
        return x, torch.rand(scales, device="cuda") if scales else None

    return make


SHAPES = [
    ("Wan 14B ffn, bf16", 13824, 5120, torch.bfloat16, 0),
    ("Wan 14B ffn, fp32", 13824, 5120, torch.float32, 0),
    ("Wan 14B ffn, e4m3", 13824, 5120, E4M3, 0),
    ("Wan 14B ffn, e4m3 scaled", 13824, 5120, E4M3, 1),
    ("Wan 14B ffn, e4m3 scaled by row", 13824, 5120, E4M3, 13824),
    ("Wan 14B ffn, e5m2", 13824, 5120, E5M2, 0),
    ("Wan 14B projection, e4m3 scaled", 5120, 5120, E4M3, 1),
    ("Wan 1.3B projection, bf16", 1536, 1536, torch.bfloat16, 0),
    ("UMT5 ffn, e4m3 scaled", 10240, 4096, E4M3, 1),
    ("UMT5 ffn, bf16", 10240, 4096, torch.bfloat16, 0),
]

ROWS = [
    Row("to_half", f"{label}: {rows}x{cols}", weight(rows, cols, dtype, scales), (), unsaturated)
    for label, rows, cols, dtype, scales in SHAPES
]
