"""The cost of a forward of Z-Image. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...base.cost import Cost

TEXT_TOKENS = 256  # of a long prompt, because stock does not pad prompts
MODULATION = 256  # width of the modulation's input
HALF = 2.0  # bytes


def forward(
    dim: int, ffn: int, layers: int, refiners: int, pixels: int, ends: float, text: int, tokens: int = TEXT_TOKENS
) -> Cost:
    """The cost for one prompt. refiners: blocks before the others, as many for the picture as for
    the prompt. pixels: tokens of the picture. ends: elements of a token of the latent. text: width
    of the prompt."""
    block = 4.0 * dim * dim + 3.0 * dim * ffn
    passes = [(layers, pixels + tokens), (refiners, pixels), (refiners, tokens)]
    through = sum(count * passing for count, passing in passes)
    seen = sum(4.0 * count * passing * passing * dim for count, passing in passes)
    modulated = 4.0 * dim * MODULATION  # the prompt's own blocks have none
    return Cost(
        gemm=2 * through * block + 2.0 * dim * (2 * pixels * ends + tokens * text),
        attention=seen,
        weights=HALF * (sum(count for count, _ in passes) * block + (layers + refiners) * modulated),
        own=seen,
        elements=float(through * dim),
        hidden=float(through * ffn),
        width=dim,
    )


def cost(net: Any, shape: Sequence[int]) -> Cost | None:
    """The cost for one latent of this shape [batch, channels, height, width]."""
    if len(shape) != 4:
        return None
    ffn: int = net.layers[0].feed_forward.w1.weight.shape[0]
    pixels = math.prod(math.ceil(side / net.patch_size) for side in shape[2:])
    ends = float(net.in_channels * net.patch_size**2)
    text: int = net.cap_embedder[-1].weight.shape[1]
    return forward(net.dim, ffn, len(net.layers), len(net.noise_refiner), pixels, ends, text)
