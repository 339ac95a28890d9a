"""norm_to_int8 and norm_to_int4 at the shapes of Wan's and Z-Image's blocks, beside stock's norm and rounding.

What the one pass saves is seen beside the rows of `norm_modulate` and `rows_to_int8` at the same shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels_cuda.ops.norm.norm_to_integers import NORM_TO_INT4, NORM_TO_INT8, NormToIntegers
from ..row import Row, Tensors
from .norm_modulate import BF16, half, norm

GROUP = 256  # of the rotation that most of ComfyUI's files have


def layer(of: NormToIntegers, label: str, m: int, d: int, rotation: int, dtype: torch.dtype = torch.float16) -> Row:  # type: ignore[type-arg]
    """LayerNorm with modulation, as a block of Wan has it."""
    name = f"{label}: {m}x{d}{f' rotation {rotation}' if rotation else ''}"
    return Row(of.unit, name, lambda: norm(1, m, d, dtype, of_x=dtype), (1e-6, "layer", rotation), of.stock)


def by_weight(label: str, m: int, d: int) -> Row:
    """RMSNorm of a stream of fp32, as a block of Z-Image has it."""

    def made() -> Tensors:
        stream: Tensor = half(1, m, d).float()
        return stream, half(1, 1, d), None, None, None

    name = f"{label}: {m}x{d} rotation {GROUP}"
    return Row("norm_to_int8", name, made, (1e-5, "rms", GROUP), NORM_TO_INT8.stock)


ROWS = [
    layer(NORM_TO_INT8, "Wan 1.3B 480x832x81", 32760, 1536, GROUP),
    layer(NORM_TO_INT8, "Wan 14B 480x832x81", 32760, 5120, 0),
    layer(NORM_TO_INT8, "Wan 14B 480x832x81", 32760, 5120, GROUP),
    layer(NORM_TO_INT4, "Wan 14B 480x832x81", 32760, 5120, GROUP),
    layer(NORM_TO_INT8, "Qwen-Image 2048x2048, bf16", 16384, 3072, GROUP, BF16),
    by_weight("Z-Image 1024x1024, fp32 stream", 4128, 3840),
]
