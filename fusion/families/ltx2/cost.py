"""The cost of a forward of LTX-2. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...base.cost import Cost

TEXT_TOKENS = 1024  # which stock fills each prompt up to
CHANNELS = 128  # of a latent, and of a token: those of the sound have as many
HALF = 2.0  # bytes


class BlockWeights(NamedTuple):
    """Weights of a block that each token of the video is multiplied by, and each of the prompt; and
    those for the few tokens of the sound. Gates and modulations are small."""

    pixel: float
    word: float
    sound: float


def block_weights(dim: int, sound: int) -> BlockWeights:
    """Of streams of these widths: the video looks at itself, at the prompt and at the sound, which
    looks at all three."""
    return BlockWeights(14.0 * dim**2 + 4.0 * dim * sound, 2.0 * dim**2, 20.0 * sound**2)


def forward(dim: int, sound: int, layers: int, pixels: int, words: int = TEXT_TOKENS) -> Cost:
    """The cost of one prompt. pixels: tokens of the video."""
    of_block = block_weights(dim, sound)
    multiplied = layers * (pixels * of_block.pixel + words * of_block.word) + pixels * 2.0 * CHANNELS * dim
    return Cost(
        gemm=2 * multiplied,
        attention=layers * 4.0 * pixels * (pixels + words) * dim,
        weights=layers * HALF * sum(of_block),
        own=layers * 4.0 * pixels * pixels * dim,
        elements=float(layers * pixels * dim),
        hidden=float(layers * pixels * 4 * dim),
        width=dim,
    )


def tokens_of(shape: Sequence[int]) -> int:
    """Tokens of a latent [batch, channels, frames, height, width], or of one with its sound that stock
    has packed, [batch, 1, elements]."""
    return math.ceil(math.prod(shape[1:]) / CHANNELS)


def cost(net: Any, shape: Sequence[int]) -> Cost | None:
    """The cost for one latent of this shape."""
    if len(shape) not in (3, 5):
        return None
    return forward(net.inner_dim, net.audio_inner_dim, len(net.transformer_blocks), tokens_of(shape))
