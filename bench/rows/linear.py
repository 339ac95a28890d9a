"""linear, linear_ and linear_pair: every matrix product of Wan and UMT5, in both ways to accumulate, and Qwen3's around its fp32
stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda.ops.matmul.linear import LINEAR_, pair_stock, stock
from ...kernels_cuda.registry import StockCandidate
from ..measure import sum_bytes
from ..row import Row, Tensors

PLAIN = ("none", 1.0, False, None)
GELU = ("gelu_tanh", 1.0, False, None)
# UMT5's feed-forward: the product of the pair is kept small, and given back to an fp32 stream.
PAIR = ("gelu_tanh", 2.0**-6, False, None)
STREAM = ("none", 2.0**6, False, None)
# Qwen3 with two parts of each operand: sums that stay fp32, and what is added to the stream where it lies.
SUMS = ("none", 1.0, True, torch.float32)
ADDED, ADDED_HIDDEN = ("none", 1.0, True), ("none", 2.0**6, True)
stock_into = next(one.run for one in LINEAR_.candidates if isinstance(one, StockCandidate))


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def operands(m: int, n: int, k: int, *, bias: bool = True, residual: Any = None, gate: bool = False) -> Tensors:
    """As the layers have them: weights of variance 1 / k, the gate a chunk of the six modulation rows."""
    return (
        half(1, m, k),
        half(n, k) * k**-0.5,
        half(n) if bias else None,
        None if residual is None else half(1, m, n).to(residual),
        half(1, 1, 6, n)[:, :, 5] if gate else None,
    )


def pair(m: int, n: int, k: int) -> Tensors:
    return half(1, m, k), half(n, k) * k**-0.5, half(n, k) * k**-0.5


def rows(
    op: str,
    label: str,
    sizes: tuple[int, int, int],
    make: Callable[[], Tensors],
    options: tuple[Any, ...],
    run: Callable[..., Any] = stock,
) -> list[Row]:
    """A row for each way to accumulate. sizes: rows, columns and k of one product."""
    m, n, k = sizes
    flops = 2.0 * m * n * k * (2 if op == "linear_pair" else 1)
    name = f"{label}: {m}x{n}x{k}"
    return [
        Row(op, f"{name} {precision}", make, options, run, precision=precision, flops=flops)
        for precision in ("precise", "fast")
    ]


def in_place(m: int, n: int, k: int) -> Tensors:
    """The stream is what is written, and the residual."""
    stream = torch.randn(1, m, n, device="cuda")
    return stream, half(1, m, k), half(n, k) * k**-0.5, None, stream, None


def moved(tensors: Tensors, _: tuple[Tensor, ...]) -> int:
    """In place: the stream is read and written, so it counts twice."""
    return sum_bytes(*tensors)


def qwen(model: str, tokens: int, d: int, heads: int, ffn: int) -> list[Row]:
    """A layer's products: both parts of an input at once, and each part by itself where it is added to the stream."""

    def wide(what: str, n: int, k: int) -> Row:
        label, flops = f"{model}, {what}: {2 * tokens}x{n}x{k} precise", 4.0 * tokens * n * k
        return Row("linear", label, lambda: operands(2 * tokens, n, k, bias=False), SUMS, stock, flops=flops)

    def added(what: str, rows_: int, k: int, options: tuple[Any, ...]) -> Row:
        label, flops = f"{model}, {what} into the fp32 stream: {rows_}x{d}x{k} precise", 2.0 * rows_ * d * k
        return Row("linear_", label, lambda: in_place(rows_, d, k), options, stock_into, moved, flops=flops)

    return [
        wide("gate and up", 2 * ffn, d),
        *(added("down", m, ffn, ADDED_HIDDEN) for m in (tokens, 2 * tokens)),
        *(added("o", m, heads, ADDED) for m in (tokens, 2 * tokens)),
    ]


def layers(model: str, tokens: int, d: int, ffn: int) -> list[Row]:
    """The three shapes of a Wan block: q, k, v and o; into the feed-forward, and out of it."""
    return [
        *rows("linear", f"{model}, q", (tokens, d, d), lambda: operands(tokens, d, d), PLAIN),
        *rows(
            "linear",
            f"{model}, o with gate and residual",
            (tokens, d, d),
            lambda: operands(tokens, d, d, residual=torch.float16, gate=True),
            PLAIN,
        ),
        *rows("linear", f"{model}, ffn in with GELU", (tokens, ffn, d), lambda: operands(tokens, ffn, d), GELU),
        *rows(
            "linear",
            f"{model}, ffn out with gate and residual",
            (tokens, d, ffn),
            lambda: operands(tokens, d, ffn, residual=torch.float16, gate=True),
            PLAIN,
        ),
    ]


ROWS = [
    *rows("linear", "square", (8192, 8192, 8192), lambda: operands(8192, 8192, 8192, bias=False), PLAIN),
    *layers("Wan 1.3B 480x832x81", 32760, 1536, 8960),
    *layers("Wan 14B 480x832x81", 32760, 5120, 13824),
    *rows("linear", "Wan 1.3B one latent frame, q", (1560, 1536, 1536), lambda: operands(1560, 1536, 1536), PLAIN),
    *rows("linear", "Wan 1.3B text, k", (512, 1536, 1536), lambda: operands(512, 1536, 1536), PLAIN),
    # 1536 columns out of 8960: the product that was measured with GELU as the bound of cuBLAS' own epilogue.
    *rows("linear", "GELU", (32760, 1536, 8960), lambda: operands(32760, 1536, 8960), GELU),
    *rows("linear", "UMT5, q", (512, 4096, 4096), lambda: operands(512, 4096, 4096, bias=False), PLAIN),
    *rows("linear_pair", "UMT5, GeGLU", (512, 10240, 4096), lambda: pair(512, 10240, 4096), PAIR, pair_stock),
    *rows(
        "linear",
        "UMT5, wo into the fp32 stream",
        (512, 4096, 10240),
        lambda: operands(512, 4096, 10240, bias=False, residual=torch.float32),
        STREAM,
    ),
    *qwen("Qwen3 4B, 512 tokens", 512, 2560, 4096, 9728),
]
