"""Models that no family of ours computes, and Qwen-Image: their published sizes, their latents, and what a step costs. Standard
library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...fusion.base.cost import Cost
from ...fusion.families.ltx2.cost import CHANNELS, TEXT_TOKENS, block_weights
from .pictures import HALF

# **Guessed**: of the table of timesteps in MiniMax H3's pruned file.
TABLE_ROWS, TABLE_COLUMNS = 1025, 8


@dataclass(frozen=True)
class Network:
    """A transformer by its blocks.

    dim      of attention; stream: of what passes from block to block, where that is another
    pixel    weights of a block that each token of the picture is multiplied by; word: of the prompt
    beside   weights that make modulations, or are for the few tokens of sound
    shared   a word's are the pixels' weights
    joint    all tokens look at each other; else pixels look at pixels, and once more at words
    words    tokens of a long prompt, with what stock fills it up to
    side     latent pixels of a side in a token
    ends     weights of the layers before and behind the blocks, for a token of the picture
    ffn      width of the hidden values; gated: of two products, multiplied
    has_fp16 whether ComfyUI computes it in FP16 on a card without BF16, and not in FP32
    folded   whether ComfyUI's code has the activation done while INT8 products round what they read
    own      whether a family of ours computes the blocks: around an FP32 stream, what has no FP16
    """

    layers: int
    dim: int
    pixel: float
    word: float
    beside: float = 0.0
    shared: bool = False
    joint: bool = True
    words: int = 256
    side: int = 2
    ends: float = 0.0
    stream: int = 0
    ffn: int = 0
    gated: bool = False
    has_fp16: bool = True
    folded: bool = False
    own: bool = False

    def pixels(self, latent: Sequence[int]) -> int:
        """Tokens of a latent [channels, height, width], or with frames behind the channels."""
        _, *frames, height, width = latent
        return math.prod(frames) * (height // self.side) * (width // self.side)

    def forward(self, latent: Sequence[int]) -> Cost:
        """One forward of one prompt, for a latent of this shape."""
        pixels = self.pixels(latent)
        multiplied = self.layers * (pixels * self.pixel + self.words * self.word) + pixels * self.ends
        looks = (pixels + self.words) ** 2 if self.joint else pixels * (pixels + self.words)
        held = self.pixel + self.beside + (0.0 if self.shared else self.word)
        return Cost(2 * multiplied, self.layers * 4.0 * looks * self.dim, self.layers * HALF * held)


def two_streams(dim: int, layers: int, *, side: int, ends: float) -> Network:
    """As Flux' double blocks: either stream has its matrices, and those of its modulation. ends: channels."""
    own = 12.0 * dim**2
    return Network(layers, dim, own, own, beside=own, side=side, ends=ends * dim, ffn=4 * dim)


def ltx(dim: int, sound: int, layers: int) -> Network:
    """As the family counts them, which computes these where a card has no BF16."""
    weights, ends = block_weights(dim, sound), 2.0 * CHANNELS * dim
    return Network(layers, dim, *weights, joint=False, words=TEXT_TOKENS, side=1, ends=ends, ffn=4 * dim)


def minimax(dim: int, inner: int, ffn: int, layers: int) -> Network:
    """One stream. Of a pruned file a modulation is made of the columns of a table."""
    block = 4.0 * dim * inner + 3.0 * dim * ffn
    ends = 2.0 * 96 * dim
    return Network(
        layers, inner, block, block, 18.0 * TABLE_COLUMNS * dim, shared=True, ends=ends, stream=dim, ffn=ffn, gated=True
    )


def krea(dim: int, ffn: int, layers: int) -> Network:
    """One stream with gated attention, four queries to a key."""
    block = 3.5 * dim**2 + 3.0 * dim * ffn
    return Network(layers, dim, block, block, shared=True, ends=2.0 * 64 * dim, ffn=ffn, gated=True)


def anima(dim: int, text: int, rank: int, layers: int) -> Network:
    """Pixels look at pixels and at the prompt; modulations are of low rank."""
    modulation = 3.0 * (dim * rank + rank * 3 * dim)
    ends = (68.0 + 64.0) * dim
    return Network(layers, dim, 14.0 * dim**2, 2.0 * dim * text, modulation, joint=False, ends=ends, ffn=4 * dim)


NETWORKS = {
    "qwen_image": replace(two_streams(3072, 60, side=2, ends=128), has_fp16=False, own=True),
    "hunyuan_video_15": two_streams(2048, 54, side=1, ends=65 + 32),
    "ltx23": replace(ltx(4096, 2048, 48), has_fp16=False),
    "minimax_h3": replace(minimax(5376, 7168, 14336, 50), has_fp16=False, folded=True),
    "krea2": krea(6144, 16384, 28),
    "anima": anima(2048, 1024, 256, 28),
}
