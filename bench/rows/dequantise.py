"""dequantise at the weights of Wan 14B and Qwen3, as GGUF files have them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels_cuda.ops.quant.dequantise import reference, stock_rows
from ...kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES
from ..row import Row, Tensors


def packed(rows: int, cols: int, encoding: str) -> Tensor:
    kind = BLOCK_TYPES[encoding]
    return torch.randint(256, (rows, cols // kind.elements * kind.bytes), dtype=torch.uint8, device="cuda")


def weight(rows: int, cols: int, encoding: str) -> Callable[[], Tensors]:
    return lambda: (packed(rows, cols, encoding),)


def table(encoding: str) -> Tensors:
    """Smaller than theirs, of which a bench takes many: it is the rows asked for that count."""
    return packed(32768, 2560, encoding), torch.randint(32768, (512,), device="cuda")


def rows_moved(tensors: Tensors, outputs: tuple[Tensor, ...]) -> int:
    """Of the table the rows that are asked for."""
    weights, index = tensors
    assert weights is not None and index is not None
    return index.numel() * (weights.shape[1] + index.element_size()) + outputs[0].nbytes


SHAPES = [("Wan 14B ffn", 13824, 5120, encoding) for encoding in BLOCK_TYPES]
SHAPES += [("Wan 14B projection", 5120, 5120, encoding) for encoding in ("Q4_K", "Q6_K", "Q8_0")]
SHAPES += [("Qwen3 4B ffn", 9728, 2560, "Q4_K")]

ROWS = [
    Row("dequantise", f"{label}, {encoding}: {rows}x{cols}", weight(rows, cols, encoding), (encoding,), reference)
    for label, rows, cols, encoding in SHAPES
]
ROWS += [
    Row(
        "dequantise_rows",
        f"Qwen3 4B embeddings, {encoding}: 512 of 32768x2560",
        lambda encoding=encoding: table(encoding),  # type: ignore[misc]
        (encoding,),
        stock_rows,
        moved=rows_moved,
    )
    for encoding in ("Q4_K", "Q6_K", "Q8_0")
]
