"""The cost of a forward of Wan. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...base.cost import Cost

TEXT_TOKENS = 512
TEXT_WIDTH = 4096
CHANNELS, PATCH = 16, 4  # channels of a latent, and its pixels in a token


def forward(dim: int, ffn: int, layers: int, tokens: int, text: int = TEXT_TOKENS) -> Cost:
    """The cost of one prompt through the transformer."""
    square = 2.0 * dim * dim
    block = (
        6 * tokens * square + 2 * text * square + 4.0 * tokens * dim * ffn
    )  # self q k v o, cross q o; cross k v; ffn
    ends = 2.0 * tokens * dim * (CHANNELS * PATCH) * 2 + 2.0 * text * dim * (TEXT_WIDTH + dim)
    weights = 2.0 * (8 * dim * dim + 2 * dim * ffn)
    return Cost(
        gemm=layers * block + ends,
        attention=layers * 4.0 * tokens * dim * (tokens + text),
        weights=layers * weights,
        own=layers * 4.0 * tokens * dim * tokens,
        elements=float(layers * tokens * dim),
        hidden=float(layers * tokens * ffn),
        width=dim,
    )


def cost(net: Any, shape: Sequence[int]) -> Cost | None:
    """The cost for one latent of this shape [batch, channels, frames, height, width]."""
    if len(shape) != 5:
        return None
    tokens = math.prod(math.ceil(side / patch) for side, patch in zip(shape[2:], net.patch_size, strict=True))
    layers = len(net.blocks) + len(getattr(net, "vace_blocks", ()))
    return forward(net.dim, net.ffn_dim, layers, tokens, net.text_len)
