"""The Live Video node: each frame is made anew by a few steps of an image model."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.latest import InputImpl, io

from ..fusion.base import errors
from ..fusion.live.settings import SAMPLERS, SCHEDULERS, SamplerName, Settings
from . import camera, declare
from .declare import About, Node, linked, widget
from .page.front_end import write_on

if TYPE_CHECKING:
    from torch import Tensor

    from ..fusion.live.sources import Source

log = logging.getLogger("fusestream.live")

IMAGE, VIDEO = 0, 1  # the outputs
PICTURE_EVERY, TEXT_EVERY = 0.1, 0.5  # seconds
BOTH = "Connect frames or video, not both: one node makes one video."


class LiveVideo(Node):
    """A video through any image model, frame by frame."""

    about = About(
        "Live Video",
        declare.SAMPLING,
        "Makes each frame of a video anew by one to four steps of a turbo or LCM model, as VAE Encode, KSampler "
        "and VAE Decode would one by one, but without loading, preparing and waiting between frames. Frames are read, made and "
        "written one after the other: memory does not grow with the video.",
        aliases=["real time", "video to video", "webcam", "stream diffusion", "sd turbo"],
        hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        outputs=[
            io.Image.Output(
                tooltip="All new frames as one batch, up to 4 GiB of them: 1365 of 512x512. Longer ones: VIDEO."
            ),
            io.Video.Output(tooltip="The new frames as a video, encoded as they are made. For Save Video."),
        ],
    )

    @dataclass(frozen=True)
    class Inputs:
        model: Any = linked(io.Model, "Of pictures, such as SD-Turbo, an LCM or SD 1.5 with an LCM LoRA. Any loader's.")
        positive: Any = linked(io.Conditioning, "What the frames shall show.")
        negative: Any = linked(io.Conditioning, "What they shall not show. Without effect where cfg is 1.")
        vae: Any = linked(io.Vae, "The model's. TAESD is the fastest; its pictures are a little softer.")
        frames: Any = linked(
            io.Image,
            "A short clip as pictures. Or connect video; without both it is the camera of your browser.",
            optional=True,
        )
        video: Any = linked(
            io.Video,
            "Read from its file frame by frame, however long it is. Its sound is not carried over.",
            optional=True,
        )
        steps: int = widget(
            "Of each frame: 1 for SD-Turbo, up to 4 for LCM models.", default=1, between=(1, 50), is_required=True
        )
        cfg: float = widget(
            "Guidance. Turbo and LCM models want 1, and are twice as fast with it.",
            default=1.0,
            between=(0.0, 100.0, 0.1),
            is_required=True,
        )
        strength: float = widget(
            "How much of a frame is made anew, as KSampler's denoise. 1: all of it.",
            default=0.5,
            between=(0.01, 1.0, 0.01),
            is_required=True,
        )
        seed: int = widget(
            "Of the noise. All frames have the same, so what does not move stays as it is.",
            default=0,
            between=(0, 0xFFFFFFFFFFFFFFFF),
            is_required=True,
            control_after_generate=False,
        )
        sampler: SamplerName = widget(
            "lcm for LCM models, euler for others.", default="euler", options=SAMPLERS, is_required=True
        )
        scheduler: str = widget(
            "As in KSampler; sd_turbo is ComfyUI's SDTurboScheduler, for SD-Turbo and SDXL-Turbo.",
            default="simple",
            options=SCHEDULERS,
            is_required=True,
        )
        blend: float = widget(
            "How much of the frame before is blended in where nothing changes: less flicker. 0: nothing.",
            default=0.0,
            between=(0.0, 0.95, 0.05),
        )
        tolerance: float = widget(
            "How far a place may change between two frames, from 0 to 1, before nothing is blended there.",
            default=0.1,
            between=(0.01, 1.0, 0.01),
            is_advanced=True,
        )
        skip: float = widget(
            "A frame that differs less than this from the last one made is not made. 0.005 suits a still camera. 0: all are made.",
            default=0.0,
            between=(0.0, 1.0, 0.001),
        )
        batch: int = widget(
            "Frames that pass through the model together: more a second where the card has room, each later.",
            default=1,
            between=(1, 64),
        )
        width: int = widget(
            "Frames are scaled to it, and what stands over is cut off. 0: as they come.",
            default=512,
            between=(0, 4096, 8),
        )
        height: int = widget("As width. 0: as they come.", default=512, between=(0, 4096, 8))
        fps: float = widget(
            "Frames a second of the new video with frames connected, and the most taken of a camera. A video keeps its own.",
            default=24.0,
            between=(1.0, 240.0, 1.0),
        )

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.live import engine, kept  # noqa: PLC0415 - the server starts without it
        from ..fusion.live.video import VideoFile  # noqa: PLC0415

        settings = declare.settings_of(Settings, inputs)
        source = _source(inputs, cls.hidden.unique_id)
        images = kept.Kept()
        if source.count and source.height and source.width:
            images.fault = kept.too_large(
                source.count, settings.height or source.height, settings.width or source.width
            )
            if images.fault is not None and _is_linked(cls.hidden, IMAGE):
                raise errors.WrongInput(images.fault)
        written = VideoFile(_temp_file(), source.rate)
        shown = Shown(source.count, cls.hidden.unique_id)

        began = time.monotonic()

        def deliver(frame: Any) -> None:
            images.add(frame)
            written.add(frame, None if source.rate else time.monotonic() - began)
            shown.add(frame)

        try:
            engine.run(inputs.model, inputs.positive, inputs.negative, inputs.vae, source.frames, settings, deliver)
        finally:
            source.close()
            written.close()
            if written.frames:
                log.info("live video: %d frames in %s", written.frames, written.path)
            else:
                written.path.unlink()
        shown.done()
        return io.NodeOutput(_or_why_not(images), InputImpl.VideoFromFile(str(written.path)))

    @classmethod
    def fingerprint_inputs(cls, **given: Any) -> float | None:
        """Always another value for a camera. Links are given by name only."""
        # A new object each time: ComfyUI's cache compares lists, in which a NaN object equals
        # itself.
        return None if given.keys() & {"frames", "video"} else float("nan")


def _source(inputs: LiveVideo.Inputs, node: str | None) -> Source:
    """The connected frames or video, or the camera of the page that shows this node."""
    from ..fusion.live import sources  # noqa: PLC0415

    rate = Fraction(inputs.fps).limit_denominator(1000)
    if inputs.frames is not None and inputs.video is not None:
        raise errors.WrongInput(BOTH)
    if inputs.frames is not None:
        return sources.of_images(inputs.frames, rate)
    if inputs.video is not None:
        return sources.of_video(inputs.video)
    return sources.Source(camera.Camera(node, inputs.width, inputs.height, float(rate)).frames(), None, None)


def _is_linked(hidden: Any, output: int) -> bool:
    """Whether a node of this graph takes this output."""
    link = [hidden.unique_id, output]
    return any(link in node.get("inputs", {}).values() for node in (hidden.prompt or {}).values())


def _or_why_not(images: Any) -> Any:
    """The IMAGE; or a blocker, which stops a node that takes it, and says why."""
    from comfy_execution.graph_utils import ExecutionBlocker  # noqa: PLC0415

    image = images.image()
    return ExecutionBlocker(images.fault) if image is None else image


def _temp_file() -> Path:
    """A new file in ComfyUI's folder for temporary files."""
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(".mp4", "fusestream-live-", folder)
    os.close(handle)
    return Path(path)


# ---------------------------------------------------------------------------------------------------- while it runs


class Shown:
    """The page's view of one run: the bar, a picture now and then, and frames a second.

    total: number of frames there will be; None: not known. node: shows the text.
    """

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
        # A camera's length is not known: the bar is always about to end.
        self._bar.update_absolute(self.frames, max(self._total or 0, self.frames + (self._total is None)), picture)
        if now - self._text_at >= TEXT_EVERY:
            self._say(f"{(self.frames - self._told) / (now - self._text_at):.1f} frames a second, {self.frames} so far")
            self._text_at, self._told = now, self.frames

    def done(self) -> None:
        """Show the whole run in a line."""
        seconds = max(self._clock() - self._began, 1e-9)
        self._say(f"{self.frames} frames in {seconds:.1f} s: {self.frames / seconds:.1f} a second")

    def _say(self, text: str) -> None:
        write_on(self._node, text)


def preview(frame: Tensor) -> tuple[str, Any, int]:
    """A picture as stock's bar takes it."""
    import latent_preview  # noqa: PLC0415 - ComfyUI's own
    from PIL import Image  # noqa: PLC0415

    pixels = (frame * 255).clamp(0, 255).byte().numpy()
    return "JPEG", Image.fromarray(pixels), latent_preview.MAX_PREVIEW_RESOLUTION
