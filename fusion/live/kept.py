"""New frames as one IMAGE, as long as they fit into memory."""

from __future__ import annotations

import torch
from torch import Tensor

GIB = 2**30
LIMIT = 4 * GIB  # of host memory, for all frames of an IMAGE
PIXEL = 3 * 4  # bytes


def too_large(count: int, height: int, width: int) -> str | None:
    """Why so many frames cannot be an IMAGE, and what to do instead; None if they can."""
    nbytes = count * height * width * PIXEL
    if nbytes <= LIMIT:
        return None
    return (
        f"{count} frames of {width}x{height} would be an IMAGE of {nbytes / GIB:.1f} GiB, more than the {LIMIT // GIB} GiB that "
        "FuseStream Live Video holds. Connect its VIDEO output, written as frames are made, or make fewer or smaller frames."
    )


class Kept:
    """Frames that all have the size of the first."""

    def __init__(self) -> None:
        self._frames: list[Tensor] = []
        self.fault: str | None = None  # why there is no IMAGE

    def add(self, frame: Tensor) -> None:
        """Add a frame: [h, w, 3] fp32 on the host."""
        if self.fault is not None:
            return
        self.fault = too_large(len(self._frames) + 1, *frame.shape[:2])
        if self.fault is None:
            self._frames.append(frame)
        else:
            self._frames.clear()

    def image(self) -> Tensor | None:
        """The IMAGE [n, h, w, 3], once: each frame is dropped as it is copied. None: `fault` says
        why."""
        if self.fault is not None:
            return None
        frames, self._frames = self._frames, []
        out = torch.empty(len(frames), *frames[0].shape)
        for i in reversed(range(len(frames))):
            out[i] = frames.pop()
        return out
