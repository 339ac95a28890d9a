"""Language models that serve as text encoders, with transformers' tensor names: Qwen3 4B and Gemma 2 2B.

    model.embed_tokens.weight                                   [vocab, width]
    model.layers.{i}.self_attn.q_proj.weight                    [heads * head_width, width]
    model.layers.{i}.self_attn.{k_proj,v_proj}.weight           [key_heads * head_width, width]: queries share a key
    model.layers.{i}.self_attn.o_proj.weight                    [width, heads * head_width]
    model.layers.{i}.self_attn.{q_norm,k_norm}.weight           [head_width], RMS per head; Qwen3 only
    model.layers.{i}.mlp.{gate_proj,up_proj,down_proj}.weight   SwiGLU; in Gemma the gate is a GELU
    model.layers.{i}.{input,post_attention}_layernorm.weight    [width], RMS
    model.layers.{i}.{pre,post}_feedforward_layernorm.weight    [width], RMS; Gemma only
    model.norm.weight                                           [width]

    qwen3    CLIPType.LUMINA2 (Z-Image) and FLUX2 (klein). Stock knows the 4B by its width of 2560, which must stay and makes
             19 MB of this file. Z-Image reads the layer before the last. klein reads layers 9, 18 and 27, more than there are
             here; for it, hand stock the class too, as one more of the model options:
             "qwen3_4b_class": partial(comfy.text_encoders.flux.Qwen3_4BModel, layer=[1, 2, 3])
             The tokenizer is stock's own, with ids far beyond this vocabulary. Encode from ids instead:
             clip.encode_from_tokens({"qwen3_4b": [[(5, 1.0), (17, 1.0)]]})
    gemma2   CLIPType.LUMINA2. Stock knows it by its fourth norm, and no size must stay. The tokenizer is in the file, as in the
             published ones: prompts can be tokenized

Everything else shrinks through `load_clip`'s model options, which `model_options(path)` makes from a file. Gemma adds one to the
weights of its norms, and multiplies what it embeds by the square root of the width. Stock fixes the width of a head, at 128 for
Qwen3 and at 256 for Gemma.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .container import shapes
from .spiece import spiece_model
from .storage import PLAIN, Cast, Noted, Scaled, Storage
from .weights import Spec, Table, linear, scale

# What a branch adds to the residual: twice four of them must not bury the token itself.
SMALL = 0.5


@dataclass(frozen=True)
class LlamaSize:
    """The sizes of one encoder."""

    width: int
    ffn: int
    heads: int
    key_heads: int
    head_width: int
    layers: int
    vocabulary: int
    gemma: bool = False


QWEN3 = LlamaSize(width=2560, ffn=32, heads=2, key_heads=1, head_width=128, layers=4, vocabulary=256)
GEMMA2 = LlamaSize(width=64, ffn=128, heads=2, key_heads=1, head_width=256, layers=4, vocabulary=512, gemma=True)


def table(size: LlamaSize) -> Table:
    """Every tensor of one encoder, without the tokenizer."""
    out = {
        "model.embed_tokens.weight": Spec(
            (size.vocabulary, size.width), 1 / math.sqrt(size.width) if size.gemma else 1.0
        )
    }
    for index in range(size.layers):
        out |= _layer(f"model.layers.{index}", size)
    return out | _norm("model.norm", size)


def _layer(name: str, size: LlamaSize) -> Table:
    width, query, key = size.width, size.heads * size.head_width, size.key_heads * size.head_width
    out: Table = {}
    for part, rows in (("q", query), ("k", key), ("v", key)):
        out |= linear(f"{name}.self_attn.{part}_proj", rows, width, bias=False)
    out |= linear(f"{name}.self_attn.o_proj", width, query, gain=SMALL, bias=False)
    for part in ("gate", "up"):
        out |= linear(f"{name}.mlp.{part}_proj", size.ffn, width, bias=False)
    out |= linear(f"{name}.mlp.down_proj", width, size.ffn, gain=SMALL, bias=False)
    out |= _norm(f"{name}.input_layernorm", size)
    if size.gemma:
        # Here a norm ends a branch, so its gain is what the branch adds.
        out |= _norm(f"{name}.post_attention_layernorm", size, SMALL) | _norm(f"{name}.pre_feedforward_layernorm", size)
        return out | _norm(f"{name}.post_feedforward_layernorm", size, SMALL)
    out |= _norm(f"{name}.post_attention_layernorm", size)
    return (
        out
        | scale(f"{name}.self_attn.q_norm.weight", size.head_width)
        | scale(f"{name}.self_attn.k_norm.weight", size.head_width)
    )


def _norm(name: str, size: LlamaSize, gain: float = 1.0) -> Table:
    return {f"{name}.weight": Spec((size.width,), 0.1, gain - 1.0 if size.gemma else gain)}


def gemma_spiece() -> bytes:
    """Gemma's tokenizer in little, serialized: UMT5's, but for the special pieces. A prompt begins with one of them."""
    return spiece_model(bos_id=2, unk_id=3)


def gemma_spiece_tensor() -> torch.Tensor:
    """The tokenizer as the files carry it: uint8 [bytes]."""
    return torch.frombuffer(bytearray(gemma_spiece()), dtype=torch.uint8)


def model_config(path: Path) -> dict[str, int]:
    """The sizes of a file under the names of its JSON configuration, read from the shapes in its header."""
    return config_of(shapes(path))


def config_of(shape: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The same of the shapes themselves."""
    head_width = 256 if _is_gemma(shape) else shape["model.layers.0.self_attn.q_norm.weight"][0]
    vocabulary, width = shape["model.embed_tokens.weight"]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shape["model.layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": sum(name.endswith("input_layernorm.weight") for name in shape),
        "num_attention_heads": shape["model.layers.0.self_attn.q_proj.weight"][0] // head_width,
        "num_key_value_heads": shape["model.layers.0.self_attn.k_proj.weight"][0] // head_width,
    }


def model_options(path: Path) -> dict[str, dict[str, int]]:
    """What to give stock's `load_clip(..., clip_type=CLIPType.LUMINA2, model_options=...)` for a file that is not full size."""
    name = "gemma2_2b" if _is_gemma(shapes(path)) else "qwen3_4b"
    return {f"{name}_model_config": model_config(path)}


def options_of(size: LlamaSize) -> dict[str, dict[str, int]]:
    """The same for a file of Qwen3 of which the sizes are known."""
    sizes = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads,
    }
    return {"qwen3_4b_model_config": sizes}


def _is_gemma(shape: Mapping[str, tuple[int, ...]]) -> bool:
    return "model.layers.0.post_feedforward_layernorm.weight" in shape


STORAGES: dict[str, Storage] = PLAIN | {
    "fp8_e4m3fn": Cast(),
    # qwen_3_4b_fp8_mixed.safetensors and its like
    "fp8_scaled": Scaled(marker=0),
    "fp8_comfy_quant": Noted(in_metadata=False),
}
