"""The VRAM that a step of MiniMax H3 takes in addition to the weights, if our blocks compute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from .cost import SOUND, tokens_of

HEADS = 4  # tensors [tokens, heads * head_dim] fp16: q k v, and the attention's output
NORMED = 1  # [tokens, dim] fp16
STREAMS = 1  # [tokens, dim] in their own type: the stream, which blocks write to
TEXT = 512  # tokens of a prompt
SLACK = 1.05  # gaps of the allocator between tensors


def need(net: Any, shape: Sequence[int], dtype: torch.dtype) -> float | None:
    """Bytes for a latent [batch, channels, frames, height, width]; None: stock's blocks will
    compute."""
    if dtype not in (torch.float16, torch.float32) or len(shape) != 5:
        return None
    attn = net.blocks[0].attn
    tokens = TEXT + SOUND * shape[2] + tokens_of(net, shape)
    row = 2 * HEADS * attn.heads * attn.head_dim + net.hidden_size * (2 * NORMED + STREAMS * dtype.itemsize)
    return float(SLACK * (shape[0] * tokens * row + CHUNK_BYTES))
