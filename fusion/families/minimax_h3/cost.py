"""The cost of a forward of MiniMax H3. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ...base.cost import Cost

TEXT_TOKENS = 256  # of a long prompt, because stock does not pad prompts
SOUND = 11  # tokens of sound for each frame of the latent: two channels, 40 a second, 17 pictures in 5 frames
HALF = 2.0  # bytes


def forward(dim: int, inner: int, ffn: int, layers: int, made: int, ends: float, modulated: float, words: int) -> Cost:
    """The cost for one prompt. inner: width of the attention. made: tokens of video and sound. ends:
    elements of one of them in the latent. modulated: weights of a block's modulation. words: tokens
    of the prompt, whose refiner runs once a picture and is not counted."""
    block = 4.0 * dim * inner + 3.0 * dim * ffn
    tokens = made + words
    seen = layers * 4.0 * tokens * tokens * inner
    return Cost(
        gemm=2.0 * layers * tokens * block + 4.0 * dim * made * ends,
        attention=seen,
        weights=HALF * layers * (block + modulated),
        own=seen,
        elements=float(layers * tokens * dim),
        hidden=float(layers * tokens * ffn),
        width=dim,
    )


def tokens_of(net: Any, shape: Sequence[int]) -> int:
    """Tokens of a latent [batch, channels, frames, height, width], and of its sound; or of both as
    stock has packed them, [batch, 1, elements], where a token of sound counts as a third of one."""
    if len(shape) == 3:
        of_token: int = net.latents_dim * math.prod(net.patch_size)
        return math.ceil(math.prod(shape[1:]) / of_token)
    sides: Iterable[tuple[int, int]] = zip(shape[2:], net.patch_size, strict=True)
    return SOUND * shape[2] + math.prod(math.ceil(size / patch) for size, patch in sides)


def cost(net: Any, shape: Sequence[int]) -> Cost | None:
    """The cost for one latent as `tokens_of` has it."""
    if len(shape) not in (3, 5):
        return None
    one = net.blocks[0]
    inner = one.attn.heads * one.attn.head_dim
    ffn: int = one.mlp.fc1.weight.shape[0] // 2
    ends = float(net.latents_dim * math.prod(net.patch_size))
    modulated = float(math.prod(one.adaln_proj.linear.weight.shape))
    return forward(net.hidden_size, inner, ffn, len(net.blocks), tokens_of(net, shape), ends, modulated, TEXT_TOKENS)
