"""The VRAM that a step of Z-Image takes in addition to the weights, if our blocks compute it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES

# Tensors [batch, tokens, dim] fp16: q k v, the attention's output, the normed x or the branch, and
# the caller's x.
UNITS = 6
STREAM = 1  # one more x in its own type: the block's input
TEXT = 512  # tokens of a prompt
SLACK = 1.05  # gaps of the allocator between tensors


def need(net: Any, shape: Sequence[int], dtype: torch.dtype, pieces: int = CHUNK_BYTES) -> float | None:
    """Bytes for a latent [batch, channels, height, width]; None: stock's blocks will compute."""
    if dtype not in (torch.float16, torch.float32) or len(shape) != 4:
        return None
    tokens = TEXT + math.prod(math.ceil(side / net.patch_size) for side in shape[2:])
    size: int = shape[0] * tokens * net.dim * (UNITS * 2 + (STREAM + 1) * dtype.itemsize)
    return SLACK * (size + pieces)
