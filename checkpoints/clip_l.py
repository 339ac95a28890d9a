"""CLIP ViT-L's text tower, as clip_l.safetensors has it: transformers' tensor names.

    text_model.embeddings.token_embedding.weight      [49408, width]
    text_model.embeddings.position_embedding.weight   [77, width]
    text_model.encoder.layers.{i}                     .layer_norm1, .self_attn.{q,k,v,out}_proj, .layer_norm2, .mlp.fc1, .mlp.fc2
    text_model.final_layer_norm
    text_projection.weight                            [width, width], for the pooled output; Flux and SD 1.5 do without

Alone it is SD 1.5's encoder (CLIPType.STABLE_DIFFUSION), with a T5 Flux's (CLIPType.FLUX, [clip_l, t5xxl]), and it is one of
SD 3's (CLIPType.SD3).

Stock knows it by layer 0, and that there is no layer 22. Sizes go in through `load_clip`'s model options, but under the bare name
`model_config`: what stands under `clip_l_model_config`, stock overwrites for every file of this kind. The vocabulary is fixed. It
is most of this file, and the tokenizer is stock's own: prompts can be tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .container import shapes
from .storage import PLAIN, Cast, Storage
from .weights import Spec, Table, layer_norm, linear

WIDTH = 64
HEAD = 32  # 64 in the published model; no size in the file tells
FFN = 256
LAYERS = 4
VOCABULARY = 49408
TOKENS = 77
FIRST = "text_model.encoder.layers.0.mlp.fc1.weight"


def table(width: int = WIDTH, ffn: int = FFN, layers: int = LAYERS) -> Table:
    """Every tensor of one tower."""
    out = {
        "text_model.embeddings.token_embedding.weight": Spec((VOCABULARY, width), 0.5),
        "text_model.embeddings.position_embedding.weight": Spec((TOKENS, width), 0.5),
    }
    for index in range(layers):
        name = f"text_model.encoder.layers.{index}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            out |= linear(f"{name}.self_attn.{part}", width, width)
        out |= layer_norm(f"{name}.layer_norm1", width) | layer_norm(f"{name}.layer_norm2", width)
        out |= linear(f"{name}.mlp.fc1", ffn, width) | linear(f"{name}.mlp.fc2", width, ffn)
    out |= layer_norm("text_model.final_layer_norm", width)
    return out | linear("text_projection", width, width, bias=False)


def model_config(path: Path) -> dict[str, int]:
    """The sizes of a file under the names of its JSON configuration, read from the shapes in its header."""
    return config_of(shapes(path))


def config_of(shape: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The same of shapes by name."""
    ffn, width = shape[FIRST]
    return {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": width // HEAD,
        "num_hidden_layers": sum(name.endswith("layer_norm1.weight") for name in shape),
    }


def model_options(path: Path) -> dict[str, dict[str, int]]:
    """What to give stock's `load_clip(..., model_options=...)`, alone or joined with `t5xxl.model_options`."""
    return {"model_config": model_config(path)}


STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}
