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
from . import live, pictures, wan
from .live import CLIP as CLIP
from .parts import PICTURE as PICTURE


@dataclass(frozen=True)
class Example:
    """A workflow by a short name, with the two lines of its picture in the template browser. There it stands under its title, the
    name of its file, and can be found by that. asks: what its app mode shows, as in `Graph`."""

    name: str
    headline: str
    subline: str
    build: Callable[[Graph], None]
    is_picture: bool = False
    samples: bool = True  # whether a diffusion model does the work

    @property
    def title(self) -> str:
        """Numbered, since the browser goes by the letters: what to begin with comes first."""
        return f"FuseStream {EXAMPLES.index(self) + 1:02} - {self.headline} ({self.subline})"

    is_live: bool = False
    asks: tuple[tuple[str, str], ...] = ()

    def graph(self) -> Graph:
        graph = Graph(self.name, asks=self.asks)
        self.build(graph)
        return graph


PROMPT = ("What to show", "text")
A_VIDEO = (PROMPT, *(("Size and length", name) for name in ("width", "height", "length")))
A_PICTURE = (PROMPT, ("Width", "value"), ("Height", "value"))

# In the order in which somebody gets to know them.
EXAMPLES = (
    Example("wan2.1_t2v_1.3B", "Start here, text to video", "Wan 2.1, 1.3B", wan.text_to_video_small, asks=A_VIDEO),
    Example(
        "flux2_klein_4B", "Text to picture", "Flux.2 klein 4B, 4 steps", pictures.klein, is_picture=True, asks=A_PICTURE
    ),
    Example("wan2.1_t2v_14B_4_steps", "Text to video", "Wan 2.1, 14B, 4 steps", wan.four_steps, asks=A_VIDEO),
    Example("wan2.2_i2v_14B_4_steps", "Image to video", "Wan 2.2, 14B, 4 steps", wan.image_to_video_pair),
    Example("wan2.2_flf2v_14B_4_steps", "First and last frame", "Wan 2.2, 14B, 4 steps", wan.first_and_last_pair),
    Example("wan2.1_t2v_14B_4_steps_gguf", "Text to video, GGUF", "Wan 2.1, 14B, 4 steps", wan.four_steps_gguf),
    Example(
        "wan2.2_i2v_14B_4_steps_gguf", "Image to video, GGUF", "Wan 2.2, 14B, 4 steps", wan.image_to_video_pair_gguf
    ),
    Example("wan2.2_ti2v_5B", "Text or image to video", "Wan 2.2, 5B", wan.five),
    Example("wan2.1_t2v_14B", "Text to video", "Wan 2.1, 14B", wan.text_to_video),
    Example("wan2.2_t2v_14B", "Text to video", "Wan 2.2, the 14B pair", wan.pair),
    Example("wan2.1_i2v_14B", "Image to video", "Wan 2.1, 14B", wan.image_to_video),
    Example("wan2.1_flf2v_14B", "First and last frame", "Wan 2.1, 14B", wan.first_and_last_frame),
    Example("wan2.1_vace_1.3B", "Reference to video", "Wan 2.1 VACE, 1.3B", wan.vace),
    Example("caption_and_animate", "Caption and animate", "Qwen3-VL, Wan 2.1, 14B", wan.caption_and_animate),
    Example("flux2_klein_edit", "Change a picture", "Flux.2 klein 4B, 4 steps", pictures.klein_edit, is_picture=True),
    Example("z_image_turbo", "Text to picture", "Z-Image Turbo, 8 steps", pictures.z_image, is_picture=True),
    Example(
        "style_transfer",
        "Another look",
        "one pass of a small net",
        pictures.style_transfer,
        is_picture=True,
        samples=False,
    ),
    Example("live_video_sd_turbo", "Live video", "SD-Turbo, 1 step a frame", live.live_video, is_live=True),
    Example("live_camera", "Live camera", "SD-Turbo, 1 step a frame", live.live_camera, is_live=True),
    Example("with_and_without", "A and B", "with and without our kernels", wan.side_by_side),
)
