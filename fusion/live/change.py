"""The difference between a frame and an earlier one decides which frames are skipped, and where the
frame before may be blended in.

Frames are compared as they come in, on the host and as small as the latent, before the card has any
work with them.
"""

from __future__ import annotations

from torch import Tensor

from .pictures import fitted, to_floats

ACROSS = (
    # Pixels looked at along either side of a part; all pixels would take milliseconds.
    2
)


def reduced(frame: Tensor, height: int, width: int) -> Tensor:
    """Averages over the parts of a frame [h, w, 3], cut to the form of the latent: [3, height,
    width] fp32, 0 to 1."""
    step = max(1, min(frame.shape[0] // (ACROSS * height), frame.shape[1] // (ACROSS * width)))
    seen = frame[step // 2 :: step, step // 2 :: step]
    return fitted(to_floats(seen)[None], width, height)[0].movedim(-1, 0)


def difference(frame: Tensor, other: Tensor) -> float:
    """Mean difference of two reduced frames, 0 to 1."""
    return float((frame - other).abs().mean())


def new_parts(frame: Tensor, before: Tensor, tolerance: float) -> Tensor:
    """Share of new content at each place of two reduced frames [3, h, w]: [1, 1, h, w], 0 where
    they are alike, 1 where any colour differs by `tolerance` or more. This is the mask of
    `diffusion_step`."""
    differs = (frame - before).abs().amax(0)
    return (differs / tolerance).clamp_(max=1.0)[None, None]
