"""The cost of a forward of Flux. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...base.cost import Cost

TEXT_TOKENS = 512  # the length to which stock pads a prompt
HALF = 2.0  # bytes


def forward(
    dim: int, double: int, single: int, block: float, pixels: int, channels: int, text: int, tokens: int = TEXT_TOKENS
) -> Cost:
    """The cost for one prompt. double, single: numbers of blocks. block: elements of a block's
    matrices that a token passes; a double block has two sets of them. pixels, channels: tokens of
    the latent, and channels of each. text: width of the prompt."""
    both, count = pixels + tokens, double + single
    ends = 2.0 * dim * (2 * pixels * channels + tokens * text)
    seen = count * 4.0 * both * both * dim
    return Cost(
        gemm=count * 2 * both * block + ends,
        attention=seen,
        weights=HALF * block * (2 * double + single),
        own=seen,
        elements=float(count * both * dim),
        # Without q, k, v and the projection.
        hidden=count * both * max(0.0, block / dim - 4 * dim) / 3,
        width=dim,
    )


def cost(net: Any, shape: Sequence[int]) -> Cost | None:
    """The cost for one latent of this shape [batch, channels, height, width]."""
    single = next(iter(net.single_blocks), None)
    if len(shape) != 4 or single is None:
        return None
    block = single.linear1.weight.numel() + single.linear2.weight.numel()
    pixels = math.prod(math.ceil(side / net.patch_size) for side in shape[2:])
    return forward(
        net.hidden_size,
        len(net.double_blocks),
        len(net.single_blocks),
        float(block),
        pixels,
        net.in_channels,
        net.params.context_in_dim,
    )
