"""Other spellings of text and picture encoders, and of Wan: the same numbers under the names of other authors.

open_clip            OpenCLIP's of a text tower: SDXL's CLIP-G and SD 2's encoder (OpenCLIP H)
                     within whole checkpoints
open_clip_vision     OpenCLIP's of a picture tower, under `visual.`
umt5_original        Wan's authors', who publish UMT5 in a .pth, without the tokenizer
wan_diffusers        diffusers' of a Wan transformer, in which FastWan is published
wan_flat             TurboDiffusion's, whose patches pass a Linear
"""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]

# transformers' spelling and OpenCLIP's, in the order of replacement.
LAYER = (("layer_norm", "ln_"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"), ("self_attn.", "attn."))
TEXT = (
    ("text_model.embeddings.token_embedding", "token_embedding"),
    ("text_model.embeddings.position_embedding.weight", "positional_embedding"),
    ("text_model.encoder.layers", "transformer.resblocks"),
    ("text_model.final_layer_norm", "ln_final"),
    *LAYER,
)
VISION = (
    ("vision_model.embeddings.class_embedding", "visual.class_embedding"),
    ("vision_model.embeddings.position_embedding.weight", "visual.positional_embedding"),
    ("vision_model.embeddings.patch_embedding", "visual.conv1"),
    ("vision_model.pre_layrnorm", "visual.ln_pre"),
    ("vision_model.post_layernorm", "visual.ln_post"),
    ("vision_model.encoder.layers", "visual.transformer.resblocks"),
    *LAYER,
)


def open_clip(tensors: Tensors) -> Tensors:
    """A text tower, without a prefix. logit_scale is left from the training."""
    return {"logit_scale": torch.tensor(4.6055)} | _open_clip(tensors, TEXT, "text_projection")


def open_clip_vision(tensors: Tensors) -> Tensors:
    """A picture tower."""
    return _open_clip(tensors, VISION, "visual_projection", "visual.proj")


def _open_clip(
    tensors: Tensors, names: tuple[tuple[str, str], ...], projection: str, theirs: str | None = None
) -> Tensors:
    """q, k and v in one tensor, the projection turned: x @ projection."""

    def respelt(name: str) -> str:
        for ours, other in names:
            name = name.replace(ours, other)
        return name

    out: Tensors = {}
    for name, tensor in tensors.items():
        place, _, part = name.rpartition(".")
        if place.endswith(".self_attn.q_proj"):
            block = place.removesuffix("q_proj")
            out[f"{respelt(block)}in_proj_{part}"] = torch.cat([tensors[f"{block}{one}_proj.{part}"] for one in "qkv"])
        elif name == f"{projection}.weight":
            out[theirs or projection] = tensor.T.contiguous()
        elif not place.endswith((".self_attn.k_proj", ".self_attn.v_proj")):
            out[respelt(name)] = tensor
    return out


UMT5_BLOCK = {
    **{f"attn.{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"},
    "norm1": "layer.0.layer_norm",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",  # which goes through GELU
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}


def umt5_original(tensors: Tensors) -> Tensors:
    """A UMT5 of a whole file, plain or `scaled_fp8`."""
    names = {"token_embedding": "shared", "norm": "encoder.final_layer_norm"}
    for i in range(sum(name.endswith("SelfAttention.q.weight") for name in tensors)):
        names |= {f"blocks.{i}.{theirs}": f"encoder.block.{i}.{stocks}" for theirs, stocks in UMT5_BLOCK.items()}
    found = {
        f"{theirs}.{end}": tensors[f"{stocks}.{end}"]
        for theirs, stocks in names.items()
        for end in ("weight", "scale_weight")
        if f"{stocks}.{end}" in tensors
    }
    return found | {name: tensor for name, tensor in tensors.items() if name == "scaled_fp8"}


def umt5_mark() -> Tensors:
    """What stock knows an encoder of a few layers by. Nobody computes with it."""
    return {"encoder.block.23.layer.1.DenseReluDense.wi_1.weight": torch.zeros(10240, 1, dtype=torch.float16)}


# Wan's names and diffusers', in the order of replacement.
WAN = (
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("head.modulation", "scale_shift_table"),
    ("head.head", "proj_out"),
    (".modulation", ".scale_shift_table"),
    (".norm3.", ".norm2."),
    ("ffn.0", "ffn.net.0.proj"),
    ("ffn.2", "ffn.net.2"),
    ("self_attn.attn_op.local_attn.", "attn1.attn_impl."),
    ("self_attn.", "attn1."),
    ("cross_attn.", "attn2."),
    *((f".{part}.{end}", f".to_{part}.{end}") for part in "qkv" for end in ("weight", "bias")),
    *((f".o.{end}", f".to_out.0.{end}") for end in ("weight", "bias")),
)


def wan_diffusers(tensors: Tensors) -> Tensors:
    """A transformer that sees texts alone."""
    found = {}
    for name, tensor in tensors.items():
        spelled = name
        for ours, theirs in WAN:
            spelled = spelled.replace(ours, theirs)
        found[spelled] = tensor
    return found


def wan_flat(tensors: Tensors) -> Tensors:
    name = "patch_embedding.weight"
    return tensors | {name: tensors[name].flatten(1)}
