"""linear_int4 at the shapes of Wan 14B's blocks and linear_int4_pair at Z-Image's, rounding included.

Weights are rounded once, when they are made; what is timed begins with activations in fp16. FLOP/s are of the product. Errors are
against the product of these activations, unrounded, with the weight that the file holds.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...kernels_cuda import rows_to_int4
from ...kernels_cuda.ops.matmul.linear_int4 import INT4
from ...kernels_cuda.ops.quant.integer_rows import unpacked
from ...kernels_cuda.ops.quant.rotation import root, turned
from .. import kitchen
from ..row import Row, Tensors
from .linear_int8 import GROUP, SAMPLED, half


def exactly(x: Tensor, _: Any, weight: Tensor, scales: Tensor, bias: Tensor, *_rest: Any) -> Tensor:
    some = turned(x[SAMPLED].double(), GROUP) * root(GROUP)
    return some @ (unpacked(weight).double() * scales.double()[:, None]).t() + bias.double()


def row(label: str, m: int, n: int, k: int) -> Row:
    """A product and its bias, rotated as `convrot_w4a4` files are."""

    def made() -> Tensors:
        weight, scales = rows_to_int4(half(n, k) * k**-0.5, rotation=GROUP)
        return half(1, m, k), None, weight, scales, half(n), None, None

    return Row(
        "linear_int4",
        f"{label}: {m}x{n}x{k} rotation {GROUP}",
        made,
        ("none", 1.0, False, GROUP, None),
        INT4.product.stock(),
        precision="turbo",
        flops=2.0 * m * n * k,
        peers=False,
        in_bytes=True,
        exact=exactly,
        sampled=SAMPLED,
        rivals=kitchen.int4_linear,
    )


def pair(label: str, m: int, n: int, k: int) -> Row:
    """SwiGLU of two weights, n columns each."""

    def made() -> Tensors:
        weights = [rows_to_int4(half(n, k) * k**-0.5, rotation=GROUP) for _ in range(2)]
        return half(1, m, k), None, *weights[0], *weights[1]

    name = f"{label}: {m}x{n}x{k} rotation {GROUP}"
    options, flops = ("silu", 1.0, True, GROUP, None), 4.0 * m * n * k
    stock = INT4.product.stock(paired=True)
    return Row("linear_int4_pair", name, made, options, stock, precision="turbo", flops=flops, in_bytes=True)


ROWS = [
    row("Wan 14B 480x832x81, q", 32760, 5120, 5120),
    row("Wan 14B 480x832x81, ffn in", 32760, 13824, 5120),
    row("Wan 14B 480x832x81, ffn out", 32760, 5120, 13824),
    row("Wan 14B one latent frame, q", 1560, 5120, 5120),
    pair("Z-Image 1024x1024, SwiGLU", 4128, 10240, 3840),
]
