"""What the end-to-end bench measures: a row is one piece of work, done by stock ComfyUI and by us.

Standard library only: the process that reads this starts others and must not touch the card.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from . import gguf_pack
from .pictures import LATENTS, Latent
from .storages import BY_FILE, GGUF, shown

Model = Literal[
    "wan13",
    "wan14",
    "vae",
    "vae22",
    "t5",
    "qwen3",
    "klein4",
    "klein9",
    "z_image",
    "qwen_image",
    "sd15",
    "sdxl",
    "flux2_vae",
    "flux_vae",
    "vl2",
    "vl4",
]
Work = Literal["sample", "call", "decode", "encode", "text", "video", "picture", "live", "write", "see"]
Through = Literal["TAESD", "the VAE"]
TITLES: dict[Model, str] = {
    "wan13": "1.3B",
    "wan14": "14B",
    "vae": "VAE",
    "vae22": "VAE 2.2",
    "t5": "UMT5-XXL",
    "qwen3": "Qwen3-4B",
    "klein4": "klein 4B",
    "klein9": "klein 9B",
    "z_image": "Z-Image",
    "qwen_image": "Qwen-Image",
    "sd15": "SD 1.5",
    "sdxl": "SDXL",
    "flux2_vae": "Flux.2 VAE",
    "flux_vae": "Flux VAE",
    "vl2": "Qwen3-VL 2B",
    "vl4": "Qwen3-VL 4B",
}
# The tiny checkpoints that stand in for them where there is no card.
TINY: dict[Model, str] = {
    "wan13": "wan_t2v",
    "wan14": "wan_t2v",
    "vae": "wan_vae",
    "vae22": "wan22_vae",
    "t5": "umt5",
    "qwen3": "qwen3",
    "klein4": "flux2",
    "klein9": "flux2",
    "z_image": "z_image",
    "qwen_image": "qwen_image",
    "sd15": "sd15",
    "sdxl": "sdxl",
    "flux2_vae": "flux2_vae",
    "flux_vae": "flux_vae",
    "vl2": "qwen3_vl",
    "vl4": "qwen3_vl",
}
GUIDED: tuple[Model, ...] = (
    "wan13",
    "wan14",
    "sd15",
    "sdxl",
    "qwen_image",
)  # whose steps have two prompts; the others were distilled to one
VAES: tuple[Model, ...] = ("vae", "vae22", "flux2_vae", "flux_vae")
# Of work from a prompt to its end: the text encoder and the VAE around the row's own model, and how often it is done.
WHOLE: dict[Work, tuple[Model, Model]] = {"video": ("t5", "vae"), "picture": ("qwen3", "flux2_vae")}
TOLD: tuple[Work, ...] = ("call", "live", "write", "see")  # what their model is not known for
SIZES: dict[Work, str] = {"text": "512 tokens", "write": "a token"}  # of work that has no pixels
TIME = 4  # frames per latent frame, after the first
WINDOWS_BUS = 12e9  # bytes a second, as a PCIe 3 card has it
SAGE = "--use-sage-attention"  # of ComfyUI
TAKES: dict[Work, int] = {"video": 2, "picture": 4}  # of a row of whole ones; the first is apart
# Channels of a video's latents, and pixels of a side per latent pixel.
VIDEO = Latent(16, 8)
VIDEOS: dict[Model, Latent] = {"vae22": Latent(48, 16)}


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
    ballast    whether all but `--free` GiB of the card are taken
    remembers  what kernels were chosen before in this machine's life; else it is a new one
    cards      a step's prompts are computed on so many, by stock's MultiGPU CFG Split
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
    cards: int = 1
    remembers: bool = True


STOCK, OURS = Side(), Side()


@dataclass(frozen=True)
class Row:
    """One piece of work.

    steps    of the sampler, or how often the work is done: the first is apart, the median is over the rest
    asked    how many times faster than stock it has to be; `asked_first` is for the first time
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
            return (own,)
        encoder, decoder = WHOLE[self.work]
        return (encoder, "fp16"), own, (decoder, "fp16")

    @property
    def is_promised(self) -> bool:
        """Whether something is asked of it."""
        asked = (self.asked, self.asked_first, self.seconds, self.first_seconds, self.held, self.peak)
        return any(one is not None for one in asked)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the work, from a prompt to what is looked at."""
        return self.work in WHOLE

    @property
    def is_live(self) -> bool:
        """Whether frames are made anew one by one: `steps` of them, with a step of the model each."""
        return self.work == "live"

    @property
    def is_picture(self) -> bool:
        """Whether its own model makes pictures: no frames."""
        return self.model in LATENTS

    @property
    def prompts(self) -> int:
        """Of a step."""
        return 2 if self.model in GUIDED and not self.is_live else 1

    @property
    def sides(self) -> tuple[tuple[str, Side], ...]:
        """Who does it."""
        both = (("stock", self.stock), ("ours", self.ours))
        return (*((who, side) for who, side in both if side is not None), *self.peers)

    @property
    def needs_pack(self) -> bool:
        """Whether stock reads its file by city96's pack alone."""
        return self.stock is not None and self.stock.pack

    @property
    def latent(self) -> tuple[int, int, int]:
        """Frames, height and width of a video's latent."""
        side = VIDEOS.get(self.model, VIDEO).side
        return (self.frames - 1) // TIME + 1, self.height // side, self.width // side

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Of one latent: channels, frames, height and width; a picture has no frames, or one where its VAE is of videos."""
        if not self.is_picture:
            return VIDEOS.get(self.model, VIDEO).channels, *self.latent
        latent = LATENTS[self.model]
        frames = (1,) if latent.is_of_videos else ()
        return latent.channels, *frames, self.height // latent.side, self.width // latent.side


def sampling(model: Model, height: int, width: int, frames: int, steps: int, **others: object) -> Row:
    return replace(Row(model, "sample", height, width, frames, steps), **others)  # type: ignore[arg-type]


# What a Turing card has: torch's mem-efficient attention; ours, not the newer ones of torch that `auto` would race against.
TURING = {
    "stock": Side(attention="efficient"),
    "ours": Side(attention="efficient", isa="sm_75", ops=(("attention", "on"),)),
}


def table() -> list[Row]:
    """The rows that are promised something, cheap ones first for each file of weights."""
    rows = [
        sampling("wan13", 480, 480, 17, 6, asked=1.0),
        sampling("wan13", 480, 832, 81, 4, asked=1.5),
        sampling("wan13", 480, 832, 81, 3, asked=1.5, note="held to Turing", **TURING),
        sampling("wan14", 480, 480, 17, 6, asked=1.2),
        sampling("wan14", 480, 832, 81, 3, asked=1.35),
        sampling("wan14", 720, 1280, 81, 2, seconds=25.0),
        Row("t5", "text", steps=5, asked=1.5, asked_first=6.0),
    ]
    for work, asked in (("decode", (1.8, 5.0)), ("encode", (1.6, 4.0))):
        for (height, width), ratio in zip(((480, 832), (720, 1280)), asked, strict=True):
            times = 4 if height == 480 else 2  # in the second kernels are still chosen; the larger ones take long
            rows.append(Row("vae", work, height, width, 81, times, asked=ratio))  # type: ignore[arg-type]
    both: tuple[Work, ...] = ("decode", "encode")
    return rows + [Row("vae22", work, 704, 1280, 121, 2, asked=1.8, peak=3.0) for work in both]


def more() -> list[Row]:
    """How cost grows with frames and size, and falls with the budget; what each switch is worth."""
    rows = []
    for model in ("wan13", "wan14"):
        for height, width in ((480, 832), (720, 1280)):
            # Of steps: those of seconds differ by less than 1 %, and in the second kernels are still chosen.
            few = 2 if height > 480 else 4 if model == "wan14" else 3
            rows += [sampling(model, height, width, frames, few, group="growth") for frames in (17, 33)]
    rows.append(sampling("wan13", 720, 1280, 81, 2, group="growth"))
    for gib in (1.5, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0):
        side = Side(vram_budget=gib, ballast=gib <= 6)
        rows.append(
            sampling("wan14", 480, 480, 17, 4, group="budget", note=f"{gib:g} GiB of weights", stock=None, ours=side)
        )
    managed = Side(vram_budget=7.0, backend="managed", ballast=False)
    slots = replace(managed, backend="slots")
    for side in (slots, managed):
        note = f"{side.backend}, 7 GiB by account"
        rows.append(sampling("wan14", 480, 480, 17, 4, group="backend", note=note, stock=None, ours=side))
        rows.append(sampling("wan14", 480, 832, 81, 2, group="backend", note=note, stock=None, ours=side))
    small = {"height": 480, "width": 832, "frames": 81, "steps": 2}
    for note, side in {
        "kernels off": Side(kernels="off"),
        "fast": Side(precision="fast"),
        "turbo": Side(precision="turbo"),
        "attention off": Side(ops=(("attention", "off"),)),
        "linear off": Side(ops=(("linear", "off"), ("linear_", "off"), ("linear_pair", "off"))),
        "norms off": Side(ops=(("norm_modulate", "off"),)),
        "rotation off": Side(ops=(("rms_rope_", "off"),)),
    }.items():
        rows.append(Row("wan13", "sample", **small, group="switches", note=note, stock=None, ours=side))  # type: ignore[arg-type]
    for note, side in {
        "kernels off": Side(kernels="off"),
        "convolutions off": Side(ops=(("conv", "off"), ("upsample_conv2d", "off"))),
        "norms off": Side(ops=(("channel_rms_silu", "off"),)),
    }.items():
        rows.append(Row("vae", "decode", 480, 832, 81, 2, group="switches", note=note, stock=None, ours=side))
    off = Side(kernels="off")
    rows.append(Row("t5", "text", steps=3, group="switches", note="kernels off", stock=None, ours=off))
    for note, side in {
        "stock with --fast fp16_accumulation": Side(comfy=("--fast", "fp16_accumulation")),
        "stock with --disable-dynamic-vram": Side(comfy=("--disable-dynamic-vram",)),
        "stock held to mem-efficient attention": Side(attention="efficient"),
        "stock held to cuDNN attention": Side(attention="cudnn"),
    }.items():
        rows.append(Row("wan13", "sample", **small, group="stock", note=note, stock=side, ours=None))  # type: ignore[arg-type]
    for gib in (4.0, 8.0, 16.0):
        side, note = Side(ram_budget=gib), f"{gib:g} GiB of RAM"
        rows.append(sampling("wan14", 480, 480, 17, 4, group="ram", note=note, stock=None, ours=side))
    rows += [
        sampling("wan14", 480, 480, 17, 4, group="lora", note="a LoRA of rank 32", lora=32),
        sampling(
            "wan14", 480, 480, 17, 4, group="lora", note="fp8_e4m3fn, a LoRA of rank 32", storage="fp8_e4m3fn", lora=32
        ),
        sampling("wan13", 480, 832, 17, 4, group="lora", note="a LoRA of rank 32", lora=32),
        sampling("wan13", 480, 480, 17, 3, group="cold", note="cold file", cold=True),
        Row("wan13", "video", 480, 832, 81, 10, group="video", note="10 steps"),
    ]
    rows += [
        sampling("wan14", 480, 480, 17, 4, group="storage", note="fp8_e4m3fn", storage="fp8_e4m3fn"),
        sampling("wan13", 480, 832, 17, 3, group="storage", note="fp8_e4m3fn", storage="fp8_e4m3fn"),
    ]
    return rows


# On a card for which `auto` takes other libraries' kernels: ours, of the class that RTX 30 and 40 have.
OURS_ALONE = tuple(
    (op, "on") for op in ("attention", "linear", "linear_", "linear_pair", "linear_int8", "linear_int8_")
)
BESIDE_PACK = Side(pack=True, comfy=("--disable-dynamic-vram",))  # its patcher is not made for dynamic VRAM


def packed() -> list[Row]:
    """Files as people have them: GGUF beside city96's pack, INT8 beside stock."""

    def short(storage: str, note: str = "", **others: object) -> Row:
        name = shown(storage)
        said = {"note": ", ".join(part for part in (name, note) if part), "over": name if note else ""}
        return sampling(
            "wan14", 480, 480, 17, 4, **{"group": "packed", "storage": storage, **said, **_stock_of(storage), **others}
        )

    mix = "q4_k_m"
    rows = [
        short(mix, asked=1.5, seconds=0.46, first_seconds=1.2, held=10 / 1.073741824),
        short(mix, "4 GiB of RAM", stock=None, ours=Side(ram_budget=4.0), seconds=0.5),
        # The pack gives these layers no LoRA on a ComfyUI as new as this: nothing to stand beside.
        short(mix, "a LoRA of rank 32", lora=32, stock=None),
        short("q8_0", asked=1.0),
        short("int8_convrot", asked=1.0),
        short("int8_convrot", "precise", stock=None, ours=Side(precision="precise")),
        short("int8_convrot", "turbo", stock=None, ours=Side(precision="turbo")),
    ]
    for precision in ("precise", "auto", "turbo"):
        side = Side(precision=precision, isa="sm_80", ops=OURS_ALONE)
        note = f"int8_convrot, {precision}, our kernels of sm_80"
        over = "int8_convrot, precise, our kernels of sm_80"
        rows.append(
            sampling(
                "wan14",
                480,
                832,
                81,
                2,
                group="packed",
                storage="int8_convrot",
                note=note,
                over=over,
                stock=None,
                ours=side,
            )
        )
    rows.append(Row("qwen3", "text", steps=4, group="packed"))
    for storage in GGUF:
        name = shown(storage)
        text = Row("t5", "text", steps=4, group="packed", note=name, storage=storage, stock=None)
        rows += [text, replace(text, model="qwen3")]
    windows = Side(windows=True)
    for storage, stock in (("fp16", windows), ("int8_convrot", windows), (mix, replace(BESIDE_PACK, windows=True))):
        note = "as on Windows" if storage == "fp16" else f"{shown(storage)}, as on Windows"
        over = "" if storage == "fp16" else shown(storage)
        rows.append(
            sampling(
                "wan14",
                480,
                480,
                17,
                3,
                group="windows",
                storage=storage,
                note=note,
                over=over,
                stock=stock,
                ours=windows,
                asked=1.0,
            )
        )
    return rows


def pictures() -> list[Row]:
    """Flux.2 klein and Z-Image, the text encoder and the VAEs around them; a step is of one prompt, as they were distilled to. And
    Stable Diffusion's U-Nets, with guidance. So many steps that most of them come after the kernels are chosen."""

    def row(model: Model, work: Work, side: int, steps: int, **others: object) -> Row:
        return replace(Row(model, work, side, side, steps=steps, group="pictures"), **others)  # type: ignore[arg-type]

    held = {"note": "held to Turing", **TURING}
    rows = [
        row("klein4", "sample", 1024, 12, seconds=0.065, first_seconds=0.8),
        row("klein4", "sample", 1024, 12, asked=1.5, **held),
        row("klein4", "sample", 2048, 6, asked=1.0),  # which asks for the peak
        row("klein4", "picture", 1024, 4, asked=1.8, kind="flux2"),
        row("klein9", "sample", 1024, 12, asked=1.25, asked_first=5.0),
        row("z_image", "sample", 1024, 16, asked=1.4, asked_first=5.0),
        row("z_image", "sample", 1024, 16, asked=1.5, **held),
        row("sd15", "sample", 512, 60),
        row("sd15", "call", 512, 60, asked=5.4, seconds=0.007),
        row("sd15", "sample", 512, 60, asked=2.0, **held),
        row("sdxl", "sample", 1024, 60, asked=2.3, seconds=0.04),
        row("sdxl", "sample", 1024, 60, asked=2.0, **held),
        Row(
            "qwen3", "text", steps=16, seconds=0.03, first_seconds=0.4, kind="flux2", note="for klein", group="pictures"
        ),
    ]
    for vae in ("flux2_vae", "flux_vae"):
        works: tuple[tuple[Work, int, float], ...] = (
            ("decode", 1024, 2.2),
            ("decode", 2048, 2.5),
            ("encode", 1024, 2.0),
        )
        rows += [row(vae, work, side, 12, asked=ratio, peak=3.0) for work, side, ratio in works]
    return rows


def small() -> list[Row]:
    """Cards of which little is free, on both sides: 2 GiB and more; what says most first. Of later steps there are as many as tell
    whether one is computed again."""
    rows = []
    for model, height, width, frames, steps in (("wan13", 480, 832, 81, 3), ("wan14", 480, 480, 17, 4)):
        for gib in (3.0, 2.0, 4.0, 6.0):
            asked = 1.1 if gib == 3 else 1.0
            note = f"{gib:g} GiB free"
            rows.append(sampling(model, height, width, frames, steps, group="small", note=note, free=gib, asked=asked))  # type: ignore[arg-type]
    return rows


def short() -> list[Row]:
    """Steps of milliseconds, and the first time that anything runs: first calls of a machine that remembers nothing."""
    new = {"note": "a new machine", "ours": Side(remembers=False)}
    return [
        sampling("wan13", 480, 832, 1, 16, group="short", asked=1.6, asked_first=1.1),
        sampling("wan13", 208, 336, 33, 16, group="short", asked=1.1, asked_first=1.1),
        sampling("wan13", 480, 480, 17, 16, group="short", asked=1.1, asked_first=1.1, **new),
        Row("vae", "decode", 464, 848, 45, 3, group="short", asked_first=1.1, **new),  # type: ignore[arg-type]
        Row("vae", "encode", 464, 848, 45, 3, group="short", asked_first=1.1, **new),  # type: ignore[arg-type]
        Row(
            "wan13",
            "video",
            480,
            832,
            33,
            10,
            group="short",
            asked_first=1.3,
            note="10 steps, a new machine",
            ours=Side(remembers=False),
        ),
    ]


def live() -> list[Row]:
    """Frames of 512x512, one by one, as stock's VAE Encode, KSampler and VAE Decode make them. 120 of them a second are asked with
    TAESD, and 60 with the VAE."""
    row = Row("sd15", "live", 512, 512, steps=90, group="live", through="TAESD")
    held = {"note": "held to Turing", **TURING}
    return [
        replace(row, asked=8.0, seconds=1 / 120),
        replace(row, asked=2.0, **held),  # type: ignore[arg-type]
        replace(row, through="the VAE", seconds=1 / 60),
        replace(row, through="the VAE", asked=2.0, **held),  # type: ignore[arg-type]
    ]


def writing() -> list[Row]:
    """Qwen3-VL writes: a step is a token, the first one with all that is loaded and chosen. And sees a picture with a prompt, up
    to the first word about it. Stock has no sizes for the 2B, and reads none of these packed files."""

    def token(model: Model, **others: object) -> Row:
        return replace(Row(model, "write", steps=128, group="writing"), **others)  # type: ignore[arg-type]

    return [
        token("vl4", seconds=0.033, first_seconds=1.5),
        token("vl4", seconds=0.0035, storage="q8_0", note="Q8_0", stock=None),
        token("vl4", seconds=0.0025, storage="q4_k_m", note="Q4_K_M", stock=None),
        token("vl2", seconds=0.0022, stock=None),
        Row("vl4", "see", 768, 768, steps=13, seconds=0.12, group="writing"),
    ]


# What a new loader does by itself, beside stock as it is installed: of each model a file in every way
# that people have it. Height, width, frames and steps, of which the first three are those of its FP16 row.
BY_DEFAULT: dict[Model, tuple[int, int, int, int]] = {
    "wan13": (480, 480, 17, 6),
    "wan14": (480, 480, 17, 4),
    "klein4": (1024, 1024, 0, 12),
    "z_image": (1024, 1024, 0, 16),
    "sdxl": (1024, 1024, 0, 20),
    "qwen_image": (1024, 1024, 0, 4),
}
KINDS_OF_FILES = ("fp16", *BY_FILE, "q8_0", "q4_k_m")
_NOT_OF_A_UNET = "no such file is published by ComfyUI, nor named by its templates"
_STREAMS_ALONE = "not asked: a model that only streams stands here for its INT8 file"
# Of what there is no row, and why.
WITHOUT: dict[tuple[Model, str], str] = {
    **{("sdxl", storage): _NOT_OF_A_UNET for storage in BY_FILE},
    **{("qwen_image", storage): _STREAMS_ALONE for storage in KINDS_OF_FILES if storage != "int8_convrot"},
}


def by_default(model: Model, storage: str) -> Row | None:
    """The row of a model's file, in whatever group it is; None: there is none."""
    if (model, storage) in WITHOUT:
        return None
    made = sampling(model, *BY_DEFAULT[model], storage=storage, note="" if storage == "fp16" else shown(storage))
    others = table() + packed() + pictures()
    return next(
        (row for row in others if row.name == made.name),
        replace(made, group="default", asked=1.0, **_stock_of(storage)),
    )


def _stock_of(storage: str) -> dict[str, Any]:
    return {"stock": BESIDE_PACK} if storage in GGUF else {}


def default() -> list[Row]:
    """What the other groups do not have of it. INT8 and fp8 first, in which stock multiplies too."""
    order = sorted(KINDS_OF_FILES, key=lambda storage: storage not in BY_FILE)
    found = (by_default(model, storage) for storage in order for model in BY_DEFAULT)
    return [row for row in found if row is not None and row.group == "default"]


COMPILED, WITH_SAGE = ("torch.compile", Side(compiled=True)), ("SageAttention", Side(comfy=(SAGE,)))


def peers() -> list[Row]:
    """Beside stock with what its users switch on for speed, in the same run. 14B, whose steps are short here and whose weights pass
    by, without torch.compile: that would take minutes to compile what is not the bottleneck."""
    both = {"group": "peers", "note": "beside torch.compile and SageAttention", "peers": (COMPILED, WITH_SAGE)}
    return [
        sampling("wan13", 480, 832, 81, 4, **both),
        sampling("klein4", 1024, 1024, 0, 12, **both),
        sampling("sdxl", 1024, 1024, 0, 20, **both),
        sampling("wan14", 480, 480, 17, 4, group="peers", note="beside SageAttention", peers=(WITH_SAGE,)),
    ]


def all_rows() -> list[Row]:
    rows = table() + short() + more() + small() + packed() + default() + pictures() + live() + writing() + peers()
    names = [row.name for row in rows]
    assert len(names) == len(set(names)), "two rows of one name"
    return rows


def quick(row: Row) -> Row:
    """The same row at a size for two CPU cores. The figures mean nothing; that it runs does."""
    small: dict[str, Any] = {} if row.work in SIZES else {"height": 64, "width": 64, "frames": 5 if row.frames else 0}
    small["steps"] = {"sample": 2, "call": 2, "write": 2, "live": 3}.get(row.work, 1)
    if row.needs_pack and gguf_pack.folder() is None:
        small["stock"] = None
    return replace(unpromised(row), **small, note=row.note or "tiny")


def unpromised(row: Row) -> Row:
    """The same row, of which nothing is asked."""
    return replace(row, asked=None, asked_first=None, seconds=None, first_seconds=None, held=None, peak=None)
