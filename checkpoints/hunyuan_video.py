"""HunyuanVideo 1.5, with Tencent's tensor names, as Comfy-Org's files have them.

    img_in.proj           Conv3d  [dim, 65, 1, 1, 1]   one token per latent pixel: noise 32, picture 32, mask 1
    time_in.mlp.0, .2     Linear  256 -> dim -> dim    SiLU between, after a sinusoid
    txt_in                the prompt (Qwen2.5-VL): .input_embedder text -> dim; .t_embedder.mlp.0, .2 and .c_embedder.linear_1,
                          .linear_2 make a vector of the timestep and of the mean token;
                          .individual_token_refiner.blocks.{0,1} for the prompt alone
    byt5_in               writing in the picture (ByT5): .layernorm, .fc1, .fc2, .fc3, 1472 -> 2048 -> 2048 -> dim
    vision_in.proj        the first picture (SigLIP): .0 LayerNorm, .1 Linear 1152 -> 1152, .3 Linear 1152 -> dim, .4 LayerNorm
    cond_type_embedding   [3, dim]                     which of these three a token comes from
    double_blocks.{i}     as Flux's, in another spelling; there are no single blocks
    final_layer           .linear dim -> 32, .adaLN_modulation.1 dim -> 2*dim

A double block has, for img and for txt: _mod.linear (dim -> 6*dim), _attn_qkv, _attn_q_norm and _attn_k_norm (RMS per head),
_attn_proj, _mlp.fc1, _mlp.fc2 (4*dim, GELU). A refiner block has norm1, norm2 (with weights), self_attn_qkv, self_attn_proj,
mlp.fc1, mlp.fc2 (SiLU), adaLN_modulation.1 (dim -> 2*dim: two gates). Linears have biases. Nothing reads the prompt after the last
block: its half of that block, but for keys and values, is idle.

Stock renames most of these on loading: `_mod.linear` to `_mod.lin`, `_attn_qkv` to `_attn.qkv`, `.mlp.fc1` to `.mlp.0` and so on.
It tells 1.5 by vision_in's 1152, and fixes byt5_in's 1472 and 2048, which together make 19 MB of this file. Heads are 128 wide.
"""

from __future__ import annotations

from dataclasses import dataclass

from .storage import PLAIN, Cast, Storage
from .weights import Spec, Table, conv, layer_norm, linear, scale

FREQUENCIES = 256
HEAD = 128
CHANNELS_IN = 65
CHANNELS_OUT = 32
VISION = 1152
GLYPHS, GLYPHS_BETWEEN = 1472, 2048
REFINERS = 2

# Shifts, scales and gates come from the timestep's vector alone, which two SiLUs have made small.
MODULATION = 2.0


@dataclass(frozen=True)
class HunyuanVideoSize:
    """The sizes of one transformer."""

    dim: int = 256
    layers: int = 3
    text: int = 64


SIZE = HunyuanVideoSize()


def table(size: HunyuanVideoSize) -> Table:
    """Every tensor of one transformer."""
    dim = size.dim
    out = conv("img_in.proj", dim, CHANNELS_IN, (1, 1, 1), fp8=False)
    out |= linear("time_in.mlp.0", dim, FREQUENCIES) | linear("time_in.mlp.2", dim, dim)
    out |= _prompt(size) | _glyphs(dim) | _picture(dim)
    out["cond_type_embedding.weight"] = Spec((3, dim), 0.5)
    for index in range(size.layers):
        out |= _double(f"double_blocks.{index}", dim)
    return (
        out | linear("final_layer.linear", CHANNELS_OUT, dim) | linear("final_layer.adaLN_modulation.1", 2 * dim, dim)
    )


def _prompt(size: HunyuanVideoSize) -> Table:
    dim = size.dim
    out = linear("txt_in.input_embedder", dim, size.text)
    out |= linear("txt_in.t_embedder.mlp.0", dim, FREQUENCIES) | linear("txt_in.t_embedder.mlp.2", dim, dim)
    out |= linear("txt_in.c_embedder.linear_1", dim, size.text) | linear("txt_in.c_embedder.linear_2", dim, dim)
    for index in range(REFINERS):
        name = f"txt_in.individual_token_refiner.blocks.{index}"
        out |= layer_norm(f"{name}.norm1", dim) | layer_norm(f"{name}.norm2", dim)
        out |= linear(f"{name}.self_attn_qkv", 3 * dim, dim) | linear(f"{name}.self_attn_proj", dim, dim)
        out |= linear(f"{name}.mlp.fc1", 4 * dim, dim) | linear(f"{name}.mlp.fc2", dim, 4 * dim)
        out |= linear(f"{name}.adaLN_modulation.1", 2 * dim, dim)
    return out


def _glyphs(dim: int) -> Table:
    out = layer_norm("byt5_in.layernorm", GLYPHS) | linear("byt5_in.fc1", GLYPHS_BETWEEN, GLYPHS)
    return out | linear("byt5_in.fc2", GLYPHS_BETWEEN, GLYPHS_BETWEEN) | linear("byt5_in.fc3", dim, GLYPHS_BETWEEN)


def _picture(dim: int) -> Table:
    out = layer_norm("vision_in.proj.0", VISION) | linear("vision_in.proj.1", VISION, VISION)
    return out | linear("vision_in.proj.3", dim, VISION) | layer_norm("vision_in.proj.4", dim)


def _double(name: str, dim: int) -> Table:
    out: Table = {}
    for stream in ("img", "txt"):
        out |= linear(f"{name}.{stream}_mod.linear", 6 * dim, dim, gain=MODULATION)
        out |= linear(f"{name}.{stream}_attn_qkv", 3 * dim, dim) | linear(f"{name}.{stream}_attn_proj", dim, dim)
        out |= scale(f"{name}.{stream}_attn_q_norm.weight", HEAD) | scale(f"{name}.{stream}_attn_k_norm.weight", HEAD)
        out |= linear(f"{name}.{stream}_mlp.fc1", 4 * dim, dim) | linear(f"{name}.{stream}_mlp.fc2", dim, 4 * dim)
    return out


STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}
