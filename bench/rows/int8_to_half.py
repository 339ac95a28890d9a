"""int8_to_half: weights in 8 bits where products are of halves, as published files have them."""

from __future__ import annotations

from functools import partial

import torch

from ...kernels_cuda.ops.quant.int8_to_half import stock
from ..row import Row, Tensors


def operands(rows: int, k: int) -> Tensors:
    numbers = torch.randint(-128, 128, (rows, k), device="cuda", dtype=torch.int8)
    return numbers, torch.rand(rows, 1, device="cuda")


ROWS = [
    Row("int8_to_half", f"{label}: {rows}x{k} rotation {rotation}", partial(operands, rows, k), (rotation,), stock)
    for label, rows, k in (("Wan 1.3B, ffn in", 8960, 1536), ("Wan 14B, ffn in", 13824, 5120))
    for rotation in (0, 256)
]
