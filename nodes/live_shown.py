"""What a page shows of live video while it runs: the bar, a picture now and then, and frames a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .front_end import write_on

PICTURE_EVERY, TEXT_EVERY = 0.1, 0.5  # seconds


class Shown:
    """Of one run. total: how many frames there will be; None: nobody knows. node: where the text is shown."""

    def __init__(self, total: int | None, node: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        import comfy.utils  # noqa: PLC0415 - not while nodes are being listed

        self._total, self._node, self._clock = total, node, clock
        self._bar: Any = comfy.utils.ProgressBar(total or 1, node_id=node)
        self._began = self._text_at = self._picture_at = clock()
        self._told = 0  # frames at the last text
        self.frames = 0

    def add(self, frame: Tensor) -> None:
        """frame: [h, w, 3] floats on the host."""
        self.frames += 1
        now = self._clock()
        picture = None
        if self.frames == 1 or now - self._picture_at >= PICTURE_EVERY:
            self._picture_at, picture = now, preview(frame)
        # Of a camera it is not known how long it will be: the bar is always about to end.
        self._bar.update_absolute(self.frames, max(self._total or 0, self.frames + (self._total is None)), picture)
        if now - self._text_at >= TEXT_EVERY:
            self._say(f"{(self.frames - self._told) / (now - self._text_at):.1f} frames a second, {self.frames} so far")
            self._text_at, self._told = now, self.frames

    def done(self) -> None:
        """The whole run in a line."""
        seconds = max(self._clock() - self._began, 1e-9)
        self._say(f"{self.frames} frames in {seconds:.1f} s: {self.frames / seconds:.1f} a second")

    def _say(self, text: str) -> None:
        write_on(self._node, text)


def preview(frame: Tensor) -> tuple[str, Any, int]:
    """As stock's bar takes a picture."""
    import latent_preview  # noqa: PLC0415 - ComfyUI's own
    from PIL import Image  # noqa: PLC0415

    pixels = (frame * 255).clamp(0, 255).byte().numpy()
    return "JPEG", Image.fromarray(pixels), latent_preview.MAX_PREVIEW_RESOLUTION
