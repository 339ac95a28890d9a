"""linear_int8 at the shapes of Wan's blocks, pairs at those of Z-Image's, rounding included, and rows_to_int8 alone.

Weights are rounded once, when they are made; what is timed begins with activations in fp16. FLOP/s are of the product. Errors are
against the product of these activations, unrounded, with the weight that the file holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda import rows_to_int8
from ...kernels_cuda.ops.matmul.linear_int8 import INT8
from ...kernels_cuda.ops.quant.rotation import root, turned
from ...kernels_cuda.ops.quant.rows_to_int8 import INT8_ROWS
from .. import kitchen
from ..row import Row, Tensors

GROUP = 256  # of the rotation in published files
SAMPLED = (slice(None), slice(None, None, 61))  # of a result, where it is computed exactly


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def operands(m: int, n: int, k: int, rotation: int, *, residual: bool = False) -> Tensors:
    """As the layers have them: weights of variance 1 / k with a scale per row, the gate a chunk of the six modulation rows."""
    weight, scales = rows_to_int8(half(n, k) * k**-0.5, rotation=rotation)
    stream, gate = (half(1, m, n), half(1, 1, 6, n)[:, :, 5]) if residual else (None, None)
    return half(1, m, k), None, weight, scales, half(n), stream, gate


def exactly(x: Tensor, _: Any, weight: Tensor, scales: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    rotation = rest[5]
    some = turned(x[SAMPLED].double(), rotation) * root(rotation)
    return some @ (weight.double() * scales.double()[:, None]).t() + bias.double()


def row(
    label: str, sizes: tuple[int, int, int], rotation: int, activation: str = "none", residual: bool = False
) -> Row:
    """sizes: rows, columns and k. Errors and the other library where nothing follows the bias: that is all it has."""
    m, n, k = sizes
    plain = activation == "none" and not residual
    more: dict[str, Any] = {"exact": exactly, "sampled": SAMPLED, "rivals": kitchen.int8_linear} if plain else {}
    return Row(
        "linear_int8",
        f"{label}: {m}x{n}x{k}{f' rotation {rotation}' if rotation else ''}",
        lambda: operands(m, n, k, rotation, residual=residual),
        (activation, 1.0, False, rotation, None),
        INT8.product.stock(),
        precision="turbo",
        flops=2.0 * m * n * k,
        peers=not plain,
        in_bytes=True,
        **more,
    )


def layers(model: str, tokens: int, d: int, ffn: int) -> list[Row]:
    """The shapes of a Wan block: q, k, v and o; into the feed-forward, and out of it, where GELU leaves outliers."""
    return [
        row(f"{model}, q", (tokens, d, d), 0),
        row(f"{model}, o with gate and residual", (tokens, d, d), 0, residual=True),
        row(f"{model}, ffn in", (tokens, ffn, d), 0),
        row(f"{model}, ffn in with GELU", (tokens, ffn, d), 0, "gelu_tanh"),
        row(f"{model}, ffn out", (tokens, d, ffn), GROUP),
        row(f"{model}, ffn out with gate and residual", (tokens, d, ffn), GROUP, residual=True),
    ]


def pair(label: str, m: int, n: int, k: int, rotation: int) -> Row:
    """SwiGLU of two weights, n columns each."""

    def made() -> Tensors:
        weights = [rows_to_int8(half(n, k) * k**-0.5, rotation=rotation) for _ in range(2)]
        return half(1, m, k), None, *weights[0], *weights[1]

    name = f"{label}: {m}x{n}x{k}{f' rotation {rotation}' if rotation else ''}"
    options, flops = ("silu", 1.0, True, rotation, None), 4.0 * m * n * k
    stock = INT8.product.stock(paired=True)
    return Row("linear_int8_pair", name, made, options, stock, precision="turbo", flops=flops, in_bytes=True)


def rounding(label: str, m: int, k: int, rotation: int) -> Row:
    name = f"{label}: {m}x{k}{f' rotation {rotation}' if rotation else ''}"
    return Row("rows_to_int8", name, lambda: (half(1, m, k),), (rotation,), INT8_ROWS.stock)


ROWS = [
    *layers("Wan 1.3B 480x832x81", 32760, 1536, 8960),
    *layers("Wan 14B 480x832x81", 32760, 5120, 13824),
    row("Wan 14B one latent frame, q", (1560, 5120, 5120), 0),
    pair("Z-Image 1024x1024, SwiGLU", 4128, 10240, 3840, GROUP),
    *(
        rounding(label, m, k, rotation)
        for label, m, k in (
            ("Wan 1.3B activations", 32760, 1536),
            ("Wan 14B hidden", 32760, 13824),
            ("a weight", 13824, 5120),
        )
        for rotation in (0, GROUP)
    ),
    Row(
        "rows_to_int8",
        "Qwen-Image 2048x2048, bf16: 16384x3072",
        lambda: (half(1, 16384, 3072).bfloat16(),),
        (0,),
        INT8_ROWS.stock,
    ),
]
