"""The VRAM that a step of Qwen-Image takes in addition to the weights, if our blocks compute it:
`block.py` counts its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES

# Tensors [batch, tokens, dim] fp16: q k v, and the normed stream or the attention's output. The
# feed-forward has fewer, with a second stream.
UNITS = 4
STREAMS = 1  # in their own type: the block's input
TEXT = 512  # tokens of a prompt
SLACK = 1.05  # gaps of the allocator between tensors


def need(net: Any, shape: Sequence[int], dtype: torch.dtype) -> float | None:
    """Bytes for a latent [batch, channels, frames, height, width]; None: stock's blocks will
    compute."""
    if dtype not in (torch.float16, torch.float32) or len(shape) != 5:
        return None
    tokens = TEXT + shape[2] * math.prod(math.ceil(side / net.patch_size) for side in shape[3:])
    size: int = shape[0] * tokens * net.inner_dim * (UNITS * 2 + STREAMS * dtype.itemsize)
    return SLACK * (size + CHUNK_BYTES)
