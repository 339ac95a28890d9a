"""Sources of frames, one by one: an IMAGE batch, or a VIDEO that is decoded on demand.

A source holds only a few frames, however long a video is. Threads read them ahead of demand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import av
import av.filter
import numpy
import torch
from comfy_api.latest import InputImpl
from torch import Tensor

from ..base import notices
from ..base.errors import WrongInput

AHEAD = 6  # frames read ahead of demand
WORKERS = 2  # threads that make pixels of them
ROW = 32  # pixels
BYTES = (
    "yuvj420p",
    "yuvj422p",
    "yuvj444p",
    "rgb24",
    "rgba",
    "pal8",
)  # formats that stock reads as bytes; it reads others as floats
_END: Any = object()
Frame = TypeVar("Frame")


@dataclass
class Source:
    """
    frames         [h, w, 3] on the host, bytes or floats from 0 to 1; None: no frame yet
    count          approximate number of frames; None: not known
    rate           frames a second; None: as they come
    height, width  of the first frame; None: not known
    """

    frames: Iterable[Tensor | None]
    count: int | None
    rate: Fraction | None
    height: int | None = None
    width: int | None = None

    def close(self) -> None:
        """Tell the source that no more frames are wanted."""
        close = getattr(self.frames, "close", None)
        if close is not None:
            close()


def of_images(images: Tensor, rate: Fraction) -> Source:
    """Frames of stock's IMAGE [n, h, w, c]: the first three channels."""
    count, height, width, _ = images.shape
    return Source((image[..., :3] for image in images), count, rate, height, width)


def of_video(video: Any) -> Source:
    """Frames of stock's VIDEO, from memory if it was made of pictures, else from its file."""
    if isinstance(video, InputImpl.VideoFromComponents):
        parts = video.get_components()
        return of_images(parts.images, Fraction(parts.frame_rate))
    try:
        width, height = video.get_dimensions()
    except ValueError:
        raise WrongInput("The video has no frames, only sound or text. Load another one.") from None
    rate = Fraction(video.get_frame_rate())
    return Source(ahead(_decoded(video), _pixels), _count(video, rate), rate, height, width)


def _count(video: Any, rate: Fraction) -> int | None:
    """The number of frames, from the file's header or reckoned from the length, because counting
    would decode them all."""
    if video.get_active_trim_window() == (0, 0):
        with av.open(video.get_stream_source(), mode="r") as container:
            told = container.streams.video[0].frames
            if told or container.duration is None:
                return told or None
    return round(rate * Fraction(video.get_duration()))


def _decoded(video: Any) -> Generator[Any]:
    """PyAV's frames of the part that a VIDEO was trimmed to."""
    start, duration = video.get_active_trim_window()
    with av.open(video.get_stream_source(), mode="r") as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        base = stream.time_base or Fraction(1)
        first, last = int(start / base), int((start + duration) / base)
        if first:
            container.seek(first, stream=stream)
        for packet in container.demux(stream):
            for frame in _frames_of(packet):
                at = frame.pts or 0
                if duration and at >= last:
                    return
                if at >= first:
                    yield frame


def _frames_of(packet: Any) -> list[Any]:
    """A packet's frames, without damaged ones, as stock does; but warns of them."""
    try:
        frames: list[Any] = packet.decode()
    except av.error.InvalidDataError:
        notices.warn("The video is damaged in places: frames are missing there.")
        return []
    return frames


def _pixels(frame: Any) -> Tensor:
    """PyAV's frame as a picture [h, w, 3], the right way up, converted as stock does."""
    if frame.format.name in BYTES:
        pixels = frame.to_ndarray(format="rgb24")
    else:
        pixels = _filled(frame).to_ndarray(format="gbrpf32le")[: frame.height, : frame.width]
    if frame.rotation:
        pixels = numpy.rot90(pixels, k=round(frame.rotation / 90))
    return torch.from_numpy(numpy.ascontiguousarray(pixels))


def _filled(frame: Any) -> Any:
    """Pad a frame so that FFmpeg does not read beyond its rows, which gives other results each
    time. The padding repeats the border, so that the pixels beside it stay as they are."""
    if frame.width % ROW == 0:
        return frame
    width, height = (-(-side // ROW) * ROW for side in (frame.width, frame.height))
    graph = av.filter.Graph()
    parts = (
        graph.add_buffer(width=frame.width, height=frame.height, format=frame.format.name, time_base=frame.time_base),
        graph.add("pad", f"{width}:{height}:0:0"),
        graph.add("fillborders", f"right={width - frame.width}:bottom={height - frame.height}:mode=smear"),
        graph.add("buffersink"),
    )
    graph.link_nodes(*parts).configure()
    graph.push(frame)
    return graph.pull()


def ahead(frames: Generator[Frame], work: Callable[[Frame], Tensor], most: int = AHEAD) -> Generator[Tensor]:
    """Yield `work` of each frame, computed a few frames ahead: one thread reads, others work."""
    reader, workers = ThreadPoolExecutor(1, "fusestream-frames"), ThreadPoolExecutor(WORKERS, "fusestream-pixels")

    def worked(read: Future[Any]) -> Any:
        frame = read.result()
        return _END if frame is _END else work(frame)

    def begin() -> Future[Any]:
        return workers.submit(worked, reader.submit(next, frames, _END))

    try:
        pending = deque(begin() for _ in range(most))
        while (made := pending.popleft().result()) is not _END:
            pending.append(begin())
            yield made
    finally:
        reader.shutdown(cancel_futures=True)
        workers.shutdown(cancel_futures=True)
        frames.close()
