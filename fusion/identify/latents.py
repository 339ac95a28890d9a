"""The latents of a model and of a VAE, told by their files' headers before either is loaded: the
number of channels, and whether they are of pictures or of videos.

A video that was sampled for another VAE cannot be decoded. Stock says so when it tries to, in
shapes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import comfy.model_detection

from ...memory import Checkpoint
from ..base import file_formats
from ..base.family import Family, Role
from .checkpoint_info import CheckpointInfo

# The first tensor of a decoder that takes the latents, in Wan's VAEs and in those of pictures.
WAN_FIRST, PICTURE_FIRST = "decoder.conv1.weight", "decoder.conv_in.weight"
# A tensor of picture VAEs, in the original spelling and in diffusers'.
PICTURE_PARTS = "decoder.mid.block_1.norm1.weight", "decoder.mid_block.resnets.0.norm1.weight"
FOLDED = "bn.running_mean"  # in a picture VAE that folds 2x2 latents into channels


class Latents(NamedTuple):
    """channels; dimensions: 2 of pictures, 3 of videos."""

    channels: int
    dimensions: int

    def __str__(self) -> str:
        return f"{self.channels} channels of {'videos' if self.dimensions == 3 else 'pictures'}"


def of_model(info: CheckpointInfo) -> Latents | None:
    """The latents that stock has for this kind of diffusion model, or None."""
    if info.stocks_kind is None:
        return None
    prefix, config = info.stocks_kind
    # Stock's detection assumes a sound file, and fails in many ways if it is not.
    with contextlib.suppress(Exception):
        kind = comfy.model_detection.model_config_from_unet_config(config, info.tensors, prefix)
        return Latents(kind.latent_format.latent_channels, kind.latent_format.latent_dimensions)
    return None


def of_vae(info: CheckpointInfo) -> Latents | None:
    """The latents of a VAE if its header tells; else None."""
    extents, family = info.header.extents, info.family
    if family is not None and family.role is Role.VAE and WAN_FIRST in extents:
        return Latents(extents[WAN_FIRST].shape[1], 3)
    first = extents.get(PICTURE_FIRST)
    if first is None or extents.keys().isdisjoint(PICTURE_PARTS) or len(first.shape) != 4:
        return None
    return Latents(first.shape[1] * (4 if FOLDED in extents else 1), 2)


def mismatch(model: str, vae: str) -> str | None:
    """Why this VAE does not fit this diffusion model, in a sentence, both given by their paths.
    None: headers tell no difference.

    Only for a family that names its VAEs, because the latents of some models have more channels
    than their VAE's.
    """
    if not (file_formats.has_header(model) and file_formats.has_header(vae)):
        return None
    with Checkpoint.open(model) as source:
        info = CheckpointInfo.of(source)
        family = info.family
        made = of_model(info) if family is not None and family.vaes else None
    with Checkpoint.open(vae) as source:
        taken = of_vae(CheckpointInfo.of(source))
    if family is None or made is None or taken is None or made == taken:
        return None
    return (
        f"{Path(vae).name} is not the VAE for {Path(model).name}: the model's latents have {made}, those of this VAE {taken}. "
        f"Choose {vae_for(family, made.channels)} in the VAE loader."
    )


def vae_for(family: Family, channels: int) -> str:
    """The VAE for a model of this family with so many latent channels, for a message."""
    return (family.vaes or {}).get(channels, f"a VAE for latents of {channels} channels")
