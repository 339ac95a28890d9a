"""A row of whole models: one piece of work, and how each side does it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from . import latents

Model = Literal[
    "wan13", "wan14", "vae", "vae22", "t5", "qwen3", "klein4", "klein9", "z_image", "qwen_image", "sd15", "sdxl", "flux2_vae",
    "flux_vae", "vl2", "vl4", "hunyuan_video_15", "ltx23", "minimax_h3", "krea2", "anima",
    "wan14_low", "qwen25_vl", "krea2_te", "gemma3", "ltx_projection", "h3_te", "ltx_vae", "h3_vae", "hunyuan15_vae",
    "clip_l", "clip_g", "sdxl_vae",
]  # fmt: skip
Work = Literal["sample", "call", "decode", "encode", "text", "video", "picture", "live", "write", "see"]
Through = Literal["TAESD", "the VAE"]
# Of each model its name in tables, and the tiny checkpoint that stands in for it where there is no card.
_MODELS: dict[Model, tuple[str, str]] = {
    "wan13": ("1.3B", "wan_t2v"),
    "wan14": ("14B", "wan_t2v"),
    "vae": ("VAE", "wan_vae"),
    "vae22": ("VAE 2.2", "wan22_vae"),
    "t5": ("UMT5-XXL", "umt5"),
    "qwen3": ("Qwen3-4B", "qwen3"),
    "klein4": ("klein 4B", "flux2"),
    "klein9": ("klein 9B", "flux2"),
    "z_image": ("Z-Image", "z_image"),
    "qwen_image": ("Qwen-Image", "qwen_image"),
    "sd15": ("SD 1.5", "sd15"),
    "sdxl": ("SDXL", "sdxl"),
    "flux2_vae": ("Flux.2 VAE", "flux2_vae"),
    "flux_vae": ("Flux VAE", "flux_vae"),
    "vl2": ("Qwen3-VL 2B", "qwen3_vl"),
    "vl4": ("Qwen3-VL 4B", "qwen3_vl"),
    "hunyuan_video_15": ("HunyuanVideo 1.5", "hunyuan_video_15"),
    "ltx23": ("LTX-2.3", "ltx23"),
    "minimax_h3": ("MiniMax H3", "minimax_h3_pruned"),
    "krea2": ("Krea 2", "krea2"),
    "anima": ("Anima", "anima"),
    "wan14_low": ("14B for low noise", "wan_t2v"),
    "qwen25_vl": ("Qwen2.5-VL 7B", "qwen25_vl"),
    "krea2_te": ("Krea 2's Qwen3-VL 4B", "krea2_te"),
    "gemma3": ("Gemma 3 12B", "gemma3"),
    "ltx_projection": ("LTX-2.3's projection", "ltx23_text_projection"),
    "h3_te": ("MiniMax H3's Qwen3-VL 32B", "minimax_h3_te"),
    "ltx_vae": ("LTX-2.3 VAE", "ltx_vae"),
    "h3_vae": ("MiniMax H3 VAE", "minimax_video_vae"),
    "hunyuan15_vae": ("HunyuanVideo 1.5 VAE", "hunyuan15_vae"),
    "clip_l": ("CLIP-L", "clip_l"),
    "clip_g": ("CLIP-G", "clip_g"),
    "sdxl_vae": ("SDXL VAE", "sd_vae"),
}
TITLES, TINY = ({model: told[i] for model, told in _MODELS.items()} for i in range(2))
# Models whose steps have two prompts; the others were distilled to one.
GUIDED: tuple[Model, ...] = ("wan13", "wan14", "sd15", "sdxl", "qwen_image", "hunyuan_video_15", "anima")
VAES: tuple[Model, ...] = (
    *("vae", "vae22", "flux2_vae", "flux_vae", "sdxl_vae", "ltx_vae", "h3_vae", "hunyuan15_vae"),
)
WHOLE_WORKS: tuple[Work, ...] = ("video", "picture")  # from a prompt to its end
# Files that make one text encoder with another one.
JOINED: dict[Model, tuple[tuple[Model, str], ...]] = {
    "gemma3": (("ltx_projection", "fp16"),),
    "clip_l": (("clip_g", "fp16"),),
}
TOLD: tuple[Work, ...] = ("call", "live", "write", "see")  # what their model is not known for
SIZES: dict[Work, str] = {"text": "512 tokens", "write": "a token"}  # of work that has no pixels
WINDOWS_BUS = 12e9  # bytes a second, as a PCIe 3 card has it
SAGE = "--use-sage-attention"  # of ComfyUI


@dataclass(frozen=True)
class Whole:
    """What is around a model in work from a prompt to its end.

    encoder  its text encoder, and in which storage
    decoder  its VAE
    kind     stock's type of the text encoder
    second   the model of the later half of the steps, where that is another one
    guided   whether a step has two prompts
    short    whether its prompts are a few words; else they are as long as people write them for models of today
    takes    how often it is done; the first is apart
    """

    encoder: tuple[Model, str]
    decoder: Model
    kind: str
    second: Model | None = None
    guided: bool = False
    short: bool = False
    takes: int = 2


# Files are those that ComfyUI's templates name, or fp8: of MiniMax H3's encoder this one, less what AWQ adds to it.
WHOLE: dict[Model, Whole] = {
    "wan13": Whole(("t5", "fp16"), "vae", "wan", guided=True, short=True),
    "klein4": Whole(("qwen3", "fp16"), "flux2_vae", "flux2", short=True, takes=4),
    "qwen_image": Whole(("qwen25_vl", "fp8_scaled"), "vae", "qwen_image", guided=True),
    "z_image": Whole(("qwen3", "fp16"), "flux_vae", "lumina2"),
    "sdxl": Whole(("clip_l", "fp16"), "sdxl_vae", "sdxl", guided=True, short=True, takes=4),
    "krea2": Whole(("krea2_te", "fp8_scaled"), "vae", "krea2"),
    "wan14": Whole(("t5", "fp8_scaled"), "vae", "wan", second="wan14_low"),
    "ltx23": Whole(("gemma3", "fp8_scaled"), "ltx_vae", "ltxv"),
    "minimax_h3": Whole(("h3_te", "nvfp4"), "h3_vae", "minimax"),
}
# Text encoders of tens of gigabytes lie beside the model that they are for.
OWNERS: dict[Model, Model] = {"gemma3": "ltx23", "h3_te": "minimax_h3", "qwen25_vl": "qwen_image"}


@dataclass(frozen=True)
class Side:
    """How one side does a row's work.

    comfy      ComfyUI's own command line, as its users would give it
    attention  torch's only kernel that ComfyUI may use: on Turing there is none but `efficient`
    isa, kernels, ops, precision   our KernelPolicy; `ops` are (op, mode) pairs
    vram_budget, backend           our pager: GiB, or -1 for what is free
    ram_budget GiB that may be pinned or registered
    windows    as Windows with a card in a PCIe 3 slot has it: windows.py
    pack       stock reads the file through city96's pack: gguf_pack.py
    compiled   stock's node TorchCompileModel stands behind the loader: peers.py
    tiled      stock's node VAE Decode (Tiled) decodes, with the tiles that it has by default
    ballast    whether all but `--free` GiB of the card are taken
    remembers  what kernels were chosen before in this machine's life; else it is a new one
    cards      a step's prompts are computed on so many, by stock's MultiGPU CFG Split
    families   whether ours compute the model by its family's code; else as any other model
    """

    comfy: tuple[str, ...] = ()
    attention: Literal["efficient", "cudnn"] | None = None
    isa: Literal["sm_75", "sm_80"] | None = None
    kernels: Literal["auto", "on", "off"] = "auto"
    ops: tuple[tuple[str, str], ...] = ()
    precision: Literal["auto", "precise", "fast", "turbo"] = "auto"
    vram_budget: float = -1.0
    backend: Literal["auto", "slots", "managed"] = "auto"
    ram_budget: float | None = None
    ballast: bool = True
    windows: bool = False
    pack: bool = False
    compiled: bool = False
    tiled: bool = False
    cards: int = 1
    families: bool = True
    remembers: bool = True


STOCK, OURS = Side(), Side()


@dataclass(frozen=True)
class Row:
    """One piece of work.

    steps    of the sampler, or how often the work is done: the first is apart, the median is over the rest
    asked    how many times faster than stock it has to be; `asked_first` is for the first time
    asked_peers  and how many times faster than each of its peers
    seconds  or how long it may take, where stock cannot do it; `first_seconds` is for the first time
    held     and how many GiB of RAM it may hold
    peak     and of the card, where that is less than is promised everywhere
    group    `--group` chooses by it
    note     what sets it apart from the plain row of the same size; part of its name
    over     the note of the row that it is held against instead
    storage  of the weights
    kind     stock's type of the text encoder, where it is not the first of its model's
    lora     rank of a LoRA on every matrix of the blocks; 0: none
    cold     the file is dropped from the page cache first
    free     GiB of the card that are left free, where that is not `--free`
    ram      GiB of RAM that are left free, where that is not all: ram.py
    through  of live video: what is between pixels and latents
    peers    who does it besides, by name
    """

    model: Model
    work: Work
    height: int = 0
    width: int = 0
    frames: int = 0
    steps: int = 3
    asked: float | None = None
    asked_first: float | None = None
    asked_peers: float | None = None
    seconds: float | None = None
    first_seconds: float | None = None
    held: float | None = None
    peak: float | None = None
    group: str = "table"
    note: str = ""
    over: str = ""
    storage: str = "fp16"
    kind: str = ""
    lora: int = 0
    cold: bool = False
    free: float | None = None
    ram: float | None = None
    through: Through | None = None
    stock: Side | None = field(default=STOCK)
    ours: Side | None = field(default=OURS)
    peers: tuple[tuple[str, Side], ...] = ()

    @property
    def name(self) -> str:
        """Names the row in the results; two rows of one name would replace each other."""
        return self._called(self.note)

    @property
    def plain(self) -> str | None:
        """The name of the row that it is held against."""
        return self._called(self.over) if self.note else None

    def _called(self, note: str) -> str:
        size = f"{self.height}x{self.width}" + (f"x{self.frames}" if self.frames else "")
        size = SIZES.get(self.work, size)
        size += f" through {self.through}" if self.through else ""
        told = self.model in VAES or self.is_whole or self.work in TOLD
        verb = f" {self.work}" if told else ""
        return ", ".join(part for part in (f"{TITLES[self.model]}{verb} {size}", note) if part)

    @property
    def files(self) -> tuple[tuple[Model, str], ...]:
        """Which models it needs, and in which storage."""
        own = (self.model, self.storage)
        if not self.is_whole:
            return own, *JOINED.get(self.model, ())
        around = self.around
        second = () if around.second is None else ((around.second, self.storage),)
        return around.encoder, *JOINED.get(around.encoder[0], ()), own, *second, (around.decoder, "fp16")

    @property
    def around(self) -> Whole:
        """What is around its model in whole work."""
        return WHOLE[self.model]

    @property
    def is_alone(self) -> bool:
        """Whether its files are so large that no other row's shall be written beside them."""
        return self.model in OWNERS or (self.is_whole and self.storage != "fp16")

    @property
    def is_cold(self) -> bool:
        """Whether its files come from a disk: its own, or where there is little RAM all of them."""
        return self.cold or self.ram is not None

    @property
    def is_promised(self) -> bool:
        """Whether something is asked of it."""
        asked = (self.asked, self.asked_first, self.asked_peers, self.seconds, self.first_seconds, self.held, self.peak)
        return any(one is not None for one in asked)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the work, from a prompt to what is looked at."""
        return self.work in WHOLE_WORKS

    @property
    def is_live(self) -> bool:
        """Whether frames are made anew one by one: `steps` of them, with a step of the model each."""
        return self.work == "live"

    @property
    def is_picture(self) -> bool:
        """Whether its own model makes pictures: no frames."""
        return self.model in latents.PICTURES

    @property
    def prompts(self) -> int:
        """Of a step."""
        if self.is_whole:
            return 1 + self.around.guided
        return 2 if self.model in GUIDED and not self.is_live else 1

    @property
    def sides(self) -> tuple[tuple[str, Side], ...]:
        """All sides by name, stock and ours first."""
        both = (("stock", self.stock), ("ours", self.ours))
        return (*((who, side) for who, side in both if side is not None), *self.peers)

    @property
    def needs_pack(self) -> bool:
        """Whether stock reads its file by city96's pack alone."""
        return self.stock is not None and self.stock.pack

    @property
    def latent(self) -> tuple[int, int, int]:
        """Frames, height and width of a video's latent."""
        video = self._video
        return video.pace.frames(self.frames), self.height // video.side, self.width // video.side

    @property
    def _video(self) -> latents.Latent:
        return latents.VIDEOS.get(self.model, latents.VIDEO)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Of one latent: channels, frames, height and width; a picture has no frames, or one where its VAE is of videos."""
        if not self.is_picture:
            return self._video.channels, *self.latent
        latent = latents.PICTURES[self.model]
        frames = (1,) if latent.is_of_videos else ()
        return latent.channels, *frames, self.height // latent.side, self.width // latent.side

    @property
    def sound_shape(self) -> tuple[int, ...] | None:
        """Of the latent of the sound that is made with a video; None: there is none."""
        sound = None if self.is_picture else self._video.sound
        return None if sound is None else sound.shape(self.frames)


def sampling(model: Model, height: int, width: int, frames: int, steps: int, **others: object) -> Row:
    return replace(Row(model, "sample", height, width, frames, steps), **others)  # type: ignore[arg-type]


def unpromised(row: Row) -> Row:
    """The same row, of which nothing is asked."""
    none: dict[str, Any] = dict.fromkeys(
        ("asked", "asked_first", "asked_peers", "seconds", "first_seconds", "held", "peak")
    )
    return replace(row, **none)


def by_file(row: Row) -> tuple[str, str]:
    """Sorts rows so that those of one file lie together."""
    return OWNERS.get(row.model, row.model), row.storage
