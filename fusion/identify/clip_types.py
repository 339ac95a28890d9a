"""Stock's types of text encoders. One file may serve several models, each with its own tokenizer
and reading, so stock asks the user for the type. `auto` finds it for a file that serves a single
one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.sd
import comfy.utils

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

# Encoders that read a prompt beside another one alone, and the other.
BESIDE: Mapping[Any, tuple[str, str]] = {
    TE.BYT5_SMALL_GLYPH: ("ByT5", "Qwen2.5-VL 7B (HunyuanImage, HunyuanVideo 1.5)"),
    TE.JINA_CLIP_2: ("Jina CLIP 2", "Gemma 3 4B (NewBie)"),
}
FOR_WAN = "UMT5-XXL, such as umt5_xxl_fp8_e4m3fn_scaled.safetensors"  # beside which T5-XXL is easily mistaken
# Where Qwen3-VL's authors have its layers, and where stock's networks have them.
LAYERS = {"model.language_model.": "model."}


def kind_of(info: CheckpointInfo, wanted: str) -> Any:
    """Stock's CLIPType for a file. wanted: the type that the user chose, in lower case, or
    `AUTO`."""
    path, family, model = info.path, info.family, encoder_of(info)
    if model in BESIDE:
        own, other = BESIDE[model]
        raise WrongFile(f"{path} is {own}, which reads prompts beside {other} alone: choose that file as well.")
    told = family.kind(info.header) if family is not None and family.kind is not None else None
    if wanted == Kind.WAN.name.lower() and model is TE.T5_XXL and told != Kind.WAN.name:
        raise WrongFile(f"{path} is T5-XXL, and Wan reads another encoder: choose {FOR_WAN}.")
    if wanted != AUTO:
        found = getattr(Kind, wanted.upper(), None)
        if found is None:
            raise WrongFile(f"{path}: ComfyUI has no text encoder type {wanted!r} for a single file.")
        return found
    if told is not None:
        return getattr(Kind, told)
    several = SEVERAL.get(model)
    if several is not None:
        raise WrongFile(
            f"{path} serves several models, and the file does not tell which: choose a type ({choices_of(several)})."
            + (f" For Wan choose {FOR_WAN} instead." if model is TE.T5_XXL else "")
        )
    return Kind.STABLE_DIFFUSION


def encoder_of(info: CheckpointInfo) -> Any:
    """Stock's TEModel of a file. Raises `WrongFile` if it is no text encoder."""
    with naming(info.path):
        model = info.stocks_encoder
    if model is None:
        raise WrongFile(f"{info.path} is no text encoder that ComfyUI knows: it lacks the names of all of them.")
    return model


def choices_of(types: Mapping[str, str]) -> str:
    """Types, each with the model that it is for, in words."""
    return ", ".join(f"{kind} for {use}" for kind, use in types.items())


def as_read(tensors: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """A file's tensors under the names by which stock's encoder of this CLIPType takes them. For
    Flux.2 klein it reads Qwen3-VL as a Qwen3, and leaves its layers where they are, as it does for
    no other type."""
    is_seen = any(name.startswith("model.visual.deepstack_merger_list.") for name in tensors)
    if kind not in (Kind.FLUX, Kind.FLUX2) or not is_seen:
        return dict(tensors)
    found: dict[str, Any] = comfy.utils.state_dict_prefix_replace(dict(tensors), LAYERS)
    return found
