"""The cost of a forward of MiniMax H3. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...base.cost import Cost

TEXT_TOKENS = 256  # of a long prompt, because stock does not pad prompts
SOUND = 11  # tokens of sound for each frame of the latent: two channels, 40 a second, 17 pictures in 5 frames
HALF = 2.0  # bytes


def forward(dim: int, inner: int, ffn: int, layers: int, pixels: int, ends: float, modulated: float, rest: int) -> Cost:
    """The cost for one prompt. inner: width of the attention. pixels: tokens of the video. ends:
    elements of one of them in the latent. modulated: weights of a block's modulation. rest: tokens
    of prompt and sound. The prompt's refiner runs once a picture and is not counted."""
    block = 4.0 * dim * inner + 3.0 * dim * ffn
    tokens = pixels + rest
    seen = layers * 4.0 * tokens * tokens * inner
    return Cost(
        gemm=2.0 * layers * tokens * block + 4.0 * dim * pixels * ends,
        attention=seen,
        weights=HALF * layers * (block + modulated),
        own=seen,
        elements=float(layers * tokens * dim),
        hidden=float(layers * tokens * ffn),
        width=dim,
    )


def tokens_of(net: Any, shape: Sequence[int]) -> int:
    """Tokens of a video's latent [batch, channels, frames, height, width]."""
    return math.prod(math.ceil(size / patch) for size, patch in zip(shape[2:], net.patch_size, strict=True))


def cost(net: Any, shape: Sequence[int]) -> Cost | None:
    """The cost for one latent of this shape [batch, channels, frames, height, width]."""
    if len(shape) != 5:
        return None
    one = net.blocks[0]
    inner = one.attn.heads * one.attn.head_dim
    ffn: int = one.mlp.fc1.weight.shape[0] // 2
    ends = float(net.latents_dim * math.prod(net.patch_size))
    modulated = float(math.prod(one.adaln_proj.linear.weight.shape))
    rest = TEXT_TOKENS + SOUND * shape[2]
    return forward(net.hidden_size, inner, ffn, len(net.blocks), tokens_of(net, shape), ends, modulated, rest)
