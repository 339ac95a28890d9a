"""The works of the tables: a model at a size, and its usual number of steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..end_to_end.bounds import QWEN3, READ, WAN, Language, Sizes
from ..end_to_end.pictures import KLEIN, UNETS, Z_IMAGE, Unet
from .families import Flux1, flux1, flux2, qwen3, wan, z_image
from .load import Load
from .speeds import Kind
from .unets import taesd, unet

WAN5 = Sizes(3072, 14336, 30)
# SD-Turbo's and SD 2.1's: SD 1.5's with another prompt, and heads of 64.
TURBO: Unet = replace(UNETS["sd15"], text=1024, linear=True)
# Name, size and tokens. LTX-2's prompts are padded to 1024, which ComfyUI computes: four times its figure.
TEXTS = (
    ("Qwen3-4B reads 512 tokens for klein", replace(QWEN3, layers=READ["flux2"]), 512),
    ("Gemma 3 12B reads 256 tokens for LTX-2", Language(3840, 15360, 16, 8, 256, 48, 262208), 256),
    ("Qwen2.5-VL 7B reads 256 tokens for Qwen-Image", Language(3584, 18944, 28, 4, 128, 28, 152064), 256),
    ("Qwen3-VL 32B reads 256 tokens for MiniMax H3", Language(5120, 25600, 64, 8, 128, 50, 151936), 256),
    ("Mistral Small 3 24B reads 256 tokens for Flux.2 dev", Language(5120, 32768, 32, 8, 128, 30, 131072), 256),
)
LIVE = "Live video 512x512, SD-Turbo in 1 step between TAESD"
LATENT = 8  # pixels of a side per latent pixel


@dataclass(frozen=True)
class Work:
    """prompts: of a step; forwards: in how many calls they are computed. is_live: told in frames a second."""

    name: str
    kind: Kind
    load: Load
    steps: int
    prompts: int = 1
    forwards: int = 1
    is_live: bool = False

    @property
    def title(self) -> str:
        """For a heading."""
        if self.is_live:
            return f"{self.name}, frames a second"
        if self.kind == "text":
            return f"{self.name}, seconds"
        guided = " with guidance" if self.prompts == 2 else ""
        return f"{self.name}: seconds a step{guided}, and all {self.steps} steps"


def _video(name: str, size: Sizes, tokens: int, steps: int, prompts: int = 2) -> Work:
    """Each prompt is a call of its own: two at once would not fit beside the weights."""
    return Work(name, "video", wan(size, tokens), steps, prompts, prompts)


def _tokens(height: int, width: int, frames: int, side: int = 2 * LATENT) -> int:
    """side: pixels of a token."""
    return ((frames - 1) // 4 + 1) * (height // side) * (width // side)


def _pixels(side: int, per: int = LATENT) -> int:
    """Of a square picture's latent."""
    return (side // per) ** 2


def works() -> list[Work]:
    usual, large = _tokens(480, 832, 81), _tokens(720, 1280, 81)
    return [
        _video("Wan 1.3B 480x832x33", WAN["wan13"], _tokens(480, 832, 33), 30),
        _video("Wan 1.3B 480x832x81", WAN["wan13"], usual, 30),
        _video("Wan 14B 480x832x81", WAN["wan14"], usual, 20),
        _video("Wan 14B 720x1280x81", WAN["wan14"], large, 20),
        _video("Wan 14B 480x832x81 in 4 steps", WAN["wan14"], usual, 4, prompts=1),
        _video("Wan 2.2 5B 704x1280x121", WAN5, _tokens(704, 1280, 121, side=32), 20),
        Work("Flux.2 klein 4B 1024x1024", "picture", flux2(KLEIN["klein4"], _pixels(1024, 16)), 4),
        Work("Flux.2 klein 9B 1024x1024", "picture", flux2(KLEIN["klein9"], _pixels(1024, 16)), 4),
        Work("Flux.1 dev 1024x1024", "picture", flux1(Flux1(), _pixels(1024)), 20),
        Work("Z-Image Turbo 1024x1024", "picture", z_image(Z_IMAGE, _pixels(1024)), 8),
        Work("SD 1.5 512x512", "u-net", unet(UNETS["sd15"], _pixels(512), 2), 20, prompts=2),
        Work("SDXL 1024x1024", "u-net", unet(UNETS["sdxl"], _pixels(1024), 2), 20, prompts=2),
        Work(LIVE, "u-net", unet(TURBO, _pixels(512)) + taesd(512 * 512), 1, is_live=True),
        *(Work(name, "text", qwen3(size, tokens), 1) for name, size, tokens in TEXTS),
    ]
