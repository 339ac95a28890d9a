"""Whole checkpoints: a U-Net, its text encoders and its VAE in one file, each under the prefix that the releases have.

    model.diffusion_model.          the U-Net (`unet.py`)
    first_stage_model.              the VAE (`kl_vae.py`)
    cond_stage_model.transformer.   SD 1.5: CLIP-L, as a file of its own has it (`clip_l.py`), without the last projection
    cond_stage_model.model.         SD 2.1: OpenCLIP H, in OpenCLIP's spelling (`clip_g.open_clip`)
    conditioner.embedders.0.transformer., .1.model.   SDXL: CLIP-L, and CLIP-G in OpenCLIP's spelling

Beside these a file may have marks, tensors that only are there: `v_pred` and `ztsnr` of an SDXL that predicts velocities.

They load while `narrow` is open. What an SDXL's CLIP-G pools is as wide as its tokens, which are narrower here than the 1280 that
the U-Net reads: it encodes prompts, and its U-Net samples with others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from . import clip_g, clip_l, container, kl_vae, unet
from .storage import PLAIN
from .weights import Table, draw

Tensors = dict[str, torch.Tensor]

MODEL, VAE = "model.diffusion_model.", "first_stage_model."
LAYERS = 4  # of each text encoder
PARTS = ("model", "clip", "vae")


@dataclass(frozen=True)
class Text:
    """One of a checkpoint's text encoders. is_open_clip: whether in OpenCLIP's spelling."""

    prefix: str
    is_open_clip: bool


@dataclass(frozen=True)
class Whole:
    """
    size    of the U-Net
    texts   its text encoders
    """

    size: unet.UnetSize
    texts: tuple[Text, ...]


CHECKPOINTS: Mapping[str, Whole] = {
    "sd15": Whole(unet.SIZES["sd15"], (Text("cond_stage_model.transformer.", is_open_clip=False),)),
    "sd21": Whole(replace(unet.SIZES["sd15"], linear=True), (Text("cond_stage_model.model.", is_open_clip=True),)),
    "sdxl": Whole(
        replace(unet.SIZES["sdxl"], context=2 * clip_l.WIDTH),
        (
            Text("conditioner.embedders.0.transformer.", is_open_clip=False),
            Text("conditioner.embedders.1.model.", is_open_clip=True),
        ),
    ),
}


def tensors(kind: str, storage: str = "fp16", parts: Collection[str] = PARTS, seed: int = 0) -> Tensors:
    """Of a checkpoint that has these parts."""
    found: Tensors = {}
    entry = CHECKPOINTS[kind]
    if "model" in parts:
        found |= _stored(MODEL, unet.table(entry.size), storage, seed)
    if "vae" in parts:
        found |= _stored(VAE, kl_vae.table(kl_vae.SIZES["sd_vae"]), storage, seed)
    for number, text in enumerate(entry.texts if "clip" in parts else ()):
        # Numbered, so that two encoders of one checkpoint differ.
        table = clip_g.table(layers=LAYERS) if text.is_open_clip else clip_l.table(layers=LAYERS)
        own = _stored("", table, storage, seed + number)
        if text.is_open_clip:
            own = clip_g.open_clip(own)
        else:
            del own["text_projection.weight"]
        found |= {text.prefix + name: tensor for name, tensor in own.items()}
    return found


def write(
    kind: str,
    folder: Path | str,
    storage: str = "fp16",
    parts: Collection[str] = PARTS,
    marks: Collection[str] = (),
    seed: int = 0,
) -> Path:
    """Make sure that the file is in `folder`, and say where. marks: names of empty tensors beside the parts."""
    left_out = "".join(f"_no_{part}" for part in PARTS if part not in parts)
    told = "".join(f"_{mark}" for mark in marks)
    path = Path(folder) / f"{kind}_whole{left_out}{told}_{storage}{f'_seed{seed}' if seed else ''}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        container.save(path, tensors(kind, storage, parts, seed) | {mark: torch.zeros(1) for mark in marks}, {})
    return path


def _stored(prefix: str, table: Table, storage: str, seed: int) -> Tensors:
    """As the kind of file of its own is drawn, under a prefix."""
    stored = PLAIN[storage].store(table, draw(table, "whole", seed))
    return {prefix + name: tensor for name, tensor in stored.tensors.items()}
