"""conv and upsample_conv2d: the convolutions of the Wan VAE, in both ways to accumulate, and whole residual blocks.

Stock keeps its videos channels-first, concatenates the cached frames and lets cuDNN choose: that is what it is timed
with. The candidate "stock" of `auto` is torch's convolution in our layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda import KernelPolicy, channel_rms_silu, conv3d, fold_upsample
from ...kernels_cuda.ops.conv import upsample_conv
from ...kernels_cuda.ops.conv.conv import stock
from ...kernels_cuda.ops.norm import channel_rms_silu as norm
from ..row import Row, Tensors

SAME = ("none", 1, 2, 1, 1, 1, 1, 1)
PICTURE = ("none", 1, 0, 1, 1, 1, 1, 1)
DOWN = ("none", 1, 0, 2, 0, 1, 0, 1)
TIME_UP = ("none", 1, 2, 1, 0, 0, 0, 0)


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def last(t: Tensor) -> Tensor:
    """Channels-last, whatever the rank."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def operands(c: int, n: int, t: int, h: int, w: int, taps: tuple[int, int, int], cached: int) -> Tensors:
    weight = last(half(n, c, *taps)) * (c * taps[0] * taps[1] * taps[2]) ** -0.5
    return last(half(1, c, t, h, w)), weight, half(n), last(half(1, c, cached, h, w)) if cached else None, None


def first(t: Any) -> Any:
    """Stock's layout, made once and kept with the tensor: the copy is not timed."""
    if t is None:
        return None
    if not hasattr(t, "channels_first"):
        t.channels_first = t.contiguous()
    return t.channels_first


def stock_first(*arguments: Any) -> Tensor:
    """Stock's convolution in stock's own layout."""
    result: Tensor = stock(*(first(t) for t in arguments[:5]), *arguments[5:])
    return result


def upsample_first(x: Tensor, weight: Tensor, bias: Tensor, _folded: Tensor, activation: str) -> Tensor:
    return upsample_conv.stock(first(x), first(weight), bias, None, activation)


def rows(
    op: str, label: str, make: Callable[[], Tensors], options: tuple[Any, ...], flops: float, run: Any
) -> list[Row]:
    """A row for each way to accumulate."""
    return [
        Row(op, f"{label} {precision}", make, options, run, precision=precision, flops=flops)
        for precision in ("precise", "fast")
    ]


def same(c: int, n: int, t: int, h: int, w: int) -> list[Row]:
    """3x3x3 with the cached frames."""
    make = lambda: operands(c, n, t, h, w, (3, 3, 3), 2)  # noqa: E731
    return rows("conv", f"3x3x3, {c} to {n}, {t}x{h}x{w}", make, SAME, 54.0 * c * n * t * h * w, stock_first)


def picture(c: int, h: int, w: int) -> list[Row]:
    """3x3 with bias and skip, as the VAEs of pictures end a block."""

    def make() -> Tensors:
        x, weight, bias, *_ = operands(c, c, 1, h, w, (1, 3, 3), 0)
        return x, weight, bias, None, last(half(1, c, 1, h, w))

    return rows("conv", f"3x3 and skip, {c}, {h}x{w}", make, PICTURE, 18.0 * c * c * h * w, stock_first)


def down(c: int, t: int, h: int, w: int) -> list[Row]:
    make = lambda: operands(c, c, t, h, w, (1, 3, 3), 0)  # noqa: E731
    flops = 18.0 * c * c * t * (h // 2) * (w // 2)
    return rows("conv", f"3x3 stride 2, {c}, {t}x{h}x{w}", make, DOWN, flops, stock_first)


def time_up(c: int, t: int, h: int, w: int) -> list[Row]:
    make = lambda: operands(c, 2 * c, t, h, w, (3, 1, 1), 2)  # noqa: E731
    return rows("conv", f"3x1x1, {c} to {2 * c}, {t}x{h}x{w}", make, TIME_UP, 12.0 * c * c * t * h * w, stock_first)


def up(c: int, t: int, h: int, w: int) -> list[Row]:
    """flops: of the convolution as stock computes it."""

    def make() -> Tensors:
        weight = last(half(c // 2, c, 3, 3)) * (9 * c) ** -0.5
        return last(half(t, c, h, w)), weight, half(c // 2), fold_upsample(weight)

    flops = 18.0 * c * (c // 2) * t * (2 * h) * (2 * w)
    return rows("upsample_conv2d", f"{c} to {c // 2}, {t}x{h}x{w}", make, ("none",), flops, upsample_first)


def block(c: int, t: int, h: int, w: int) -> list[Row]:
    """norm, SiLU, conv, norm, SiLU, conv, skip: a residual block with its cache, as a chunk of a video meets it."""

    def make() -> Tensors:
        x, *one = operands(c, c, t, h, w, (3, 3, 3), 2)[:4]
        _, *two = operands(c, c, t, h, w, (3, 3, 3), 2)[:4]
        return x, half(c), *one[:2], half(c), *two[:2], one[2], two[2]

    def theirs(*tensors: Any) -> Tensor:
        x, norm_1, conv_1, bias_1, norm_2, conv_2, bias_2, cache_1, cache_2 = (first(t) for t in tensors)
        value = stock(norm.stock(x, norm_1, None, True), conv_1, bias_1, cache_1, None, *SAME)
        value = stock(norm.stock(value, norm_2, None, True), conv_2, bias_2, cache_2, None, *SAME)
        result: Tensor = value + x
        return result

    def ours(policy: KernelPolicy) -> Callable[..., Any]:
        def run(x: Any, n1: Any, c1: Any, b1: Any, n2: Any, c2: Any, b2: Any, cache_1: Any, cache_2: Any) -> Tensor:
            value = conv3d(channel_rms_silu(x, n1, policy=policy), c1, b1, cache=cache_1, policy=policy)
            value = channel_rms_silu(value, n2, policy=policy)
            return conv3d(value, c2, b2, cache=cache_2, residual=x, policy=policy)

        return run

    flops = 2 * 54.0 * c * c * t * h * w
    return [
        Row(
            "VAE residual block",
            f"{c}, {t}x{h}x{w} {p}",
            make,
            (),
            theirs,
            precision=p,
            flops=flops,
            ours=ours,
            peers=False,
        )
        for p in ("precise", "fast")
    ]


ROWS = [
    *same(96, 96, 4, 480, 832),
    *same(192, 192, 4, 240, 416),
    *same(384, 384, 2, 120, 208),
    *same(384, 384, 1, 60, 104),
    *same(96, 3, 4, 480, 832),
    *same(256, 256, 4, 240, 416),
    *same(160, 160, 4, 240, 416),
    *picture(128, 1024, 1024),
    *picture(256, 512, 512),
    *picture(512, 256, 256),
    *down(96, 4, 480, 832),
    *down(192, 4, 240, 416),
    *time_up(384, 1, 60, 104),
    *up(384, 2, 120, 208),
    *up(192, 4, 240, 416),
    *block(96, 4, 480, 832),
    *block(192, 4, 240, 416),
    *block(384, 4, 120, 208),
]
