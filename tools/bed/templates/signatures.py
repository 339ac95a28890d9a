"""What a workflow file has to know of a node: its sockets, its widgets in the order of storage, its outputs.

Stock's are written out here, for ComfyUI 0.30; ours are read from the published schema. The browser tests hold both
against the real front end: a name or an order that is wrong makes another prompt than the twin's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ..paths import ROOT

SCHEMA = ROOT / "tests" / "unit" / "nodes" / "schema.json"
# The types that the front end draws as widgets. All others are sockets.
WIDGETS = ("COMBO", "FLOAT", "INT", "BOOLEAN", "STRING")


@dataclass(frozen=True)
class Signature:
    """`sockets`: name to type, a `?` before the type of one that may stay open. `hidden`: widgets of the front end alone,
    stored behind the widget they belong to and never sent. `sent`: what the front end sends besides."""

    sockets: dict[str, str]
    widgets: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]
    hidden: frozenset[str] = frozenset()
    sent: Mapping[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)


def _stock(sockets: str, widgets: str, outputs: str) -> Signature:
    """From words: `name:TYPE` for a socket, `+name` for a hidden widget, `TYPE` or `name:TYPE` for an output."""
    given = [word.split(":") for word in sockets.split()]
    made = [word.split(":") for word in outputs.split()]
    return Signature(
        sockets={words[0]: words[1] for words in given},
        widgets=tuple(word.lstrip("+") for word in widgets.split()),
        outputs=tuple((words[0], words[-1]) for words in made),
        hidden=frozenset(word[1:] for word in widgets.split() if word.startswith("+")),
    )


_VIDEO = "positive:CONDITIONING negative:CONDITIONING vae:VAE"
_SIZES = "width height length batch_size"
_PICTURES = "width height batch_size"
_CONDITIONED = "positive:CONDITIONING negative:CONDITIONING latent:LATENT"
_SAMPLER = "model:MODEL positive:CONDITIONING negative:CONDITIONING latent_image:LATENT"

STOCK = {
    "BasicGuider": _stock("model:MODEL conditioning:CONDITIONING", "", "GUIDER"),
    "CLIPTextEncode": _stock("clip:CLIP", "text", "CONDITIONING"),
    "CLIPVisionEncode": _stock("clip_vision:CLIP_VISION image:IMAGE", "crop", "CLIP_VISION_OUTPUT"),
    "CLIPVisionLoader": _stock("", "clip_name", "CLIP_VISION"),
    "ConditioningZeroOut": _stock("conditioning:CONDITIONING", "", "CONDITIONING"),
    "CreateVideo": _stock("images:IMAGE audio:?AUDIO", "fps bit_depth", "VIDEO"),
    "EmptyFlux2LatentImage": _stock("", _PICTURES, "LATENT"),
    "EmptyHunyuanLatentVideo": _stock("", _SIZES, "LATENT"),
    "EmptySD3LatentImage": _stock("", _PICTURES, "LATENT"),
    "Flux2Scheduler": _stock("", "steps width height", "SIGMAS"),
    "GetImageSize": _stock("image:IMAGE", "", "width:INT height:INT batch_size:INT"),
    "ImageScaleToTotalPixels": _stock("image:IMAGE", "upscale_method megapixels resolution_steps", "IMAGE"),
    "ImageStitch": _stock(
        "image1:IMAGE image2:?IMAGE", "direction match_image_size spacing_width spacing_color", "IMAGE"
    ),
    "KSampler": _stock(_SAMPLER, "seed +control_after_generate steps cfg sampler_name scheduler denoise", "LATENT"),
    "KSamplerSelect": _stock("", "sampler_name", "SAMPLER"),
    "KSamplerAdvanced": _stock(
        _SAMPLER,
        "add_noise noise_seed +control_after_generate steps cfg sampler_name scheduler start_at_step end_at_step "
        "return_with_leftover_noise",
        "LATENT",
    ),
    "LoadImage": _stock("", "image +upload", "IMAGE MASK"),
    "LoadVideo": replace(_stock("", "file +upload", "VIDEO"), sent={"video-preview": ""}),
    "LoraLoaderModelOnly": _stock("model:MODEL", "lora_name strength_model", "MODEL"),
    "MarkdownNote": _stock("", "text", ""),
    "ModelSamplingAuraFlow": _stock("model:MODEL", "shift", "MODEL"),
    "ModelSamplingSD3": _stock("model:MODEL", "shift", "MODEL"),
    "PrimitiveInt": _stock("", "value +control_after_generate", "INT"),
    "RandomNoise": _stock("", "noise_seed +control_after_generate", "NOISE"),
    "ReferenceLatent": _stock("conditioning:CONDITIONING latent:?LATENT", "", "CONDITIONING"),
    "SamplerCustomAdvanced": _stock(
        "noise:NOISE guider:GUIDER sampler:SAMPLER sigmas:SIGMAS latent_image:LATENT",
        "",
        "output:LATENT denoised_output:LATENT",
    ),
    "SaveImage": _stock("images:IMAGE", "filename_prefix", "images:IMAGE"),
    "SaveVideo": _stock("video:VIDEO", "filename_prefix format codec", "video:VIDEO"),
    "TextGenerate": _stock(
        "clip:CLIP image:?IMAGE video:?IMAGE audio:?AUDIO",
        "prompt max_length sampling_mode thinking use_default_template",
        "generated_text:STRING",
    ),
    "TrimVideoLatent": _stock("samples:LATENT", "trim_amount", "LATENT"),
    "VAEDecode": _stock("samples:LATENT vae:VAE", "", "IMAGE"),
    "VAEEncode": _stock("pixels:IMAGE vae:VAE", "", "LATENT"),
    "Wan22ImageToVideoLatent": _stock("vae:VAE start_image:?IMAGE", _SIZES, "LATENT"),
    "WanFirstLastFrameToVideo": _stock(
        f"{_VIDEO} clip_vision_start_image:?CLIP_VISION_OUTPUT clip_vision_end_image:?CLIP_VISION_OUTPUT "
        "start_image:?IMAGE end_image:?IMAGE",
        _SIZES,
        _CONDITIONED,
    ),
    "WanImageToVideo": _stock(
        f"{_VIDEO} clip_vision_output:?CLIP_VISION_OUTPUT start_image:?IMAGE", _SIZES, _CONDITIONED
    ),
    "WanVaceToVideo": _stock(
        f"{_VIDEO} control_video:?IMAGE control_masks:?MASK reference_image:?IMAGE",
        f"{_SIZES} strength",
        f"{_CONDITIONED} trim_latent:INT",
    ),
}


@cache
def signature(class_type: str) -> Signature:
    """The signature of a stock node of the table above, or of one of ours."""
    return STOCK.get(class_type) or _ours(class_type)


def _ours(class_type: str) -> Signature:
    node = json.loads(SCHEMA.read_text(encoding="utf-8"))[class_type]
    widgets = [item for item in node["inputs"] if item["type"] in WIDGETS]
    return Signature(
        sockets={
            item["id"]: ("?" if item["optional"] else "") + item["type"]
            for item in node["inputs"]
            if item["type"] not in WIDGETS
        },
        widgets=tuple(item["id"] for item in widgets),
        outputs=tuple((kind, kind) for kind in node["outputs"]),
        defaults={item["id"]: item["default"] for item in widgets if "default" in item},
    )
