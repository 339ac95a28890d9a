"""bordered_conv and bordered_upsample_conv: the 3x3 convolutions of style networks, at 1024x1024 and 1080p.

Stock is what torch has: a pass that makes the picture with its border, channels-last (torch's own reflection pad would be three),
the convolution, and the activation; and before an upsampled one the pass that makes the larger picture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...kernels_cuda import fold_upsample
from ...kernels_cuda.ops.conv.bordered_conv import stock, upsample_stock
from ..row import Row, Tensors

REFLECTED = ("none", 1, 1, 1, 1, 1, "reflect")
HALVED = ("none", 2, 1, 1, 1, 1, "reflect")


def operands(c: int, n: int, h: int, w: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(1, h, w, c, device="cuda", dtype=torch.float16).movedim(-1, 1)
    weight = torch.randn(n, 3, 3, c, device="cuda", dtype=torch.float16).movedim(-1, 1) * (9 * c) ** -0.5
    return x, weight, torch.randn(n, device="cuda", dtype=torch.float16)


def rows(
    op: str, label: str, make: Callable[[], Tensors], options: tuple[Any, ...], flops: float, run: Any
) -> list[Row]:
    """A row for each way to accumulate."""
    return [
        Row(op, f"{label} {precision}", make, options, run, precision=precision, flops=flops)
        for precision in ("precise", "fast")
    ]


def plain(label: str, c: int, n: int, h: int, w: int, options: tuple[Any, ...]) -> list[Row]:
    step = options[1]
    flops = 18.0 * c * n * h * w / step**2
    return rows("bordered_conv", f"{label}: {c} to {n}, {h}x{w}", lambda: operands(c, n, h, w), options, flops, stock)


def upsampled(label: str, c: int, n: int, h: int, w: int) -> list[Row]:
    """h, w: of the small picture. Operations are those of the phases, which the kernel computes."""

    def make() -> Tensors:
        x, weight, bias = operands(c, n, h, w)
        return x, weight, bias, fold_upsample(weight)

    flops = 32.0 * c * n * h * w
    return rows("bordered_upsample_conv", f"{label}: {c} to {n}, {h}x{w}", make, ("none",), flops, upsample_stock)


ROWS = [
    *plain("style net 1024, half size", 32, 64, 1024, 1024, HALVED),
    *plain("style net 1024, block", 128, 128, 256, 256, REFLECTED),
    *upsampled("style net 1024, to half size", 128, 64, 256, 256),
    *upsampled("style net 1024, to full size", 64, 32, 512, 512),
    *plain("style net 1080p, block", 128, 128, 270, 480, REFLECTED),
    *plain("AdaIN 1024, decoder", 64, 64, 1024, 1024, REFLECTED),
]
