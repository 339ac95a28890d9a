"""The VRAM that a step of Flux takes in addition to the weights, if our blocks compute it:
`single.py` counts its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES

# Tensors of the size of x [batch, tokens, dim] in a single block: x, q k v, the attention's room, and
# the normed x or the attention's output.
UNITS = 6
TEXT = 512  # tokens of a prompt for Flux.2 and most of Flux.1
SLACK = 1.05  # gaps of the allocator between tensors


def need(net: Any, shape: Sequence[int], dtype: torch.dtype, pieces: int = CHUNK_BYTES) -> float | None:
    """Bytes for a latent [batch, channels, height, width]; None: stock's blocks will compute."""
    if dtype is not torch.float16 or len(shape) != 4 or getattr(net.params, "yak_mlp", False):
        return None
    tokens = TEXT + math.prod(math.ceil(side / net.patch_size) for side in shape[2:])
    width = UNITS * net.hidden_size + max((block.mlp_hidden_dim for block in net.single_blocks), default=0)
    size: int = shape[0] * tokens * width * dtype.itemsize
    return SLACK * (size + pieces)
