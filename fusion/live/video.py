"""Writes new frames into a video file as they come, in a thread; only a few are held at a time."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from comfy_api.latest._input_impl import video_types
from torch import Tensor

# seconds between distinct times of frames; the rate that encoders are told
TICK, NOMINAL = Fraction(1, 1000), 30
BEHIND = 8  # frames that may wait for the encoder before the run waits for it
CODEC, PIXELS, COLOURS = "h264", "yuv420p", "sRGB"  # as stock saves a VIDEO
# Stock's function that marks a frame or a file with the colours its numbers stand for; None: this
# ComfyUI marks nothing.
TAGS = getattr(video_types, "set_video_color_properties", None)


class NotWritten(OSError):
    """The video's file could not be written."""

    __module__ = "fusestream"


class VideoFile:
    """Frames that all have the size of the first. `close` ends the file, also after an error;
    frames added before can then be played."""

    def __init__(self, path: Path, rate: Fraction | None) -> None:
        """rate: frames a second; None: each frame comes with its time."""
        self.path, self._rate = path, rate
        self.frames = 0
        self._writer = ThreadPoolExecutor(1, "fusestream-video")
        self._pending: deque[Future[None]] = deque()
        self._container: Any = None
        self._stream: Any = None
        self._began: float | None = None
        self._tick = -1  # of the last frame that came with its time

    def add(self, frame: Tensor, at: float | None = None) -> None:
        """frame: [h, w, 3] floats on the host, which must not change any more. at: seconds since
        any moment."""
        self._pending.append(self._writer.submit(self._encode, frame, at))
        self.frames += 1
        self._settle(BEHIND)

    def close(self) -> None:
        """Wait until all is written."""
        try:
            self._settle(0)
            if self._container is not None:
                self._writer.submit(self._end).result()
        except av.FFmpegError as error:
            raise self._fault(error) from None
        finally:
            self._writer.shutdown(cancel_futures=True)
            if self._container is not None:
                self._container.close()

    def _settle(self, most: int) -> None:
        try:
            while len(self._pending) > most:
                self._pending.popleft().result()
        except av.FFmpegError as error:
            raise self._fault(error) from None

    def _fault(self, error: av.FFmpegError) -> NotWritten:
        return NotWritten(
            f"{self.path.name} could not be written: {error.strerror}. See whether ComfyUI's temp folder can be written to and has "
            "room, or choose an even width and height."
        )

    def _encode(self, frame: Tensor, at: float | None) -> None:
        if self._container is None:
            self._begin(*frame.shape[:2])
        pixels = (frame * 255).clamp(0, 255).byte().numpy()
        picture = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        if TAGS is None:
            picture = picture.reformat(format=PIXELS)
        else:  # from 0.33 on stock marks the colours, and uses others than before
            picture = picture.reformat(format=PIXELS, dst_colorspace=video_types.BT709_NCL)
            TAGS(picture, COLOURS)
        if at is not None:
            self._began = at if self._began is None else self._began
            self._tick = max(self._tick + 1, round((at - self._began) / TICK))
            picture.pts, picture.time_base = self._tick, TICK
        self._container.mux(self._stream.encode(picture))

    def _begin(self, height: int, width: int) -> None:
        self._container = av.open(str(self.path), mode="w", options={"movflags": "use_metadata_tags"})
        self._stream = self._container.add_stream(CODEC, rate=self._rate or NOMINAL)
        if self._rate is None:
            self._stream.codec_context.time_base = TICK
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, PIXELS
        if TAGS is not None:
            TAGS(self._stream.codec_context, COLOURS)

    def _end(self) -> None:
        self._container.mux(self._stream.encode(None))
