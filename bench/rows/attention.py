"""attention at the shapes of Wan, UMT5 and the VAE, in both ways to accumulate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda.ops.attention import stock
from ..row import Row, Tensors

PLAIN = (None, False, -1, -1, 0, 0)
CAUSAL = (None, True, -1, -1, 0, 0)


def packed(b: int, s: int, h: int, d: int) -> Callable[[], Tensors]:
    """Self attention: views of one packed projection."""

    def make() -> Tensors:
        return (*torch.randn(b, s, 3, h, d, device="cuda", dtype=torch.float16).unbind(2), *[None] * 5)

    return make


def cross(b: int, s: int, t: int, h: int, d: int) -> Callable[[], Tensors]:
    def make() -> Tensors:
        q = torch.randn(b, s, h, d, device="cuda", dtype=torch.float16)
        k, v = torch.randn(b, t, 2, h, d, device="cuda", dtype=torch.float16).unbind(2)
        return (q, k, v, *[None] * 5)

    return make


_dense: dict[int, Tensor] = {}  # address of distances -> the bias of every pair


def t5(s: int, h: int, d: int) -> Tensors:
    q, k, v = (torch.randn(1, s, h, d, device="cuda", dtype=torch.float16) for _ in range(3))
    distances = torch.randn(h, 2 * s - 1, device="cuda")
    places = torch.arange(s, device="cuda")[None, :] - torch.arange(s, device="cuda")[:, None] + s - 1
    _dense[distances.data_ptr()] = distances.half()[:, places][None]
    return q, k, v, None, None, distances, None, None


def t5_stock(*arguments: Any) -> Tensor:
    """Stock's T5 makes the bias of every pair once and hands it to every head's attention: making it is not timed."""
    q, k, v, *_ = arguments
    return stock(q, k, v, _dense[arguments[5].data_ptr()], *[None] * 4, *arguments[8:])


def flops(b: int, s: int, t: int, h: int, d: int) -> float:
    return 4.0 * b * h * s * t * d


def rows(label: str, sizes: tuple[int, int, int, int, int], make: Callable[[], Tensors], **more: Any) -> list[Row]:
    """A row for each way to accumulate. sizes: batch, queries, keys, heads, elements of a head."""
    b, s, t, h, d = sizes
    name = f"{label}: {b}x{h}x{s}x{t}x{d}"
    share = more.pop("share", 1.0)
    return [
        Row(
            "attention",
            f"{name} {precision}",
            make,
            **{"options": PLAIN, "stock": stock, **more},
            precision=precision,
            flops=flops(*sizes) * share,
        )
        for precision in ("precise", "fast")
    ]


ROWS = [
    *rows("Wan 1.3B 480x832x81, self", (1, 32760, 32760, 12, 128), packed(1, 32760, 12, 128)),
    *rows("Wan 14B 480x480x33, self, cond and uncond", (2, 8190, 8190, 40, 128), packed(2, 8190, 40, 128)),
    *rows("Wan 1.3B one latent frame, self", (1, 1560, 1560, 12, 128), packed(1, 1560, 12, 128)),
    *rows("Wan 1.3B 480x832x81, cross", (1, 32760, 512, 12, 128), cross(1, 32760, 512, 12, 128)),
    *rows("UMT5, relative bias", (1, 512, 512, 64, 64), lambda: t5(512, 64, 64), stock=t5_stock, peers=False),
    *rows("Wan VAE 480x832", (4, 6240, 6240, 1, 384), packed(4, 6240, 1, 384)),
    *rows("Wan VAE 720x1280", (1, 14400, 14400, 1, 384), packed(1, 14400, 1, 384)),
    *rows("causal", (1, 8192, 8192, 16, 128), packed(1, 8192, 16, 128), options=CAUSAL, share=0.5),
    *rows("head 64", (1, 16384, 16384, 24, 64), packed(1, 16384, 24, 64)),
    *rows("head 96", (1, 16384, 16384, 16, 96), packed(1, 16384, 16, 96)),
]
