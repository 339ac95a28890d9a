"""The VRAM that a step of MiniMax H3 takes in addition to the weights, if our blocks compute it. The
most is held either around the attention or at the feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from ...weights.storage import bytes_of_halves
from .cost import tokens_of

HALF = 2  # bytes
STREAMS = 2  # [tokens, dim] in their own type: the stream, and what it was made of, which stock keeps
TEXT = 512  # tokens of a prompt
SLACK = 1.05  # gaps of the allocator between tensors


def need(net: Any, shape: Sequence[int], dtype: torch.dtype, pieces: int = CHUNK_BYTES) -> float | None:
    """Bytes for a latent as `tokens_of` has it; None: stock's blocks will compute. pieces: bytes of
    hidden values at a time."""
    if dtype not in (torch.float16, torch.float32) or len(shape) not in (3, 5):
        return None
    attn, mlp = net.blocks[0].attn, net.blocks[0].mlp
    tokens, half = shape[0] * (TEXT + tokens_of(net, shape)), HALF
    normed, inner = tokens * net.hidden_size * half, tokens * attn.heads * attn.head_dim * half
    streams = STREAMS * tokens * net.hidden_size * dtype.itemsize
    # q k v, and the attention's output; or, before it, the normed x.
    attends = 3 * inner + max(inner, normed + bytes_of_halves(attn.qkv_proj.weight))
    hidden = min(pieces, tokens * mlp.fc1.weight.shape[0] // 2 * half)
    is_fed = normed + hidden + bytes_of_halves(mlp.fc1.weight, mlp.fc2.weight)
    return float(SLACK * (streams + max(attends, is_fed)))
