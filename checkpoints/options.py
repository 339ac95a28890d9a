"""The sizes of a small encoder's file, as stock ComfyUI wants to be told them.

`load_clip(paths, clip_type, model_options=model_options(*paths))` loads files of UMT5, T5, CLIP-L,
Qwen3 4B and Gemma 2 at any size: each has an option of its own. A picture tower's sizes are for the
class that stock would build: `clip_vision_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .container import shapes
from .text import CLIP_HEAD, VISION_HEADS, VISION_PATCH, VISION_SIDE, LlamaSize, llama

Shapes = Mapping[str, tuple[int, ...]]
Config = dict[str, int]

T5_ATTENTION = "encoder.block.0.layer.0.SelfAttention"
CLIP_FIRST = "text_model.encoder.layers.0.mlp.fc1.weight"
GEMMA_MARK = "model.layers.0.post_feedforward_layernorm.weight"


def model_options(*paths: Path) -> dict[str, Config]:
    """What to give stock's `load_clip` for these files together, by the shapes in their headers."""
    options: dict[str, Config] = {}
    for found in map(shapes, paths):
        if CLIP_FIRST in found:
            # Under the bare name: what stands under `clip_l_model_config`, stock overwrites for
            # every file of this kind.
            options["model_config"] = clip_config(found)
        elif "shared.weight" in found:
            everywhere = T5_ATTENTION.replace(".0.", ".1.", 1) + ".relative_attention_bias.weight" in found
            options["umt5xxl_model_config" if everywhere else "t5xxl_model_config"] = t5_config(found)
        else:
            options[f"{'gemma2_2b' if GEMMA_MARK in found else 'qwen3_4b'}_model_config"] = llama_config(found)
    return options


def t5_config(shape: Shapes) -> Config:
    """Of a UMT5 or T5, under the names of its JSON configuration."""
    vocabulary, width = shape["shared.weight"]
    heads = shape[f"{T5_ATTENTION}.relative_attention_bias.weight"][1]
    return {
        "d_model": width,
        "num_heads": heads,
        "d_kv": shape[f"{T5_ATTENTION}.q.weight"][0] // heads,
        "d_ff": shape["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"][0],
        "num_layers": _count(shape, "SelfAttention.q.weight"),
        "vocab_size": vocabulary,
    }


def clip_config(shape: Shapes) -> Config:
    """Of a text tower."""
    ffn, width = shape[CLIP_FIRST]
    return {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": width // CLIP_HEAD,
        "num_hidden_layers": _count(shape, "layer_norm1.weight"),
    }


def llama_config(shape: Shapes) -> Config:
    """Of a Qwen3 or Gemma 2."""
    head = 256 if GEMMA_MARK in shape else shape["model.layers.0.self_attn.q_norm.weight"][0]
    vocabulary, width = shape["model.embed_tokens.weight"]
    layer = "model.layers.0."
    query, key = (shape[f"{layer}self_attn.{part}_proj.weight"][0] // head for part in "qk")
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shape[f"{layer}mlp.gate_proj.weight"][0],
        "num_hidden_layers": _count(shape, "input_layernorm.weight"),
        "num_attention_heads": query,
        "num_key_value_heads": key,
    }


def qwen3_options(size: LlamaSize) -> dict[str, Config]:
    """Of a Qwen3 whose sizes are known, and whose file may be packed."""
    return {"qwen3_4b_model_config": llama_config({name: spec.shape for name, spec in llama(size).items()})}


def clip_vision_config(path: Path) -> dict[str, Any]:
    """Of a picture tower in either spelling, for stock's `ClipVisionModel`.

    model = comfy.clip_vision.ClipVisionModel(clip_vision_config(path))
    model.load_sd(comfy.clip_vision.convert_to_transformers(state_dict, "visual."))
    """
    shape = shapes(path)
    projection, width = shape.get("visual_projection.weight") or shape["visual.proj"][::-1]
    layers = [size for name, size in shape.items() if name.endswith(("mlp.c_fc.bias", "mlp.fc1.bias"))]
    return {
        "model_type": "clip_vision_model",
        "hidden_act": "gelu",
        "hidden_size": width,
        "image_size": VISION_SIDE,
        "intermediate_size": layers[0][0],
        "layer_norm_eps": 1e-05,
        "num_attention_heads": VISION_HEADS,
        "num_channels": 3,
        "num_hidden_layers": len(layers),
        "patch_size": VISION_PATCH,
        "projection_dim": projection,
    }


def _count(shape: Shapes, end: str) -> int:
    return sum(name.endswith(end) for name in shape)
