"""What a weight file holds, told from its tensor names alone, before anything is loaded.

Choosing the VAE in the text encoder loader is an easy slip. Stock answers it minutes and gigabytes later with a
message about shapes; here it costs one header read and the answer names the right node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from ..memory import WeightFile, read_header

# The parts of a patch, in the spellings of LoRA, LoHa, LoKr, GLoRA, OFT, BOFT and of plain differences.
LORA_PART = re.compile(
    r"[._]lora(_linear_layer)?[._](A|B|up|down)\b|\.(lokr_w[12]|hada_w[12]_[ab]|[ab][12]\.weight$|oft_blocks|diff(_b)?$|set_weight$)"
)


class Kind(Enum):
    """The value says what it is and where it goes, as it stands in an error message."""

    WAN = "a Wan diffusion model: choose it in the FuseStream Diffusion Model Loader"
    T5 = "a T5 or UMT5 text encoder: choose it in the FuseStream Text Encoder Loader"
    WAN_VAE = "a Wan VAE: choose it in the FuseStream VAE Loader"
    LORA = "a LoRA: choose it in a stock Load LoRA node, after the loader"
    CLIP_VISION = "a CLIP vision model: choose it in the stock Load CLIP Vision node"
    OTHER = "none of the models FuseStream knows"


class WrongFile(ValueError):
    """A sound file in the wrong place, or one that lacks what its kind must have."""

    __module__ = "fusestream"  # what ComfyUI shows before the message: not a path of the user's disk


def recognise(names: Iterable[str]) -> Kind:
    """The kind of model whose tensors bear these `names`."""
    names = set(names)
    if any(LORA_PART.search(name) for name in names):
        return Kind.LORA
    if any(
        name.endswith("vision_model.embeddings.class_embedding") or name == "visual.class_embedding" for name in names
    ):
        return Kind.CLIP_VISION
    for prefix in ("", "model.diffusion_model."):
        if {f"{prefix}head.modulation", f"{prefix}blocks.0.self_attn.q.weight"} <= names:
            return Kind.WAN
    if "encoder.block.0.layer.0.SelfAttention.q.weight" in names:
        return Kind.T5
    if {"decoder.middle.0.residual.0.gamma", "decoder.head.0.gamma"} <= names:
        return Kind.WAN_VAE
    return Kind.OTHER


def inspect(path: str, wanted: Kind) -> WeightFile | None:
    """The checked header of `path`, or None for formats without one (.pt, .pth), which stock reads itself.

    Raises `WrongFile` if the file plainly belongs in another loader. A kind unknown here passes: stock may know it.
    """
    if Path(path).suffix.lower() not in (".safetensors", ".sft"):
        return None
    header = read_header(path)
    kind = recognise(header.extents)
    if kind not in (wanted, Kind.OTHER):
        raise WrongFile(f"{path} is {kind.value}.")
    return header
