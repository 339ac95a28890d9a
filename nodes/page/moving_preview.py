"""A moving preview of a video: all of its latent frames, while ComfyUI's preview shows the first.

ComfyUI's previewer decodes (`preview_method.py` says which), and ComfyUI's message carries the
result: one picture, which is saved as an animation. Nodes that are elements play it by themselves,
nodes on the canvas by web/js/preview.js.
"""

from __future__ import annotations

import inspect
import io
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ...fusion.compatibility.aside import step_aside
from . import preview_method, user_files
from .front_end import running_server
from .preview_method import Previewers

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

EVERY = 0.5  # seconds between two previews, at least
SHARE = 0.05  # the most of the time that decoding takes
FRAME = 0.125  # seconds for which a latent frame is shown: Wan 2.1 at twice its speed
LONGEST = 256  # pixels
# Names in ComfyUI that these previews depend on.
PARTS = ("get_previewer", "Latent2RGBPreviewer", "TAEHVPreviewerImpl", "LatentPreviewMethod", "args")

log = logging.getLogger("fusestream.moving_preview")
# A picture as ComfyUI's bar takes it: format, picture, the most pixels.
Shown = tuple[str, "Image", int | None]

# The latent formats of our models, for which ComfyUI requests a previewer.
_ours: WeakSet[Any] = WeakSet()


def attach() -> None:
    """Install moving previews, once. Models loaded by other nodes keep their previews."""
    import latent_preview  # noqa: PLC0415 - ComfyUI's own

    if (changed := changed_in(latent_preview)) is not None:
        step_aside("Moving previews", changed, "ComfyUI's own previews are shown")
        return
    stocks = latent_preview.get_previewer

    def get_previewer(device: Any, latent_format: Any, *args: Any, **kwargs: Any) -> Any:
        make = partial(stocks, device, latent_format, *args, **kwargs)
        if latent_format not in _ours or not is_wanted():
            return make()
        return moving(preview_method.previewers(latent_preview, latent_format, make))

    latent_preview.get_previewer = get_previewer


def changed_in(latent_preview: Any) -> str | None:
    """The difference of ComfyUI's previews from those that this code knows, in words; None: there
    is none."""
    lacks = [name for name in PARTS if not hasattr(latent_preview, name)]
    if lacks:
        return f"latent_preview has no {' and no '.join(lacks)}"
    taken = [*inspect.signature(latent_preview.get_previewer).parameters][:2]
    return None if taken == ["device", "latent_format"] else f"get_previewer takes {' and '.join(taken)}"


def watch(patcher: Any) -> None:
    """Let previews of this model's samplings move."""
    latent_format = getattr(getattr(patcher, "model", None), "latent_format", None)
    if latent_format is not None:
        _ours.add(latent_format)


def moving(found: Previewers) -> Any:
    """A moving previewer if these are ComfyUI's own; else the one that there is."""
    from latent_preview import Latent2RGBPreviewer, TAEHVPreviewerImpl  # noqa: PLC0415

    return MovingPreviewer(found) if type(found.stocks) in (Latent2RGBPreviewer, TAEHVPreviewerImpl) else found.stocks


def is_wanted() -> bool:
    """Whether the user wants it, and a page queued: other programs may only know JPEG pictures."""
    from comfy_api import feature_flags  # noqa: PLC0415

    server = running_server()
    return (
        server is not None
        and feature_flags.supports_feature(server.sockets_metadata, server.client_id, "supports_preview_metadata")
        and user_files.value(user_files.PREVIEW, True)
    )


class MovingPreviewer:
    """The previewer of one sampling. Pictures, and videos after a failure, are left to ComfyUI's
    previewer; where the user has asked for none, they have none."""

    def __init__(self, found: Previewers, clock: Callable[[], float] = time.monotonic) -> None:
        self._found, self._clock = found, clock
        self._makes = found.stocks
        self._next = -math.inf
        self._is_begun = self._broken = False

    def __getattr__(self, name: str) -> Any:
        # Packs that make previews ask for its decoder or its factors.
        return getattr(self._makes, name)

    def decode_latent_to_preview_image(self, preview_format: str, x0: Tensor) -> Shown | None:
        """A preview of x0 [1, c, t, h, w]; None: keep the one that is shown."""
        if not self._broken and x0.ndim == 5 and x0.shape[2] > 1:
            if self._clock() < self._next:
                return None
            try:
                return self._made(x0)
            except Exception:  # a preview is not worth a failed run
                self._broken = True
                log.warning("the preview does not move in this run", exc_info=True)
        if self._found.for_videos:
            return None
        shown: Shown = self._found.stocks.decode_latent_to_preview_image(preview_format, x0)
        return shown

    def _made(self, x0: Tensor) -> Shown:
        if not self._is_begun:  # the weights are where they stay: what is free now is free
            self._is_begun = True
            self._makes = self._tiny(x0) or self._makes
        frames, took = frames_of(self._makes, x0, self._clock)
        now = self._clock()
        self._next = now + max(EVERY, took / SHARE)
        return "WEBP", animation(frames, int(now / FRAME) % len(frames)), None

    def _tiny(self, x0: Tensor) -> Any:
        """The previewer by a tiny decoder, where there is one and memory is free for it."""
        made = None if self._found.tiny is None else self._found.tiny()
        return made if made is not None and preview_method.has_room(made.taesd, x0) else None


def frames_of(stocks: Any, x0: Tensor, clock: Callable[[], float]) -> tuple[list[Image], float]:
    """A picture of each latent frame, and the seconds that decoding took."""
    count = x0.shape[2]
    if hasattr(stocks, "taesd"):
        # One by one, as ComfyUI decodes the first, because the model has the memory that all at
        # once would need. Only the others are timed, because the first waits for the step.
        frames = [stocks.decode_latent_to_preview(x0[:1, :, :1])]
        began = clock()
        frames += [stocks.decode_latent_to_preview(x0[:1, :, i : i + 1]) for i in range(1, count)]
        return frames, (clock() - began) * count / (count - 1)
    # Stacked, they are one picture, which is one copy from the card.
    tall = stocks.decode_latent_to_preview(x0[:1].flatten(2, 3).unsqueeze(2))
    height = tall.height // count
    return [tall.crop((0, i * height, tall.width, (i + 1) * height)) for i in range(count)], 0.0


def animation(frames: list[Image], first: int) -> Image:
    """A picture that is saved as all frames, from `first` on, where the last preview has got to."""
    frames = frames[first:] + frames[:first]
    picture = frames[0].copy()

    def save(file: Any, *_one: Any, **_picture: Any) -> None:
        file.write(encoded(frames))

    picture.save = save  # type: ignore[method-assign, assignment]  # ComfyUI's server calls it, in its own thread
    return picture


def encoded(frames: list[Image]) -> bytes:
    """The frames as WebP, or the first as JPEG, because an error here would end all messages of the
    server."""
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
