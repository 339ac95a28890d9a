"""split_projection, concat_tokens and swap_heads at the shapes of Wan and of a two-stream model."""

from __future__ import annotations

import torch
from torch import Tensor

from fusestream.kernels_cuda.ops.layout import concat_parts, split_parts, swapped

from ..row import Row


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


ROWS = [
    Row(
        "split_projection",
        "Wan 1.3B 480x832x81: 32760x(3x1536)",
        lambda: (half(1, 32760, 4608),),
        (1536, 1536, 1536, -1),
        split_parts,
    ),
    Row(
        "split_projection",
        "Wan 14B 480x832x81: 32760x(3x5120)",
        lambda: (half(1, 32760, 15360),),
        (5120, 5120, 5120, -1),
        split_parts,
    ),
    Row(
        "concat_tokens",
        "two streams: 512 + 4096 x 3072",
        lambda: (half(1, 512, 3072), half(1, 4096, 3072)),
        (),
        concat_parts,
    ),
    Row(
        "concat_tokens",
        "two streams, 8 images: 512 + 4096 x 3072",
        lambda: (half(8, 512, 3072), half(8, 4096, 3072)),
        (),
        concat_parts,
    ),
    Row("swap_heads", "Wan 1.3B 480x832x81: 32760x12x128", lambda: (half(1, 32760, 12, 128),), (), swapped),
    Row("swap_heads", "Wan 14B 480x832x81: 32760x40x128", lambda: (half(1, 32760, 40, 128),), (), swapped),
    Row("swap_heads", "UMT5: 512x64x64", lambda: (half(1, 512, 64, 64),), (), swapped),
]
