"""The VRAM that a step of Qwen-Image takes in addition to the weights, if our blocks compute it:
`block.py` counts its tensors. The most is held either at the attention or at the feed-forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from ...weights.storage import bytes_of_halves

HALF = 2  # bytes
TEXT = 512  # tokens of a prompt
SLACK = 1.05  # gaps of the allocator between tensors


def need(net: Any, shape: Sequence[int], dtype: torch.dtype, pieces: int = CHUNK_BYTES) -> float | None:
    """Bytes for a latent [batch, channels, frames, height, width]; None: stock's blocks will
    compute. pieces: bytes of hidden values at a time."""
    if dtype not in (torch.float16, torch.float32) or len(shape) != 5:
        return None
    pixels = shape[0] * shape[2] * math.prod(math.ceil(side / net.patch_size) for side in shape[3:])
    first, _, second = net.transformer_blocks[0].img_mlp.net
    dim, stream, half = net.inner_dim, dtype.itemsize, HALF
    both = (pixels + shape[0] * TEXT) * dim
    # The block's input; q k v, and the normed stream or the attention's output.
    attends = both * (stream + 4 * half)
    # The block's input and the new streams; the picture's normed one and a piece of its hidden values.
    hidden = min(pieces, pixels * first.proj.weight.shape[0] * half)
    is_fed = both * 2 * stream + pixels * dim * half + hidden + bytes_of_halves(first.proj.weight, second.weight)
    return float(SLACK * max(attends, is_fed))
