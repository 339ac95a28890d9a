"""The preview of a video moves: all of its latent frames, where ComfyUI's shows the first.

ComfyUI's previewer decodes, by its *Live preview method*, and ComfyUI's message carries the result,
which is one picture, and an animation once it is saved. Nodes that are elements play it by
themselves, nodes on the canvas by web/js/preview.js.
"""

from __future__ import annotations

import inspect
import io
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ...fusion.compatibility.aside import step_aside
from . import user_files
from .front_end import running_server

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

EVERY = 0.5  # seconds between two previews, at least
SHARE = 0.05  # of the time, the most that decoding takes
FRAME = 0.125  # seconds for which a latent frame is shown: Wan 2.1 at twice its speed
LONGEST = 256  # pixels
PARTS = ("get_previewer", "Latent2RGBPreviewer", "TAEHVPreviewerImpl")  # of ComfyUI's, that these are made of

log = logging.getLogger("fusestream.moving_preview")
Shown = tuple[str, "Image", int | None]  # as ComfyUI's bar takes a picture: format, picture, the most pixels

_ours: WeakSet[Any] = WeakSet()  # the latent formats of our models, by which ComfyUI asks for a previewer


def attach() -> None:
    """Called once. Models that others have loaded keep the previews that they had."""
    import latent_preview  # noqa: PLC0415 - ComfyUI's own

    if (changed := changed_in(latent_preview)) is not None:
        step_aside("Moving previews", changed, "ComfyUI's own previews are shown")
        return
    stocks = latent_preview.get_previewer

    def get_previewer(device: Any, latent_format: Any, *args: Any, **kwargs: Any) -> Any:
        return moving(stocks(device, latent_format, *args, **kwargs), latent_format)

    latent_preview.get_previewer = get_previewer


def changed_in(latent_preview: Any) -> str | None:
    """What of ComfyUI's previews is not as these know it, in words."""
    lacks = [name for name in PARTS if not hasattr(latent_preview, name)]
    if lacks:
        return f"latent_preview has no {' and no '.join(lacks)}"
    taken = [*inspect.signature(latent_preview.get_previewer).parameters][:2]
    return None if taken == ["device", "latent_format"] else f"get_previewer takes {' and '.join(taken)}"


def watch(patcher: Any) -> None:
    """Let previews of what this model samples move."""
    latent_format = getattr(getattr(patcher, "model", None), "latent_format", None)
    if latent_format is not None:
        _ours.add(latent_format)


def moving(previewer: Any, latent_format: Any) -> Any:
    """One that moves if it is ComfyUI's own for a model of ours, and wanted; else the same."""
    from latent_preview import Latent2RGBPreviewer, TAEHVPreviewerImpl  # noqa: PLC0415

    can = latent_format in _ours and type(previewer) in (Latent2RGBPreviewer, TAEHVPreviewerImpl)
    return MovingPreviewer(previewer) if can and is_wanted() else previewer


def is_wanted() -> bool:
    """By the user, and by a page that queued: programs may know no pictures but JPEG."""
    from comfy_api import feature_flags  # noqa: PLC0415

    server = running_server()
    return (
        server is not None
        and feature_flags.supports_feature(server.sockets_metadata, server.client_id, "supports_preview_metadata")
        and user_files.value(user_files.PREVIEW, True)
    )


class MovingPreviewer:
    """Of one sampling. Pictures are left to ComfyUI's previewer, and videos after a failure."""

    def __init__(self, stocks: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._stocks, self._clock = stocks, clock
        self._next = -math.inf
        self._broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stocks, name)  # packs that make previews too ask for its decoder or its factors

    def decode_latent_to_preview_image(self, preview_format: str, x0: Tensor) -> Shown | None:
        """x0: [1, c, t, h, w]. None: what is shown goes on."""
        if not self._broken and x0.ndim == 5 and x0.shape[2] > 1:
            if self._clock() < self._next:
                return None
            try:
                return self._made(x0)
            except Exception:  # a preview is not worth a run
                self._broken = True
                log.warning("the preview does not move in this run", exc_info=True)
        shown: Shown = self._stocks.decode_latent_to_preview_image(preview_format, x0)
        return shown

    def _made(self, x0: Tensor) -> Shown:
        frames, took = frames_of(self._stocks, x0, self._clock)
        now = self._clock()
        self._next = now + max(EVERY, took / SHARE)
        return "WEBP", animation(frames, int(now / FRAME) % len(frames)), None


def frames_of(stocks: Any, x0: Tensor, clock: Callable[[], float]) -> tuple[list[Image], float]:
    """A picture of each latent frame, and the seconds that decoding took."""
    count = x0.shape[2]
    if hasattr(stocks, "taesd"):
        # One by one, as ComfyUI decodes the first, because the model has the memory that all at
        # once would need. The first waits for the step.
        frames = [stocks.decode_latent_to_preview(x0[:1, :, :1])]
        began = clock()
        frames += [stocks.decode_latent_to_preview(x0[:1, :, i : i + 1]) for i in range(1, count)]
        return frames, (clock() - began) * count / (count - 1)
    # Below each other they are one picture, which is one copy from the card.
    tall = stocks.decode_latent_to_preview(x0[:1].flatten(2, 3).unsqueeze(2))
    height = tall.height // count
    return [tall.crop((0, i * height, tall.width, (i + 1) * height)) for i in range(count)], 0.0


def animation(frames: list[Image], first: int) -> Image:
    """A picture that is saved as all frames, from the `first` on: the last one has come so far."""
    frames = frames[first:] + frames[:first]
    picture = frames[0].copy()

    def save(file: Any, *_one: Any, **_picture: Any) -> None:
        file.write(encoded(frames))

    picture.save = save  # type: ignore[method-assign, assignment]  # ComfyUI's server calls it, in its own thread
    return picture


def encoded(frames: list[Image]) -> bytes:
    """As WebP, or as a JPEG of the first: an error here would end all messages of the server."""
    from PIL import ImageOps  # noqa: PLC0415

    file = io.BytesIO()
    try:
        first, *others = (ImageOps.contain(frame, (LONGEST, LONGEST)) for frame in frames)
        options = {"duration": round(FRAME * 1000), "loop": 0, "quality": 80, "method": 0}
        first.save(file, "WEBP", save_all=True, append_images=others, **options)
    except Exception:
        log.warning("this preview does not move", exc_info=True)
        file = io.BytesIO()
        frames[0].save(file, "JPEG")
    return file.getvalue()
