"""The example workflows, one function each, in the order of the template browser.

parts.py     what they share: loaders, prompts, sampling, saving, notes
wan.py       videos from texts, pictures and frames
pictures.py  pictures
live.py      a video or a camera, frame by frame
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..graph import Graph
from ..listed import Listed
from . import live, pictures, wan


@dataclass(frozen=True)
class Example:
    """A workflow by a short name, with what the template browser says of it. asks: what its app mode shows, as in `Graph`."""

    name: str
    listed: Listed
    build: Callable[[Graph], None]
    is_picture: bool = False
    samples: bool = True  # whether a diffusion model does the work
    is_live: bool = False
    asks: tuple[tuple[str, str], ...] = ()

    @property
    def gigabytes(self) -> float:
        return sum(file.gigabytes for file in self.graph().files())

    def graph(self) -> Graph:
        graph = Graph(self.name, asks=self.asks)
        self.build(graph)
        return graph


PROMPT = ("What to show", "text")
A_VIDEO = (PROMPT, *(("Size and length", name) for name in ("width", "height", "length")))
A_PICTURE = (PROMPT, ("Width", "value"), ("Height", "value"))

WAN21, WAN22 = ("Wan2.1", "Wan"), ("Wan2.2", "Wan")
KLEIN, Z_IMAGE, SD_TURBO = ("Flux.2 Klein", "Flux"), ("Z-Image-Turbo",), ("SD-Turbo",)
T2V, I2V, FLF2V, T2I, EDIT = "Text to Video", "Image to Video", "FLF2V", "Text to Image", "Image Edit"

# In the order in which somebody gets to know them.
EXAMPLES = (
    Example(
        "wan2.1_t2v_1.3B",
        Listed("Begin here, Wan 2.1 1.3B", "text to video", "fp16", T2V, WAN21),
        wan.text_to_video_small,
        asks=A_VIDEO,
    ),
    Example(
        "flux2_klein_4B",
        Listed("Flux.2 klein in 4 steps", "text to picture", "bf16", T2I, KLEIN),
        pictures.klein,
        is_picture=True,
        asks=A_PICTURE,
    ),
    Example(
        "wan2.1_t2v_14B_4_steps",
        Listed("Wan 2.1 14B in 4 steps", "text to video", "fp8", T2V, WAN21),
        wan.four_steps,
        asks=A_VIDEO,
    ),
    Example(
        "wan2.2_i2v_14B_4_steps",
        Listed("Wan 2.2 14B in 4 steps", "image to video", "fp8", I2V, WAN22),
        wan.image_to_video_pair,
    ),
    Example(
        "wan2.2_flf2v_14B_4_steps",
        Listed("Wan 2.2 first+last frame", "video between two pictures in 4 steps", "fp8", FLF2V, WAN22),
        wan.first_and_last_pair,
    ),
    Example(
        "wan2.1_t2v_14B_4_steps_gguf",
        Listed("Wan 2.1 14B GGUF", "text to video in 4 steps", "GGUF", T2V, WAN21),
        wan.four_steps_gguf,
    ),
    Example(
        "wan2.2_i2v_14B_4_steps_gguf",
        Listed("Wan 2.2 14B GGUF", "image to video in 4 steps", "GGUF", I2V, WAN22),
        wan.image_to_video_pair_gguf,
    ),
    Example(
        "wan2.2_ti2v_5B",
        Listed("Wan 2.2 5B at 24 fps", "text or image to video", "fp16", T2V, WAN22),
        wan.five,
    ),
    Example(
        "wan2.1_t2v_14B",
        Listed("Wan 2.1 14B in 20 steps", "text to video", "fp8", T2V, WAN21),
        wan.text_to_video,
    ),
    Example(
        "wan2.2_t2v_14B",
        Listed("Wan 2.2 14B in 20 steps", "text to video", "fp8", T2V, WAN22),
        wan.pair,
    ),
    Example(
        "wan2.1_i2v_14B",
        Listed("Wan 2.1 image to video", "14B, image to video in 20 steps", "fp8", I2V, WAN21),
        wan.image_to_video,
    ),
    Example(
        "wan2.1_flf2v_14B",
        Listed("Wan 2.1 first+last frame", "video between two pictures", "fp8", FLF2V, WAN21),
        wan.first_and_last_frame,
    ),
    Example(
        "wan2.1_vace_1.3B",
        Listed("Wan 2.1 VACE reference", "reference or control video to video", "fp16", "Reference to Video", WAN21),
        wan.vace,
    ),
    Example(
        "caption_and_animate",
        Listed("Caption and animate, Wan", "image to video, with a text by Qwen3-VL", "fp8", I2V, (*WAN21, "Qwen")),
        wan.caption_and_animate,
    ),
    Example(
        "flux2_klein_edit",
        Listed("Flux.2 klein edit", "change a picture in 4 steps", "bf16", EDIT, KLEIN),
        pictures.klein_edit,
        is_picture=True,
    ),
    Example(
        "z_image_turbo",
        Listed("Z-Image Turbo, 8 steps", "text to picture", "bf16", T2I, Z_IMAGE),
        pictures.z_image,
        is_picture=True,
    ),
    Example(
        "style_transfer",
        Listed("Ink and wash, tiny net", "another look for a picture, in one pass", "fp16", "Style Transfer"),
        pictures.style_transfer,
        is_picture=True,
        samples=False,
    ),
    Example(
        "live_video_sd_turbo",
        Listed("Live video, SD-Turbo", "video to video, 1 step a frame", "fp16", "Video to Video", SD_TURBO),
        live.live_video,
        is_live=True,
    ),
    Example(
        "live_camera",
        Listed("Live camera, SD-Turbo", "camera to video, 1 step a frame", "fp16", "Video to Video", SD_TURBO),
        live.live_camera,
        is_live=True,
    ),
    Example(
        "with_and_without",
        Listed("Compare kernels, Wan 2.1", "the same video with and without them", "fp16", T2V, WAN21),
        wan.side_by_side,
    ),
)
