"""The VRAM that a step of LTX-2 takes in addition to the weights, if our blocks compute it. The most
is held at the video's attention to itself, at its feed-forward, or behind the blocks, where stock
makes the last modulation of the whole stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from ...weights.storage import bytes_of_halves
from .cost import TEXT_TOKENS, tokens_of

HALF = 2  # bytes
# Of the stream's size and type, during all blocks: the stream, and the two tables by which the video
# turns, of which one is for half of the width: four numbers for two of a head's.
STREAM = 1 + 2 + 1
END = 3  # more of these, behind the blocks
SLACK = 1.05  # gaps of the allocator between tensors


def need(net: Any, shape: Sequence[int], dtype: torch.dtype, pieces: int = CHUNK_BYTES) -> float | None:
    """Bytes for a latent as `tokens_of` has it; None: stock's blocks will compute. pieces: bytes of
    hidden values at a time."""
    if dtype not in (torch.float16, torch.float32) or len(shape) not in (3, 5):
        return None
    tokens, dim, stream, half = shape[0] * tokens_of(shape), net.inner_dim, dtype.itemsize, HALF
    first, _, second = net.transformer_blocks[0].ff.net
    attends = tokens * dim * (STREAM * stream + 4 * half)  # q k v, and the normed x or the attention's output
    hidden = min(pieces, tokens * first.proj.weight.shape[0] * half)
    is_fed = tokens * dim * (STREAM * stream + half) + hidden + bytes_of_halves(first.proj.weight, second.weight)
    ends = tokens * dim * (STREAM + END) * stream
    prompt = shape[0] * TEXT_TOKENS * (dim + net.audio_inner_dim) * stream
    return float(SLACK * (prompt + max(attends, is_fed, ends)))
