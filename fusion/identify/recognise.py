"""What a weight file holds, told before anything is loaded.

Choosing the VAE in the text encoder loader is an easy slip. Stock answers it minutes and gigabytes later with a message about
shapes; here it costs one header read and the answer names the right node. Families are asked first, by name and shape; then stock's
own detection, with the file's tensors unread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.sd

from ...memory import Checkpoint, Extent, WeightFile
from ..base import file_formats
from ..base.errors import WrongFile
from ..base.family import Family, Role
from ..families import family_of
from ..weights.meta_tensor import tensors_of

# The parts of a patch, in the spellings of LoRA, LoHa, LoKr, GLoRA, OFT, BOFT and of plain differences.
LORA_PART = re.compile(
    r"[._]lora(_linear_layer)?[._](A|B|up|down)\b|\.(lokr_w[12]|hada_w[12]_[ab]|[ab][12]\.weight$|oft_blocks|diff(_b)?$|set_weight$)"
)
# What ComfyUI's VAEs have that no other model has, in the spellings of their origins.
VAE_PARTS = (
    "decoder.conv_in.weight", "decoder.conv_in.conv.weight", "decoder.conv1.weight", "decoder.up_blocks.0.resnets.0.norm1.weight",
    "first_stage_model.decoder.conv_in.weight", "decoder.layers.0.weight", "taesd_decoder.1.weight",
)  # fmt: skip

# Where whole checkpoints have their text encoders and VAE.
BESIDE_THE_MODEL = ("cond_stage_model.", "conditioner.embedders.", "text_encoders.", "first_stage_model.", "vae.")


def header_of(tensors: Mapping[str, Any], path: str = "") -> WeightFile:
    """As much of a header as a family looks at, of tensors that stock has read from a file without one."""
    extents = {
        name: Extent(name, "", tuple(tensor.shape), 0, 0)
        for name, tensor in tensors.items()
        if hasattr(tensor, "shape")
    }
    return WeightFile(Path(path), 0, extents, {})


def elsewhere(names: Iterable[str]) -> str | None:
    """For files that no loader of ours takes: what it is, and where it goes."""
    names = set(names)
    if any(LORA_PART.search(name) for name in names):
        return "a LoRA: choose it in a stock Load LoRA node, after the loader"
    if any(
        name.endswith("vision_model.embeddings.class_embedding") or name == "visual.class_embedding" for name in names
    ):
        return "a CLIP vision model: choose it in the stock Load CLIP Vision node"
    return None


def role_of(source: Checkpoint) -> Role | None:
    """What stock would take a file for that no family knows. A whole checkpoint is a diffusion model here."""
    tensors = tensors_of(source, text=False)
    # Stock's detection takes what it looks for to be whole, and fails in all ways where it is not.
    with contextlib.suppress(Exception):
        if comfy.sd.detect_te_model(tensors) is not None:
            return Role.TEXT
    if stocks_kind(tensors) is not None:
        return Role.DIFFUSION
    return Role.VAE if any(name in tensors for name in VAE_PARTS) else None


def stocks_kind(tensors: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """What stock's detection finds a diffusion model to be, and before which prefix; None: nothing."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    with contextlib.suppress(Exception):  # as above
        for one in (prefix, ""):
            found = comfy.model_detection.detect_unet_config(tensors, one)
            if found is not None:
                return one, found
    return None


def require_stocks(path: str) -> None:
    """Raise `WrongFile` where a file that stock is to load is of a format that it does not read."""
    reason = file_formats.refusal(path, vram_budget=0)
    if reason is not None:
        raise WrongFile(f"{path} {reason}")


def known(header: WeightFile, wanted: Role) -> Family | None:
    """The file's family, if one knows it. Raises `WrongFile` if that belongs in another loader."""
    family = family_of(header)
    if family is not None and family.role is not wanted.told_by:
        raise WrongFile(f"{header.path} is a {family.words}: choose it in the {_loader(family.role, header)}.")
    return family


def check(source: Checkpoint, wanted: Role) -> Family | None:
    """The file's family, if one knows it. Raises `WrongFile` if the file plainly belongs in another loader; a kind that nobody
    knows passes: stock may."""
    header = source.files[0]
    family = known(header, wanted)
    if family is not None:
        return family
    if (place := elsewhere(header.extents)) is not None:
        raise WrongFile(f"{header.path} is {place}.")
    role = role_of(source)
    if role not in (wanted.told_by, None):
        raise WrongFile(f"{header.path} is a {role.words}: choose it in the {_loader(role, header)}.")
    return None


def _loader(role: Role, header: WeightFile) -> str:
    """Where a file of this role goes: a whole checkpoint, whose text encoder and VAE may be what was wanted of it, into the loader
    that takes all of them."""
    is_whole = any(name.startswith(BESIDE_THE_MODEL) for name in header.extents)
    return Role.CHECKPOINT.loader if role is Role.DIFFUSION and is_whole else role.loader
