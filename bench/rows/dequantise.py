"""dequantise at the weights of Wan 14B and Qwen3, as GGUF files have them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels_cuda.ops.quant.dequantise import reference
from ...kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES
from ..row import Row, Tensors


def packed(rows: int, cols: int, encoding: str) -> Tensor:
    kind = BLOCK_TYPES[encoding]
    return torch.randint(256, (rows, cols // kind.elements * kind.bytes), dtype=torch.uint8, device="cuda")


def weight(rows: int, cols: int, encoding: str) -> Callable[[], Tensors]:
    return lambda: (packed(rows, cols, encoding),)


SHAPES = [("Wan 14B ffn", 13824, 5120, encoding) for encoding in BLOCK_TYPES]
SHAPES += [("Wan 14B projection", 5120, 5120, encoding) for encoding in ("Q4_K", "Q6_K", "Q8_0")]
SHAPES += [("Qwen3 4B ffn", 9728, 2560, "Q4_K")]

ROWS = [
    Row("dequantise", f"{label}, {encoding}: {rows}x{cols}", weight(rows, cols, encoding), (encoding,), reference)
    for label, rows, cols, encoding in SHAPES
]
