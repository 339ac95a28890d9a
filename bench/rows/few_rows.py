"""few_rows at the weights of Qwen3 and Wan 14B: a token being written, and small batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels_cuda.ops.matmul.few_rows import PLAIN, STEPS, stock
from ..row import Row, Tensors


def operands(m: int, n: int, k: int, encoding: str) -> Callable[[], Tensors]:
    def make() -> Tensors:
        x = torch.randn(m, k, device="cuda").half()
        if encoding in PLAIN and encoding != "I8":
            return x, torch.randn(n, k, device="cuda").to(PLAIN[encoding]), None, None, None
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


def token(n: int, k: int, encoding: str, *, added: bool) -> Callable[[], Tensors]:
    """Both parts of one token, with the stream that is added to."""

    def make() -> Tensors:
        _, *others = operands(2, n, k, encoding)()
        stream = torch.randn(1, n, device="cuda") if added else None
        return torch.randn(2, 1, k, device="cuda").half(), *others[:3], stream

    return make


# By n, k, whether the stream is added to, and whether its parts are added up.
PLACES = {
    "q, k and v": (6144, 2560, False, True),
    "output": (2560, 4096, True, True),
    "gate and up": (19456, 2560, False, False),
    "down": (2560, 9728, True, True),
    "words": (151936, 2560, False, True),
}

MIXED = ("down", "words")  # what Q4_K_M files have in Q6_K, the words and half of the others

ROWS = [
    Row(
        "few_rows",
        f"a token of Qwen3 4B, {place}: {n}x{k}, {encoding}",
        token(n, k, encoding, added=added),
        (encoding, 1.0, joined, torch.float32),
        stock,
    )
    for place, (n, k, added, joined) in PLACES.items()
    for encoding in ("F16", "BF16", "Q8_0", "Q4_K", *(["Q6_K"] if place in MIXED else []))
] + [
    Row("few_rows", f"{m} times {n}x{k}, {encoding}", operands(m, n, k, encoding), (encoding, 1.0, False, None), stock)
    for m, n, k, encoding in SHAPES
]
