"""What a step of Z-Image takes of VRAM beside the weights, where our blocks compute it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES

UNITS = 6  # of [batch, tokens, dim] fp16: q k v, what attention sees, the normed x or the branch, and the caller's x
STREAM = 1  # more of x, in its own type: the one that went into the block
TEXT = 512  # tokens of a prompt
SLACK = 1.05  # what the allocator cannot use between two tensors


def need(net: Any, shape: Sequence[int], dtype: torch.dtype) -> float | None:
    """Bytes for a latent [batch, channels, height, width]; None where stock's blocks will compute."""
    if dtype not in (torch.float16, torch.float32) or len(shape) != 4:
        return None
    tokens = TEXT + math.prod(math.ceil(side / net.patch_size) for side in shape[2:])
    size: int = shape[0] * tokens * net.dim * (UNITS * 2 + (STREAM + 1) * dtype.itemsize)
    return SLACK * (size + CHUNK_BYTES)
