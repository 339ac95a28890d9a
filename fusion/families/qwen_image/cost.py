"""The cost of a forward of Qwen-Image. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...base.cost import Cost

TEXT_TOKENS = 256  # of a long prompt, because stock does not pad prompts
FFN = 4  # hidden values for each of a token's
HALF = 2.0  # bytes


def forward(dim: int, layers: int, pixels: int, channels: int, text: int, tokens: int = TEXT_TOKENS) -> Cost:
    """The cost for one prompt. pixels, channels: tokens of the latent, and channels of each. text:
    width of the prompt."""
    block = (4.0 + 2 * FFN) * dim * dim  # of a token; picture and text have one each
    both, modulated = pixels + tokens, 6.0 * dim * dim
    seen = layers * 4.0 * both * both * dim
    return Cost(
        gemm=layers * 2 * both * block + 2.0 * dim * (2 * pixels * channels + tokens * text),
        attention=seen,
        weights=HALF * layers * 2 * (block + modulated),
        own=seen,
        elements=float(layers * both * dim),
        hidden=float(layers * both * FFN * dim),
        width=dim,
    )


def cost(net: Any, shape: Sequence[int]) -> Cost | None:
    """The cost for one latent of this shape [batch, channels, frames, height, width]."""
    if len(shape) != 5:
        return None
    pixels = shape[2] * math.prod(math.ceil(side / net.patch_size) for side in shape[3:])
    return forward(net.inner_dim, len(net.transformer_blocks), pixels, net.in_channels, net.txt_in.weight.shape[1])
