"""attention at the shapes of Wan, UMT5, the VAE and Flux, in every tier that differs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels_cuda.ops.attention.attention import stock
from ...kernels_cuda.ops.attention.attention_operands import TENSORS
from ...kernels_cuda.policy import Precision
from .. import kitchen
from ..row import Row, Tensors

PLAIN = (None, False, -1, -1, 0, 0)
CAUSAL = (None, True, -1, -1, 0, 0)
NOTHING_ELSE = (None,) * (TENSORS - 3)
BIAS = 2.0  # sigmas that a channel of the keys is off by, in every token: models have such channels
SAMPLED = (slice(0, 1), slice(None, None, 61), slice(0, 4))  # of a result, where it is computed exactly
AS_FAST: tuple[Precision, ...] = ("precise", "fast")  # heads of 384, and few keys: `turbo` rounds neither
TIERS: tuple[Precision, ...] = (*AS_FAST, "turbo")  # `auto` attends as `precise` does


def packed(b: int, s: int, h: int, d: int) -> Callable[[], Tensors]:
    """Self attention: views of one packed projection."""

    def make() -> Tensors:
        q, k, v = torch.randn(b, s, 3, h, d, device="cuda", dtype=torch.float16).unbind(2)
        k += BIAS * torch.randn(h, d, device="cuda", dtype=torch.float16)
        return (q, k, v, *NOTHING_ELSE)

    return make


def cross(b: int, s: int, t: int, h: int, d: int) -> Callable[[], Tensors]:
    def make() -> Tensors:
        q = torch.randn(b, s, h, d, device="cuda", dtype=torch.float16)
        k, v = torch.randn(b, t, 2, h, d, device="cuda", dtype=torch.float16).unbind(2)
        return (q, k, v, *NOTHING_ELSE)

    return make


def exactly(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """Plain attention in float64, at the places of the result that are `SAMPLED`."""
    q, k, v = (t[SAMPLED[0], :, SAMPLED[2]].transpose(1, 2).double() for t in (q, k, v))
    scores = q[:, :, SAMPLED[1]] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


_dense: dict[int, Tensor] = {}  # address of distances -> the bias of every pair


def t5(s: int, h: int, d: int) -> Tensors:
    q, k, v = (torch.randn(1, s, h, d, device="cuda", dtype=torch.float16) for _ in range(3))
    distances = torch.randn(h, 2 * s - 1, device="cuda")
    places = torch.arange(s, device="cuda")[None, :] - torch.arange(s, device="cuda")[:, None] + s - 1
    _dense[distances.data_ptr()] = distances.half()[:, places][None]
    given = dict(enumerate((q, k, v, None, None, distances)))
    return tuple(given.get(place) for place in range(TENSORS))


def t5_stock(*arguments: Any) -> Tensor:
    """Stock's T5 makes the bias of every pair once and hands it to every head's attention: making it is not timed."""
    q, k, v = arguments[:3]
    return stock(q, k, v, _dense[arguments[5].data_ptr()], *NOTHING_ELSE[1:], *arguments[TENSORS:])


def flops(b: int, s: int, t: int, h: int, d: int) -> float:
    return 4.0 * b * h * s * t * d


def rows(
    label: str,
    sizes: tuple[int, int, int, int, int],
    make: Callable[[], Tensors],
    tiers: Sequence[Precision] = TIERS,
    **more: Any,
) -> list[Row]:
    """A row for each tier. sizes: batch, queries, keys, heads, elements of a head."""
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
        for precision in tiers
    ]


def self_rows(label: str, b: int, s: int, h: int, d: int) -> list[Row]:
    """Self attention, with errors, and beside the other library's kernel in 8 bits."""
    sizes, make = (b, s, s, h, d), packed(b, s, h, d)
    return rows(label, sizes, make, exact=exactly, sampled=SAMPLED, rivals=kitchen.int8_attention)


ROWS = [
    *self_rows("Wan 1.3B 480x832x81, self", 1, 32760, 12, 128),
    *self_rows("Wan 14B 480x480x33, self, cond and uncond", 2, 8190, 40, 128),
    *self_rows("image of 1024x1024 with its prompt, self", 1, 4608, 24, 128),
    *rows("Wan 1.3B one latent frame, self", (1, 1560, 1560, 12, 128), packed(1, 1560, 12, 128)),
    *rows("Wan 1.3B 480x832x81, cross", (1, 32760, 512, 12, 128), cross(1, 32760, 512, 12, 128), AS_FAST),
    *rows("UMT5, relative bias", (1, 512, 512, 64, 64), lambda: t5(512, 64, 64), AS_FAST, stock=t5_stock, peers=False),
    *rows("Wan VAE 480x832", (4, 6240, 6240, 1, 384), packed(4, 6240, 1, 384), AS_FAST),
    *rows("Wan VAE 720x1280", (1, 14400, 14400, 1, 384), packed(1, 14400, 1, 384), AS_FAST),
    *rows("causal", (1, 8192, 8192, 16, 128), packed(1, 8192, 16, 128), options=CAUSAL, share=0.5),
    *self_rows("head 64", 1, 16384, 24, 64),
    *self_rows("head 96", 1, 16384, 16, 96),
]
