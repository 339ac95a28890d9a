"""few_rows at the weights of Qwen3 and Wan 14B: a token being written, and small batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels_cuda.ops.few_rows import STEPS, stock
from ..row import Row, Tensors


def operands(m: int, n: int, k: int, encoding: str) -> Callable[[], Tensors]:
    def make() -> Tensors:
        x = torch.randn(m, k, device="cuda").half()
        if encoding == "F16":
            return x, torch.randn(n, k, device="cuda").half(), None, None, None
        step = STEPS[encoding]
        size = k // step.elements * step.bytes
        weight: Tensor = torch.randint(64, (n, size), dtype=torch.uint8, device="cuda")  # so that scales are finite
        if encoding == "I8":
            return x, weight.view(torch.int8), torch.rand(n, device="cuda"), None, None
        return x, weight, None, None, None

    return make


SHAPES = [(1, 13824, 5120, encoding) for encoding in STEPS]
SHAPES += [(m, 13824, 5120, encoding) for m in (4, 8, 16) for encoding in ("Q4_K", "Q8_0", "F16")]
SHAPES += [(1, n, k, "Q4_K") for n, k in ((5120, 13824), (9728, 2560), (2560, 9728), (1024, 2560))]

ROWS = [
    Row("few_rows", f"{m} times {n}x{k}, {encoding}", operands(m, n, k, encoding), (encoding,), stock)
    for m, n, k, encoding in SHAPES
]
