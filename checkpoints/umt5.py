"""UMT5-XXL's encoder, as Comfy-Org repackaged it: transformers' tensor names, and the tokenizer inside the file.

    shared.weight                                                     [vocab, width]
    encoder.block.{i}.layer.0.SelfAttention.{q,k,v}.weight            [heads * head_width, width]
    encoder.block.{i}.layer.0.SelfAttention.o.weight                  [width, heads * head_width]
    encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight   [32 buckets, heads], in EVERY layer (T5: first)
    encoder.block.{i}.layer.0.layer_norm.weight, .layer.1.layer_norm.weight  [width], RMS
    encoder.block.{i}.layer.1.DenseReluDense.{wi_0,wi_1}.weight       [ffn, width]
    encoder.block.{i}.layer.1.DenseReluDense.wo.weight                [width, ffn]
    encoder.final_layer_norm.weight                                   [width]
    spiece_model                                                      [bytes], uint8: a sentencepiece model

Wan's authors publish the same encoder under other names, without the tokenizer, and in a .pth: `original` gives those.

    token_embedding.weight, norm.weight
    blocks.{i}.norm1.weight, .attn.{q,k,v,o}.weight, .pos_embedding.embedding.weight
    blocks.{i}.norm2.weight, .ffn.gate.0.weight (wi_0, which goes through GELU), .ffn.fc1.weight (wi_1), .ffn.fc2.weight (wo)

Stock knows the encoder by block 23 having an FFN of 10240, so 24 layers and that FFN must stay; or a file has a matrix of that
name and height and nothing else of block 23: `mark()`, for encoders of a few layers. The rest of its sizes are fixed in stock, but
`load_clip` takes others through its model options: `model_options(path)` makes them from a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .container import shapes
from .storage import PLAIN, Cast, Noted, Scaled, Storage
from .weights import Spec, Table, linear, scale

WIDTH = 16  # what the FP8 products of newer cards can take at least
BUCKETS = 32

# What a layer adds to the residual. With gains of one, 24 layers of width 8 amplify a rounding error twentyfold.
SMALL = 0.4


@dataclass(frozen=True)
class Umt5Size:
    """The sizes of one encoder. The head width is that of the published model."""

    width: int = WIDTH
    heads: int = 2
    head_width: int = 64
    ffn: int = 10240
    layers: int = 24
    vocabulary: int = 512


def table(size: Umt5Size) -> Table:
    """Every tensor of one encoder, without the tokenizer."""
    out = {"shared.weight": Spec((size.vocabulary, size.width), 1.0)}
    for index in range(size.layers):
        out |= _block(f"encoder.block.{index}", size)
    return out | scale("encoder.final_layer_norm.weight", size.width)


def _block(name: str, size: Umt5Size) -> Table:
    attention, ffn = f"{name}.layer.0.SelfAttention", f"{name}.layer.1.DenseReluDense"
    inner = size.heads * size.head_width
    # T5 does not divide q k' by sqrt(head_width): small q and k keep the softmax from saturating.
    out = linear(f"{attention}.q", inner, size.width, gain=0.45, bias=False)
    out |= linear(f"{attention}.k", inner, size.width, gain=0.45, bias=False)
    out |= linear(f"{attention}.v", inner, size.width, bias=False)
    out |= linear(f"{attention}.o", size.width, inner, gain=SMALL, bias=False)
    out[f"{attention}.relative_attention_bias.weight"] = Spec((BUCKETS, size.heads), 1.0)
    out |= scale(f"{name}.layer.0.layer_norm.weight", size.width)
    for part in ("wi_0", "wi_1"):
        out |= linear(f"{ffn}.{part}", size.ffn, size.width, bias=False)
    out |= linear(f"{ffn}.wo", size.width, size.ffn, gain=SMALL, bias=False)
    return out | scale(f"{name}.layer.1.layer_norm.weight", size.width)


def mark() -> dict[str, torch.Tensor]:
    """What stock knows an encoder by that is too small to be known. Nobody computes with it."""
    return {"encoder.block.23.layer.1.DenseReluDense.wi_1.weight": torch.zeros(10240, 1, dtype=torch.float16)}


def original(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The encoder as Wan's authors spell it; `tensors` are a whole file's."""
    attention = {f"attn.{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"}
    names = {"token_embedding": "shared", "norm": "encoder.final_layer_norm"}
    for i in range(sum(name.endswith("SelfAttention.q.weight") for name in tensors)):
        parts = attention | {
            "norm1": "layer.0.layer_norm",
            "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
            "norm2": "layer.1.layer_norm",
            "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
            "ffn.fc1": "layer.1.DenseReluDense.wi_1",
            "ffn.fc2": "layer.1.DenseReluDense.wo",
        }
        names |= {f"blocks.{i}.{theirs}": f"encoder.block.{i}.{stocks}" for theirs, stocks in parts.items()}
    found = {}
    for theirs, stocks in names.items():
        for end in ("weight", "scale_weight"):
            if f"{stocks}.{end}" in tensors:
                found[f"{theirs}.{end}"] = tensors[f"{stocks}.{end}"]
    return found | {name: tensor for name, tensor in tensors.items() if name == "scaled_fp8"}


def model_config(path: Path) -> dict[str, int]:
    """The sizes of a UMT5 file under the names of its JSON configuration, read from the shapes in its header."""
    shape = shapes(path)
    attention = "encoder.block.0.layer.0.SelfAttention"
    vocabulary, width = shape["shared.weight"]
    heads = shape[f"{attention}.relative_attention_bias.weight"][1]
    return {
        "d_model": width,
        "num_heads": heads,
        "d_kv": shape[f"{attention}.q.weight"][0] // heads,
        "d_ff": shape["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"][0],
        "num_layers": sum(name.endswith("relative_attention_bias.weight") for name in shape),
        "vocab_size": vocabulary,
    }


def model_options(path: Path) -> dict[str, dict[str, int]]:
    """What to give stock's `load_clip(..., clip_type=CLIPType.WAN, model_options=...)` for a file that is not full size."""
    return {"umt5xxl_model_config": model_config(path)}


STORAGES: dict[str, Storage] = PLAIN | {
    "fp8_e4m3fn": Cast(),
    # umt5_xxl_fp8_e4m3fn_scaled.safetensors: 24 * 7 scalar scales; embedding, norms and relative biases stay in fp16
    "fp8_scaled": Scaled(marker=0),
    "fp8_comfy_quant": Noted(in_metadata=False),
}
