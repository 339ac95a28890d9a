"""CLIP ViT-H's picture tower for Wan I2V, in two spellings of one set of weights.

    `clip_vision`            transformers' names, as in clip_vision_h.safetensors: vision_model.*, visual_projection
    `clip_vision_open_clip`  open_clip's names: visual.*, with q, k, v in one tensor and the projection transposed

Stock picks the configuration by the number of layers alone and fixes all sizes: 31 layers or more make it ViT-H with 32
layers, width 1280 and 632 million weights. A smaller file it does not know; its `load` returns None. But the class it
builds, `ClipVisionModel`, takes any configuration, so a small file loads through stock's own code all the same:

    model = comfy.clip_vision.ClipVisionModel(checkpoints.clip_vision.model_config(path))
    missing, unexpected = model.load_sd(comfy.clip_vision.convert_to_transformers(state_dict, "visual."))

The width must stay 1280, which Wan's img_emb is fixed to, and so must the 257 tokens. What shrinks is the number of layers
(Wan wants the states before the last one, so two is least), the FFN and the projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .container import shapes
from .storage import PLAIN, Cast, Storage
from .weights import Spec, Table, layer_norm, linear

HEADS = 16
PATCH = 14
IMAGE = 224
TOKENS = (IMAGE // PATCH) ** 2 + 1

# transformers' spelling and open_clip's, in the order of replacement
OPEN_CLIP_NAMES = (
    ("vision_model.embeddings.class_embedding", "visual.class_embedding"),
    ("vision_model.embeddings.position_embedding.weight", "visual.positional_embedding"),
    ("vision_model.embeddings.patch_embedding", "visual.conv1"),
    ("vision_model.pre_layrnorm", "visual.ln_pre"),
    ("vision_model.post_layernorm", "visual.ln_post"),
    ("vision_model.encoder.layers", "visual.transformer.resblocks"),
    ("layer_norm", "ln_"),
    ("mlp.fc1", "mlp.c_fc"),
    ("mlp.fc2", "mlp.c_proj"),
    ("self_attn.", "attn."),
)


@dataclass(frozen=True)
class ClipVisionSize:
    """The sizes of one picture tower."""

    width: int = 1280
    ffn: int = 256
    layers: int = 2
    projection: int = 64


SIZE = ClipVisionSize()


def table(size: ClipVisionSize) -> Table:
    """Every tensor of one picture tower, in transformers' spelling."""
    width = size.width
    out = {
        "vision_model.embeddings.class_embedding": Spec((width,), 0.5),
        "vision_model.embeddings.position_embedding.weight": Spec((TOKENS, width), 0.5),
        "vision_model.embeddings.patch_embedding.weight": Spec((width, 3, PATCH, PATCH), (3 * PATCH * PATCH) ** -0.5),
    }
    out |= layer_norm("vision_model.pre_layrnorm", width)  # sic
    for index in range(size.layers):
        name = f"vision_model.encoder.layers.{index}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            out |= linear(f"{name}.self_attn.{part}", width, width)
        out |= layer_norm(f"{name}.layer_norm1", width) | layer_norm(f"{name}.layer_norm2", width)
        out |= linear(f"{name}.mlp.fc1", size.ffn, width) | linear(f"{name}.mlp.fc2", width, size.ffn)
    out |= layer_norm("vision_model.post_layernorm", width)
    return out | linear("visual_projection", size.projection, width, bias=False)


def open_clip(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors in open_clip's spelling."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        place, _, part = name.rpartition(".")
        if place.endswith(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")):
            if place.endswith("q_proj"):
                block = place.removesuffix("q_proj")
                joined = torch.cat([tensors[f"{block}{one}_proj.{part}"] for one in "qkv"])
                out[f"{_respell(block)}in_proj_{part}"] = joined
        elif name == "visual_projection.weight":
            out["visual.proj"] = tensor.T.contiguous()
        else:
            out[_respell(name)] = tensor
    return out


def _respell(name: str) -> str:
    for ours, theirs in OPEN_CLIP_NAMES:
        name = name.replace(ours, theirs)
    return name


def model_config(path: Path) -> dict[str, Any]:
    """The configuration of a file in either spelling, for stock's `ClipVisionModel`; sizes come from the file's header."""
    shape = shapes(path)
    if "visual.proj" in shape:
        width, projection = shape["visual.proj"]
        layers = [shape[name] for name in shape if name.endswith("mlp.c_fc.bias")]
    else:
        projection, width = shape["visual_projection.weight"]
        layers = [shape[name] for name in shape if name.endswith("mlp.fc1.bias")]
    return {
        "model_type": "clip_vision_model",
        "hidden_act": "gelu",
        "hidden_size": width,
        "image_size": IMAGE,
        "intermediate_size": layers[0][0],
        "layer_norm_eps": 1e-05,
        "num_attention_heads": HEADS,
        "num_channels": 3,
        "num_hidden_layers": len(layers),
        "patch_size": PATCH,
        "projection_dim": projection,
    }


# Stock casts what it finds into its own dtype, plain fp8 included; scaled fp8 it does not know here.
STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}
