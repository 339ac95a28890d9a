"""The Live Video node: frames in, each made anew by a few steps of an image model, frames out as they are made."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.latest import InputImpl, io

from ..fusion.base import errors
from ..fusion.live.settings import SAMPLERS, SCHEDULERS, Settings
from . import camera, notices
from .live_shown import Shown
from .loaders import CATEGORY

if TYPE_CHECKING:
    from ..fusion.live.sources import Source

log = logging.getLogger("fusestream.live")

IMAGE, VIDEO = 0, 1  # the outputs
BOTH = "Connect frames or video, not both: one node makes one video."


class LiveVideo(io.ComfyNode):
    """A video through any image model, frame by frame."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FuseStreamLiveVideo",
            display_name="FuseStream Live Video",
            category=CATEGORY,
            description="Makes each frame of a video anew by one to four steps of a turbo or LCM model, as VAE Encode, KSampler "
            "and VAE Decode would one by one, but without loading, preparing and waiting between frames. Frames are read, made and "
            "written one after the other: memory does not grow with the video.",
            search_aliases=["real time", "video to video", "webcam", "stream diffusion", "sd turbo", "fusestream"],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            inputs=[
                io.Model.Input(
                    "model", tooltip="Of pictures, such as SD-Turbo, an LCM or SD 1.5 with an LCM LoRA. Any loader's."
                ),
                io.Conditioning.Input("positive", tooltip="What the frames shall show."),
                io.Conditioning.Input("negative", tooltip="What they shall not show. Without effect where cfg is 1."),
                io.Vae.Input("vae", tooltip="The model's. TAESD is the fastest; its pictures are a little softer."),
                io.Image.Input(
                    "frames",
                    optional=True,
                    tooltip="A short clip as pictures. Or connect video; without both it is the camera of your browser.",
                ),
                io.Video.Input(
                    "video",
                    optional=True,
                    tooltip="Read from its file frame by frame, however long it is. Its sound is not carried over.",
                ),
                io.Int.Input(
                    "steps", default=1, min=1, max=50, tooltip="Of each frame: 1 for SD-Turbo, up to 4 for LCM models."
                ),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="Guidance. Turbo and LCM models want 1, and are twice as fast with it.",
                ),
                io.Float.Input(
                    "strength",
                    default=0.5,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip="How much of a frame is made anew, as KSampler's denoise. 1: all of it.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=False,
                    tooltip="Of the noise. All frames have the same, so what does not move stays as it is.",
                ),
                io.Combo.Input(
                    "sampler", options=list(SAMPLERS), default="euler", tooltip="lcm for LCM models, euler for others."
                ),
                io.Combo.Input(
                    "scheduler",
                    options=list(SCHEDULERS),
                    default="simple",
                    tooltip="As in KSampler; sd_turbo is ComfyUI's SDTurboScheduler, for SD-Turbo and SDXL-Turbo.",
                ),
                io.Float.Input(
                    "blend",
                    default=0.0,
                    min=0.0,
                    max=0.95,
                    step=0.05,
                    optional=True,
                    tooltip="How much of the frame before is blended in where nothing changes: less flicker. 0: nothing.",
                ),
                io.Float.Input(
                    "tolerance",
                    default=0.1,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="How far a place may change between two frames, from 0 to 1, before nothing is blended there.",
                ),
                io.Float.Input(
                    "skip",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.001,
                    optional=True,
                    tooltip="A frame that differs less than this from the last one that was made, on average, is not made: that "
                    "one is shown again. 0.005 suits a camera that stands still. 0: every frame is made.",
                ),
                io.Int.Input(
                    "batch",
                    default=1,
                    min=1,
                    max=64,
                    optional=True,
                    tooltip="Frames that pass through the model together: more a second where the card has room, each later.",
                ),
                io.Int.Input(
                    "width",
                    default=512,
                    min=0,
                    max=4096,
                    step=8,
                    optional=True,
                    tooltip="Frames are scaled to it, and what stands over is cut off. 0: as they come.",
                ),
                io.Int.Input(
                    "height", default=512, min=0, max=4096, step=8, optional=True, tooltip="As width. 0: as they come."
                ),
                io.Float.Input(
                    "fps",
                    default=24.0,
                    min=1.0,
                    max=240.0,
                    step=1.0,
                    optional=True,
                    tooltip="Frames a second of the new video where frames is connected, and the most that are taken of a camera. "
                    "A video keeps its own.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    tooltip="All new frames as one batch, up to 4 GiB of them: 1365 of 512x512. Longer ones: VIDEO."
                ),
                io.Video.Output(tooltip="The new frames as a video, encoded as they are made. For Save Video."),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: Any,
        negative: Any,
        vae: Any,
        steps: int,
        cfg: float,
        strength: float,
        seed: int,
        sampler: Any,
        scheduler: str,
        frames: Any = None,
        video: Any = None,
        blend: float = 0.0,
        tolerance: float = 0.1,
        skip: float = 0.0,
        batch: int = 1,
        width: int = 512,
        height: int = 512,
        fps: float = 24.0,
    ) -> io.NodeOutput:
        from ..fusion.live import engine, kept  # noqa: PLC0415 - the server starts without it
        from ..fusion.live.video import VideoFile  # noqa: PLC0415

        notices.attach()
        rate = Fraction(fps).limit_denominator(1000)
        source = _source(frames, video, rate) or _of_camera(cls.hidden.unique_id, width, height, rate)
        images = kept.Kept()
        if source.count and source.height and source.width:
            images.fault = kept.too_large(source.count, height or source.height, width or source.width)
            if images.fault is not None and _is_linked(cls.hidden, IMAGE):
                raise errors.WrongInput(images.fault)
        settings = Settings(
            steps, cfg, strength, sampler, scheduler, seed, blend, tolerance, batch, skip, width, height
        )
        written = VideoFile(_temp_file(), source.rate)
        shown = Shown(source.count, cls.hidden.unique_id)

        began = time.monotonic()

        def deliver(frame: Any) -> None:
            images.add(frame)
            written.add(frame, None if source.rate else time.monotonic() - began)
            shown.add(frame)

        try:
            engine.run(model, positive, negative, vae, source.frames, settings, deliver)
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
        """What a camera shows is never what it showed before. Links are told by name alone."""
        # A new object each time: ComfyUI's cache compares lists, in which even this equals itself.
        return None if given.keys() & {"frames", "video"} else float("nan")


def _source(frames: Any, video: Any, rate: Fraction) -> Source | None:
    """None: nothing is connected."""
    from ..fusion.live import sources  # noqa: PLC0415

    if frames is not None and video is not None:
        raise errors.WrongInput(BOTH)
    if frames is not None:
        return sources.of_images(frames, rate)
    return None if video is None else sources.of_video(video)


def _of_camera(node: str | None, width: int, height: int, rate: Fraction) -> Source:
    from ..fusion.live import sources  # noqa: PLC0415

    return sources.Source(camera.Camera(node, width, height, float(rate)).frames(), None, None)


def _is_linked(hidden: Any, output: int) -> bool:
    """Whether a node of this graph takes it."""
    link = [hidden.unique_id, output]
    return any(link in node.get("inputs", {}).values() for node in (hidden.prompt or {}).values())


def _or_why_not(images: Any) -> Any:
    """The IMAGE; or what stops a node that takes it, which need not be there, and says why."""
    from comfy_execution.graph_utils import ExecutionBlocker  # noqa: PLC0415

    image = images.image()
    return ExecutionBlocker(images.fault) if image is None else image


def _temp_file() -> Path:
    """In ComfyUI's folder for what lasts until it ends."""
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(".mp4", "fusestream-live-", folder)
    os.close(handle)
    return Path(path)
