"""How far a frame differs from an earlier one: what is skipped, and where the frame before may be blended in.

Frames are compared as they come in, on the host, as small as the latent: before the card has any work with them.
"""

from __future__ import annotations

from torch import Tensor

from .pictures import fitted, to_floats

ACROSS = (
    2  # pixels of a frame that are looked at, along either side of a part of it: all of them would take milliseconds
)


def reduced(frame: Tensor, height: int, width: int) -> Tensor:
    """Of a frame [h, w, 3], cut to the form of the latent, averages over its parts: [3, height, width] fp32, 0 to 1."""
    step = max(1, min(frame.shape[0] // (ACROSS * height), frame.shape[1] // (ACROSS * width)))
    seen = frame[step // 2 :: step, step // 2 :: step]
    return fitted(to_floats(seen)[None], width, height)[0].movedim(-1, 0)


def difference(frame: Tensor, other: Tensor) -> float:
    """On average between two reduced frames, 0 to 1."""
    return float((frame - other).abs().mean())


def new_parts(frame: Tensor, before: Tensor, tolerance: float) -> Tensor:
    """Of two reduced frames [3, h, w], how much of each place is new: [1, 1, h, w], 0 where they are alike, 1 where any colour
    differs by `tolerance` or more. It is what `diffusion_step` calls mask."""
    differs = (frame - before).abs().amax(0)
    return (differs / tolerance).clamp_(max=1.0)[None, None]
