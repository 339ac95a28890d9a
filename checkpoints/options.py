"""The sizes of a small encoder's file, as stock ComfyUI wants to be told them.

`load_clip(paths, clip_type, model_options=model_options(*paths))` loads files of the kinds in
`text/` at any size: each has an option of its own, under the name that stock gives the encoder. The
sizes of an encoder's vision tower, and which layers are read, have no option: while
`narrow.opened` is open, stock takes those from the file. A picture tower's sizes are for the class
that stock would build: `clip_vision_config`.
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
BYT5_KEYS = 384  # stock's mark, too
CLIP_FIRST = "text_model.encoder.layers.0.mlp.fc1.weight"
LAYER = "model.layers.0."
WORDS = "model.embed_tokens.weight"
HEAD_NORM = f"{LAYER}self_attn.q_norm.weight"
GEMMA_MARK = f"{LAYER}post_feedforward_layernorm.weight"
GEMMA3_MARK = "model.layers.47.self_attn.q_norm.weight"
MINIMAX_MARK = "visual.deepstack_merger_list.0.norm.weight"
# The first product of a feed-forward: with a gate, and in older ones without.
T5_FIRST = tuple(f"encoder.block.0.layer.1.DenseReluDense.{name}.weight" for name in ("wi_0", "wi"))
PROJECTION = "text_embedding_projection."
# An encoder that stock builds without naming it looks its sizes up under no name.
UNNAMED = ""
BY_KEY_BIASES = {256: "qwen25_3b", 512: "qwen25_7b"}
QWEN3_BY_WIDTH = {1024: "qwen3_06b", 2048: "qwen3_2b", 2560: "qwen3_4b", 4096: "qwen3_8b"}
BY_WIDTH = {5120: "mistral3_24b", 3072: "ministral3_3b"}


def model_options(*paths: Path) -> dict[str, Config]:
    """What to give stock's `load_clip` for these files together, by the shapes in their headers."""
    return options_of(*map(shapes, paths))


def options_of(*files: Shapes) -> dict[str, Config]:
    """The same for files of these shapes."""
    options: dict[str, Config] = {}
    for found in files:
        if CLIP_FIRST in found:
            # Under the bare name: what stands under `clip_l_model_config`, stock overwrites for
            # every file of this kind.
            options["model_config"] = clip_config(found)
        elif "shared.weight" in found:
            options[f"{t5_name(found)}_model_config"] = t5_config(found)
        elif WORDS in found:
            options[f"{decoder_name(found)}_model_config"] = llama_config(found)
    return options


def t5_name(shape: Shapes) -> str:
    """What stock calls a UMT5, T5 or ByT5."""
    if shape[f"{T5_ATTENTION}.k.weight"][0] == BYT5_KEYS:
        return UNNAMED
    everywhere = T5_ATTENTION.replace(".0.", ".1.", 1) + ".relative_attention_bias.weight" in shape
    return "umt5xxl" if everywhere else "t5xxl"


def decoder_name(shape: Shapes) -> str:
    """What stock calls a language model, by the marks it goes by itself."""
    if GEMMA_MARK in shape:
        if GEMMA3_MARK in shape:
            return UNNAMED
        return "gemma3_4b" if HEAD_NORM in shape else "gemma2_2b"
    if MINIMAX_MARK in shape:
        return "qwen3vl_32b"
    biases = shape.get(f"{LAYER}self_attn.k_proj.bias")
    if biases is not None:
        return BY_KEY_BIASES[biases[0]]
    width = shape[WORDS][1]
    return QWEN3_BY_WIDTH[width] if HEAD_NORM in shape else BY_WIDTH.get(width, "llama")


def t5_config(shape: Shapes) -> Config:
    """Of a UMT5 or T5, under the names of its JSON configuration."""
    vocabulary, width = shape["shared.weight"]
    heads = shape[f"{T5_ATTENTION}.relative_attention_bias.weight"][1]
    ffn = next(shape[name] for name in T5_FIRST if name in shape)
    return {
        "d_model": width,
        "num_heads": heads,
        "d_kv": shape[f"{T5_ATTENTION}.q.weight"][0] // heads,
        "d_ff": ffn[0],
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
    """Of a language model. No size tells a head's width without norms of heads: stock fixes it."""
    head = shape.get(HEAD_NORM, (256 if GEMMA_MARK in shape else 128,))[0]
    vocabulary, width = shape[WORDS]
    query, key = (shape[f"{LAYER}self_attn.{part}_proj.weight"][0] // head for part in "qk")
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shape[f"{LAYER}mlp.gate_proj.weight"][0],
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
