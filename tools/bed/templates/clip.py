"""The clip that the example of live video changes: toys that move, four seconds of them."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

import av

from .. import pack

SIDE, FRAMES, RATE = 512, 97, 24


def write_clip(path: Path, side: int = SIDE, frames: int = FRAMES) -> None:
    """As a video file of some ten kilobytes."""
    pack.load()
    from fusestream.checkpoints.toys import Frame, draw_scene, film, stage

    rng = random.Random(7)
    shown = stage(draw_scene(rng), rng)
    pixels = film([shown], Frame(side, side, frames))[0].add(1).mul(127.5).clamp(0, 255).byte().numpy()
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=Fraction(RATE), options={"threads": "1"})
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
