"""CLIP-G's text tower (OpenCLIP ViT-bigG): a file of its own has CLIP-L's names (`clip_l.py`), whole checkpoints OpenCLIP's.

    transformer.resblocks.{i}   .ln_1, .attn.in_proj_weight [3*width, width] (q, k, v) and .in_proj_bias, .attn.out_proj,
                                .ln_2, .mlp.c_fc, .mlp.c_proj
    token_embedding.weight, positional_embedding, ln_final
    text_projection             [width, width], turned: x @ text_projection
    logit_scale                 of the training

So SDXL's checkpoints have it, and SD 2's, whose encoder (OpenCLIP H) is the same with fewer layers. Stock knows a file of its own
by layer 30, hence as many layers as the published one has.
"""

from __future__ import annotations

import torch

from . import clip_l
from .storage import PLAIN, Storage
from .weights import Table

FFN = 128
LAYERS = 32

Tensors = dict[str, torch.Tensor]


def table(width: int = clip_l.WIDTH, ffn: int = FFN, layers: int = LAYERS) -> Table:
    """Every tensor of one tower, as a file of its own has them."""
    return clip_l.table(width, ffn, layers)


def open_clip(tensors: Tensors) -> Tensors:
    """The same in OpenCLIP's spelling, without a prefix."""
    names = {
        "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
        "text_model.embeddings.position_embedding.weight": "positional_embedding",
    }
    parts = {
        ".layer_norm1.": ".ln_1.",
        ".layer_norm2.": ".ln_2.",
        ".self_attn.out_proj.": ".attn.out_proj.",
        ".mlp.fc1.": ".mlp.c_fc.",
        ".mlp.fc2.": ".mlp.c_proj.",
        "text_model.encoder.layers.": "transformer.resblocks.",
        "text_model.final_layer_norm.": "ln_final.",
    }
    out: Tensors = {"logit_scale": torch.tensor(4.6055)}
    for name, tensor in tensors.items():
        if ".self_attn.q_proj." in name:
            block, _, kind = name.replace("text_model.encoder.layers.", "transformer.resblocks.").partition(
                ".self_attn.q_proj."
            )
            joined = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            out[f"{block}.attn.in_proj_{kind}"] = torch.cat(joined)
        elif name == "text_projection.weight":
            out["text_projection"] = tensor.T.contiguous()
        elif ".k_proj." not in name and ".v_proj." not in name:
            spelt = names.get(name, name)
            for ours, theirs in parts.items():
                spelt = spelt.replace(ours, theirs)
            out[spelt] = tensor
    return out


STORAGES: dict[str, Storage] = PLAIN
