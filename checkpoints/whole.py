"""Whole checkpoints: a U-Net, its text encoders and its VAE in one file, each under the prefix that
the releases have.

    model.diffusion_model.          the U-Net
    first_stage_model.              the VAE
    cond_stage_model.transformer.   SD 1.5: CLIP-L, as a file of its own has it, without the last
    projection
    cond_stage_model.model.         SD 2.1: OpenCLIP H, in OpenCLIP's spelling
    conditioner.embedders.0.transformer., .1.model.   SDXL: CLIP-L, and CLIP-G in OpenCLIP's
    spelling

Beside these a file may have marks, tensors that only are there: `v_pred` and `ztsnr` of an SDXL
that predicts velocities.

They load while `narrow` is open. What an SDXL's CLIP-G pools is as wide as its tokens, which are
narrower here than the 1280 that the U-Net reads: it encodes prompts, and its U-Net samples with
others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from . import container, pictures, spellings, text, vaes
from .storage import PLAIN
from .weights import Table, draw

Tensors = dict[str, torch.Tensor]

MODEL, VAE = "model.diffusion_model.", "first_stage_model."
LAYERS = text.CLIP_LAYERS  # of each text encoder
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

    size: pictures.UnetSize
    texts: tuple[Text, ...]


CHECKPOINTS: Mapping[str, Whole] = {
    "sd15": Whole(pictures.UNETS["sd15"], (Text("cond_stage_model.transformer.", is_open_clip=False),)),
    "sd21": Whole(replace(pictures.UNETS["sd15"], linear=True), (Text("cond_stage_model.model.", is_open_clip=True),)),
    "sdxl": Whole(
        replace(pictures.UNETS["sdxl"], context=2 * text.CLIP_WIDTH),
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
        found |= _stored(MODEL, pictures.unet(entry.size), storage, seed)
    if "vae" in parts:
        found |= _stored(VAE, vaes.kl_vae(vaes.KL_VAES["sd_vae"]), storage, seed)
    for number, one in enumerate(entry.texts if "clip" in parts else ()):
        # Numbered, so that two encoders of one checkpoint differ.
        table = text.clip(ffn=text.CLIP_G_FFN) if one.is_open_clip else text.clip()
        own = _stored("", table, storage, seed + number)
        if one.is_open_clip:
            own = spellings.open_clip(own)
        else:
            del own["text_projection.weight"]
        found |= {one.prefix + name: tensor for name, tensor in own.items()}
    return found


def write(
    kind: str,
    folder: Path | str,
    storage: str = "fp16",
    parts: Collection[str] = PARTS,
    marks: Collection[str] = (),
    seed: int = 0,
) -> Path:
    """Make sure that the file is in `folder`. marks: names of empty tensors beside the parts."""
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
