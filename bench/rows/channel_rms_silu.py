"""channel_rms_silu at the shapes of the Wan VAEs: the decoder's chunks of 4 frames, and 6 with its cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusestream.kernels_cuda.ops.norm.channel_rms_silu import stock

from ..row import Row


def video(last: bool, c: int, t: int, h: int, w: int) -> Callable[[], tuple[Tensor | None, ...]]:
    def make() -> tuple[Tensor | None, ...]:
        shape = (1, t, h, w, c) if last else (1, c, t, h, w)
        x = torch.randn(shape, device="cuda", dtype=torch.float16)
        return x.movedim(-1, 1) if last else x, torch.randn(c, 1, 1, 1, device="cuda").half(), None

    return make


SHAPES = [
    ("480p", 96, 4, 480, 832),
    ("480p, with the cache", 96, 6, 480, 832),
    ("480p", 192, 4, 240, 416),
    ("480p", 384, 4, 120, 208),
    ("720p", 96, 4, 720, 1280),
    ("720p", 192, 4, 360, 640),
    ("720p", 384, 4, 180, 320),
    ("2.2, 704p", 160, 4, 352, 640),
    ("2.2, 704p", 256, 4, 352, 640),
    ("2.2, 704p", 512, 4, 176, 320),
    ("2.2, 704p", 1024, 4, 88, 160),
]

ROWS = [
    Row(
        "channel_rms_silu",
        f"{label}: {c}x{t}x{h}x{w} {'channels-last' if last else 'channels-first'}",
        video(last, c, t, h, w),
        (True,),
        stock,
    )
    for label, c, t, h, w in SHAPES
    for last in (False, True)
]
