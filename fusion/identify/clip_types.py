"""Stock's types of text encoders. One file may serve several models, each with its own tokenizer
and reading, so stock asks the user for the type. `auto` finds it for a file that serves a single
one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.sd

from ..base.errors import WrongFile
from ..files.completeness import naming
from .checkpoint_info import CheckpointInfo

AUTO = "auto"
TE, Kind = comfy.sd.TEModel, comfy.sd.CLIPType

# Encoders that serve several models: stock's types, and the models. All others get stock's first
# type.
SEVERAL: Mapping[Any, Mapping[str, str]] = {
    TE.T5_XXL: {
        "sd3": "SD 3", "chroma": "Chroma", "pixart": "PixArt", "ltxv": "LTX-Video", "mochi": "Mochi", "cogvideox": "CogVideoX",
        "hidream": "HiDream",
    },
    TE.CLIP_G: {"stable_diffusion": "the SDXL refiner", "stable_cascade": "Stable Cascade", "sd3": "SD 3", "hidream": "HiDream"},
    TE.QWEN3_4B: {"lumina2": "Z-Image", "flux2": "Flux.2 klein 4B"},
    TE.QWEN3_8B: {"flux2": "Flux.2 klein 9B", "ideogram4": "Ideogram 4"},
    TE.QWEN25_7B: {"qwen_image": "Qwen-Image", "hunyuan_image": "HunyuanImage", "longcat_image": "LongCat-Image"},
    TE.QWEN3VL_4B: {"flux2": "Flux.2 klein 4B", "krea2": "Krea 2", "mage": "Mage-Flow", "qwen_image": "writing text"},
    TE.QWEN3VL_8B: {
        "flux2": "Flux.2 klein 9B", "ideogram4": "Ideogram 4", "boogu": "Boogu", "joyimage": "JoyImage",
        "qwen_image": "writing text",
    },
    TE.GEMMA_2_2B: {"lumina2": "Lumina 2", "pixeldit": "PixelDiT"},
}  # fmt: skip


def kind_of(info: CheckpointInfo, wanted: str) -> Any:
    """Stock's CLIPType for a file. wanted: the type that the user chose, in lower case, or
    `AUTO`."""
    path, family, model = info.path, info.family, encoder_of(info)
    if wanted != AUTO:
        found = getattr(Kind, wanted.upper(), None)
        if found is None:
            raise WrongFile(f"{path}: ComfyUI has no text encoder type {wanted!r} for a single file.")
        return found
    told = family.kind(info.header) if family is not None and family.kind is not None else None
    if told is not None:
        return getattr(Kind, told)
    several = SEVERAL.get(model)
    if several is not None:
        raise WrongFile(
            f"{path} serves several models, and the file does not tell which: choose a type ({choices_of(several)})."
        )
    return Kind.STABLE_DIFFUSION


def encoder_of(info: CheckpointInfo) -> Any:
    """Stock's TEModel of a file. Raises `WrongFile` if it is no text encoder."""
    with naming(info.path):
        model = comfy.sd.detect_te_model(info.tensors)
    if model is None:
        raise WrongFile(f"{info.path} is no text encoder that ComfyUI knows: it lacks the names of all of them.")
    return model


def choices_of(types: Mapping[str, str]) -> str:
    """Types, each with the model that it is for, in words."""
    return ", ".join(f"{kind} for {use}" for kind, use in types.items())
