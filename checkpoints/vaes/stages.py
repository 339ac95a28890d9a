"""What the VAEs of Wan and the KL VAEs share: four stages in either half, and how large things
get.
"""

from __future__ import annotations

MULTIPLIERS = (1, 2, 4, 4)
STAGES = len(MULTIPLIERS)
CUBE, ONE = (3, 3, 3), (1, 1, 1)

# Pixels are expected in [-1, 1]; this keeps most of them inside, so that clamping hides nothing.
PIXEL_GAIN = 0.5
# SiLU halves what the last norm makes; this gives latents of size one.
LATENT_GAIN = 2.0


def down(width: int) -> list[int]:
    """The widths through an encoder, the base width first."""
    return [width * m for m in (1, *MULTIPLIERS)]


def up(width: int) -> list[int]:
    """The widths through a decoder."""
    return [width * m for m in (MULTIPLIERS[-1], *MULTIPLIERS[::-1])]
