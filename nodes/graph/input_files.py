"""Sizes of the pictures and videos that a graph loads from ComfyUI's folders, from the files' headers.

A picture is told as a tensor without pixels: on the meta device, [batch, height, width, channels].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import folder_paths
from PIL import Image

from .prompt import Unknown

TURNS = (5, 6, 7, 8)  # EXIF orientations that exchange height and width
ORIENTATION = 0x0112


class Clip(NamedTuple):
    """A video by its header. rate: frames in a second."""

    frames: int
    height: int
    width: int
    rate: float


def picture(batch: int, height: int, width: int) -> Any:
    import torch  # noqa: PLC0415 - the server starts without it

    return torch.empty((batch, height, width, 3), device="meta")


def image(node: str, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What stock's Load Image gives. Its mask has another size where the picture has none."""
    path = _path(node, inputs.get("image"))
    try:
        with Image.open(path) as opened:
            width, height = opened.size
            # Not a PNG's own way, which unpacks all pixels to see whether more is said behind them.
            if Image.Image.getexif(opened).get(ORIENTATION) in TURNS:
                width, height = height, width
            return (picture(getattr(opened, "n_frames", 1), height, width), None)
    except Exception:  # a bomb is refused, and each format has errors of its own
        raise Unknown("computed", node, what="") from None


def video(node: str, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What stock's Load Video gives, as a `Clip`."""
    import av  # noqa: PLC0415 - the server starts without it

    path = _path(node, inputs.get("file"))
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            if stream.frames > 0 and stream.average_rate:  # else only decoding tells
                return (Clip(stream.frames, stream.height, stream.width, float(stream.average_rate)),)
    except (OSError, IndexError, ValueError, av.error.FFmpegError):
        pass
    raise Unknown("computed", node, what="")


def _path(node: str, name: Any) -> Path:
    """The file in one of ComfyUI's folders for pictures. Raises `Unknown`."""
    if not isinstance(name, str) or not name:
        raise Unknown("noValue", node, what="file")
    homes = (folder_paths.get_input_directory(), folder_paths.get_output_directory(), folder_paths.get_temp_directory())
    try:
        path = _plain(folder_paths.get_annotated_filepath(name))
    except ValueError:  # newer ComfyUI's own word for a path that leaves its folder
        path = None
    if path is None or not any(path.is_relative_to(_plain(home)) for home in homes) or not path.is_file():
        raise Unknown("noFile", node, file=name, folder="input")
    return path


def _plain(path: str) -> Path:
    """Without dots; links in ComfyUI's folders may lead elsewhere, and are not followed."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` follows links


READ: Mapping[str, Callable[[str, Mapping[str, Any]], tuple[Any, ...]]] = {"LoadImage": image, "LoadVideo": video}
