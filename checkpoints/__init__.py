"""Tiny but true checkpoints: real file formats, real tensor names, seeded weights, a few megabytes each.

    path = checkpoints.write("wan_i2v", folder, "fp8_scaled", seed=0)

`KINDS` is the catalogue. The files are what stock ComfyUI loads and runs; the tests beside this package hold them to it.
Some families stock takes at their real widths only: files of the kinds in `NARROW` load while `narrow.opened(comfy)` is open.
Nothing here imports ComfyUI: the tables of names and shapes are written out, to be read as documentation of the formats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import (
    clip_g,
    clip_l,
    clip_vision,
    container,
    flux,
    hunyuan_video,
    kl_vae,
    llama,
    lora,
    ltx,
    minimax,
    narrow,
    qwen3_vl,
    qwen_image,
    sd3,
    spiece,
    t5xxl,
    umt5,
    unet,
    wan,
    wan_more,
    wan_vae,
    whole,
    z_image,
)
from .storage import Storage
from .weights import Table, draw

__all__ = [
    "KINDS",
    "LORA_BASES",
    "NARROW",
    "Kind",
    "clip_g",
    "clip_l",
    "clip_vision",
    "flux",
    "hunyuan_video",
    "kl_vae",
    "llama",
    "lora",
    "ltx",
    "minimax",
    "narrow",
    "qwen3_vl",
    "qwen_image",
    "sd3",
    "t5xxl",
    "umt5",
    "unet",
    "wan",
    "wan_more",
    "wan_vae",
    "whole",
    "write",
    "z_image",
]

Tensors = dict[str, torch.Tensor]


def _as_they_are(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Kind:
    """One sort of checkpoint file. `folder` is the one under ComfyUI's `models` where such a file belongs."""

    folder: str
    family: str
    table: Table
    storages: Mapping[str, Storage]
    metadata: Mapping[str, str] = field(default_factory=dict)
    finish: Callable[[Tensors], Tensors] = _as_they_are


def _with_tokenizer(tensors: Tensors) -> Tensors:
    return tensors | {"spiece_model": spiece.spiece_tensor()}


def _with_gemma_tokenizer(tensors: Tensors) -> Tensors:
    return tensors | {"spiece_model": llama.gemma_spiece_tensor()}


def _catalogue() -> dict[str, Kind]:
    kinds = {
        name: Kind("diffusion_models", "wan", wan.table(size), wan.STORAGES, wan.metadata(size))
        for name, size in wan.SIZES.items()
    }
    kinds["umt5"] = Kind("text_encoders", "umt5", umt5.table(umt5.Umt5Size()), umt5.STORAGES, finish=_with_tokenizer)
    kinds["wan_vae"] = Kind("vae", "wan_vae", wan_vae.table_21(wan_vae.WAN21), wan_vae.STORAGES)
    kinds["wan22_vae"] = Kind("vae", "wan22_vae", wan_vae.table_22(wan_vae.WAN22), wan_vae.STORAGES)
    vision = clip_vision.table(clip_vision.SIZE)
    for name, spell in {"clip_vision": _as_they_are, "clip_vision_open_clip": clip_vision.open_clip}.items():
        kinds[name] = Kind("clip_vision", "clip_vision", vision, clip_vision.STORAGES, finish=spell)
    for name, one in lora.LORAS.items():
        kinds[name] = Kind("loras", name, one.table, lora.STORAGES)
    return kinds | _other_families()


def _other_families() -> dict[str, Kind]:
    kinds = {
        name: Kind("diffusion_models", "wan", wan_more.table(size), wan_more.STORAGES, wan_more.metadata(size))
        for name, size in wan_more.SIZES.items()
    }
    for name, size in ltx.SIZES.items():
        kinds[name] = Kind("diffusion_models", name, ltx.table(size), ltx.STORAGES, ltx.metadata(size))
    plain: dict[str, tuple[Table, Mapping[str, Storage]]] = {
        **{name: (flux.table(size), flux.STORAGES) for name, size in flux.SIZES.items()},
        "z_image": (z_image.table(z_image.SIZE), z_image.STORAGES),
        "qwen_image": (qwen_image.table(qwen_image.SIZE), qwen_image.STORAGES),
        "hunyuan_video_15": (hunyuan_video.table(hunyuan_video.SIZE), hunyuan_video.STORAGES),
        **{name: (minimax.table(size), minimax.STORAGES) for name, size in minimax.SIZES.items()},
        "sd3": (sd3.table(sd3.SIZE), sd3.STORAGES),
        **{name: (unet.table(size), unet.STORAGES) for name, size in unet.SIZES.items()},
    }
    kinds |= {name: Kind("diffusion_models", name, table, storages) for name, (table, storages) in plain.items()}
    kinds["qwen3"] = Kind("text_encoders", "qwen3", llama.table(llama.QWEN3), llama.STORAGES)
    kinds["qwen3_vl"] = Kind("text_encoders", "qwen3_vl", qwen3_vl.table(qwen3_vl.SIZE), qwen3_vl.STORAGES)
    gemma = llama.table(llama.GEMMA2)
    kinds["gemma2"] = Kind("text_encoders", "gemma2", gemma, llama.STORAGES, finish=_with_gemma_tokenizer)
    kinds["clip_l"] = Kind("text_encoders", "clip_l", clip_l.table(), clip_l.STORAGES)
    kinds["t5xxl"] = Kind("text_encoders", "t5xxl", t5xxl.table(t5xxl.SIZE), t5xxl.STORAGES)
    for name, one in kl_vae.SIZES.items():
        kinds[name] = Kind("vae", name, kl_vae.table(one), kl_vae.STORAGES)
    return kinds


KINDS: Mapping[str, Kind] = _catalogue()

# The kinds that stock loads only while `narrow.opened(comfy)` is open.
NARROW = frozenset(
    ("chroma", "qwen_image", "sd15", "sdxl", "wan_animate", "wan_humo", "z_image", "flux2_vae", "flux_vae", "sd_vae")
)

# Which kind of checkpoint a LoRA is for.
LORA_BASES: Mapping[str, str] = {name: one.base for name, one in lora.LORAS.items()}


def write(kind: str, folder: Path | str, storage: str = "fp16", seed: int = 0) -> Path:
    """Make sure the file is in `folder`, and say where.

    The bytes depend on (kind, storage, seed) alone. A file that is there already is not written again, so after a change to
    this package the folder has to be emptied.
    """
    if kind not in KINDS:
        raise ValueError(f"no checkpoint kind {kind!r}; there are {', '.join(KINDS)}")
    entry = KINDS[kind]
    if storage not in entry.storages:
        raise ValueError(f"{kind} is not stored as {storage!r}, only as {', '.join(entry.storages)}")
    path = Path(folder) / f"{kind}_{storage}{f'_seed{seed}' if seed else ''}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = entry.storages[storage].store(entry.table, _drawn(kind, seed))
        container.save(path, entry.finish(stored.tensors), {**entry.metadata, **stored.metadata})
    return path


@functools.lru_cache(maxsize=8)  # who writes one in several storages, or in several folders, does so in a row
def _drawn(kind: str, seed: int) -> Tensors:
    """Nobody changes them: a storage makes others of them."""
    return draw(KINDS[kind].table, KINDS[kind].family, seed)
