"""The VRAM that a step of Wan takes in addition to the weights, if our blocks compute it:
`block.py` draws its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ....kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from ...sparse.sla import PIECE_BYTES
from ...weights.storage import bytes_of_halves
from .trained_sparse import gate_of, learns

# Tensors of x's size [batch, tokens, dim]: five in a block, and the strided x that the first block
# copies.
UNITS = 6
SIDE_UNITS = 3  # additional ones of VACE's side branch
# Of attention that was trained sparse: VSA's gate, and a quarter of the heads cube by cube; SLA's
# features.
VSA_UNITS, SLA_BYTES = 4, 4 * PIECE_BYTES
SLACK = 1.05  # gaps of the allocator between tensors


def need(net: Any, shape: Sequence[int], dtype: torch.dtype, pieces: int = CHUNK_BYTES) -> float | None:
    """Bytes for a latent [batch, channels, frames, height, width]; None: stock's blocks will
    compute."""
    if dtype is not torch.float16 or len(shape) != 5:
        return None
    tokens = shape[0] * math.prod(
        math.ceil(side / patch) for side, patch in zip(shape[2:], net.patch_size, strict=True)
    )
    units = UNITS + (SIDE_UNITS if hasattr(net, "vace_blocks") else 0)
    size: int = units * tokens * net.dim * dtype.itemsize
    block = next(iter(getattr(net, "blocks", ())), None)
    made = 0 if block is None else bytes_of_halves(block.ffn[0].weight, block.ffn[2].weight)
    if block is not None and learns(block):
        made += VSA_UNITS * size // units if gate_of(block.self_attn) else SLA_BYTES
    return SLACK * (size + pieces + made)
