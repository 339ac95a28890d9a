"""The rows of whole models, group by group: the work that stock ComfyUI and ours do, and what is promised of it.

Standard library only: the process that reads this starts others and must not touch the card.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import gguf_pack
from .row_types import SAGE, SIZES, Model, Row, Side, Work, sampling, unpromised
from .storages import BY_FILE, GGUF, shown
from .workflows import small_machines, whole

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


IN_TILES = ("stock in tiles", Side(tiled=True))


def vaes() -> list[Row]:
    """Decoding by VAEs that no family knows, beside stock all at once and in tiles."""
    others: dict[str, Any] = {"asked_peers": 1.5, "peak": 3.0, "group": "vaes", "peers": (IN_TILES,)}
    return [
        Row("ltx_vae", "decode", 704, 1280, 121, 2, **others),
        Row("h3_vae", "decode", 720, 1280, 124, 2, **others),
        Row("hunyuan15_vae", "decode", 720, 1280, 121, 2, **others),
    ]


def texts() -> list[Row]:
    """The text encoders of those models alone, three prompts each."""
    row = Row("qwen25_vl", "text", steps=3, group="text", note="fp8_scaled", storage="fp8_scaled")
    gemma = replace(row, model="gemma3", note="fp8_scaled, filled up to 1024")
    return [row, gemma, replace(row, model="h3_te", note="nvfp4", storage="nvfp4")]


# What a new loader does by itself, beside stock as it is installed: of each model a file in every way
# that people have it. Height, width, frames and steps, of which the first three are those of its FP16 row.
BY_DEFAULT: dict[Model, tuple[int, int, int, int]] = {
    "wan13": (480, 480, 17, 6),
    "wan14": (480, 480, 17, 4),
    "klein4": (1024, 1024, 0, 12),
    "z_image": (1024, 1024, 0, 16),
    "sdxl": (1024, 1024, 0, 20),
    "qwen_image": (1024, 1024, 0, 4),
    "krea2": (1024, 1024, 0, 6),
    "anima": (1024, 1024, 0, 8),
    "hunyuan_video_15": (480, 832, 33, 3),
    "ltx23": (512, 768, 121, 4),
    "minimax_h3": (480, 832, 124, 3),
}
KINDS_OF_FILES = ("fp16", *BY_FILE, "q8_0", "q4_k_m")
_NOT_OF_A_UNET = "no such file is published by ComfyUI, nor named by its templates"
# Of Qwen-Image and of models that no family computes: the files that people have, as ComfyUI's templates name them.
_HAVE: dict[Model, tuple[str, ...]] = {
    "qwen_image": ("int8_convrot", "fp8_scaled"),
    "krea2": ("int8_convrot", "fp8_scaled"),
    "anima": ("fp16", "int8_convrot"),
    "hunyuan_video_15": ("int8_convrot", "fp8_scaled"),
    "ltx23": ("int8_convrot", "fp8_scaled"),
    "minimax_h3": ("int8_convrot",),
}
_FILES_OF_ITS_TEMPLATES = "not asked: it stands here for the files that templates name"
# Of what there is no row, and why.
WITHOUT: dict[tuple[Model, str], str] = {
    **{("sdxl", storage): _NOT_OF_A_UNET for storage in BY_FILE},
    **{
        (model, storage): _FILES_OF_ITS_TEMPLATES
        for model, have in _HAVE.items()
        for storage in KINDS_OF_FILES
        if storage not in have
    },
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
    """The rows of that table that other groups lack. INT8 and fp8 first, in which stock multiplies too."""
    order = sorted(KINDS_OF_FILES, key=lambda storage: storage not in BY_FILE)
    found = (by_default(model, storage) for storage in order for model in BY_DEFAULT)
    return [row for row in found if row is not None and row.group == "default"]


def without_family() -> list[Row]:
    """What a family's own code gains over the way of any other model."""
    rows, both = [], ("fp16", "int8_convrot")
    asked: dict[Model, tuple[str, ...]] = {"klein4": both, "z_image": both, "wan14": both, "sdxl": ("fp16",)}
    for model, storage in ((model, storage) for model, storages in asked.items() for storage in storages):
        over = "" if storage == "fp16" else shown(storage)
        note = ", ".join(part for part in (over, "without its family") if part)
        made = sampling(model, *BY_DEFAULT[model], storage=storage, note=note, over=over)
        rows.append(replace(made, group="general", stock=None, ours=Side(families=False)))
    return rows


def cards() -> list[Row]:
    """One step on two cards, each of which computes one of the prompts: held against the row on one card."""
    both = Side(cards=2)
    return [sampling("wan14", 480, 832, 81, 3, group="cards", note="on two cards", stock=both, ours=both)]


ASKED_FOR = ("cards",)  # groups that need a machine of their own: not part of `all`
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
    rows += cards() + without_family() + whole() + small_machines() + vaes() + texts()
    names = [row.name for row in rows]
    assert len(names) == len(set(names)), "two rows of one name"
    return rows


def quick(row: Row) -> Row:
    """The same row at a size for two CPU cores. The figures mean nothing; that it runs does."""
    small: dict[str, Any] = {} if row.work in SIZES else {"height": 64, "width": 64, "frames": 5 if row.frames else 0}
    is_pair = row.is_whole and row.around.second is not None  # which takes a step of each
    small["steps"] = 2 if is_pair else {"sample": 2, "call": 2, "write": 2, "live": 3}.get(row.work, 1)
    if row.needs_pack and gguf_pack.folder() is None:
        small["stock"] = None
    return replace(unpromised(row), **small, note=row.note or "tiny")
