"""The VRAM that a step of LTX-2 takes in addition to the weights, if our blocks compute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from .cost import TEXT_TOKENS, tokens_of

# Tensors [batch, tokens, dim] fp16: q k v, the attention's output, and the normed x.
UNITS = 5
# In the stream's type: the stream, and the two tables by which the video turns, of which one is for
# half of the width: four numbers for two of a head's.
STREAM = 1 + 2 + 1
SLACK = 1.05  # gaps of the allocator between tensors


def need(net: Any, shape: Sequence[int], dtype: torch.dtype) -> float | None:
    """Bytes for a latent as `tokens_of` has it; None: stock's blocks will compute."""
    if dtype not in (torch.float16, torch.float32) or len(shape) not in (3, 5):
        return None
    tokens = TEXT_TOKENS + tokens_of(shape)
    size: int = shape[0] * tokens * net.inner_dim * (UNITS * 2 + STREAM * dtype.itemsize)
    return SLACK * (size + CHUNK_BYTES)
