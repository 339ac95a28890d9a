"""Wan 2.1 and 2.2 video transformers, with the tensor names of the original and of all ComfyUI files.

    patch_embedding      Conv3d  [dim, in, 1, 2, 2]      one token per 2x2 latent pixels
    text_embedding.0,.2  Linear  text -> dim -> dim      GELU between
    time_embedding.0,.2  Linear  256 -> dim -> dim       SiLU between, after a sinusoid of 256
    time_projection.1    Linear  dim -> 6*dim            SiLU before; shift, scale, gate for attention and for the FFN
    blocks.{i}           .modulation [1, 6, dim], .self_attn, .norm3, .cross_attn, .ffn.0, .ffn.2 (norm1, norm2: no weights)
    head                 .modulation [1, 2, dim], .head Linear dim -> out*1*2*2

An attention has q, k, v, o with biases, and RMS gains norm_q, norm_k over the full width. What the kinds add:

    I2V          img_emb (CLIP's 1280 -> dim), and k_img, v_img, norm_k_img in every cross attention; in = 16 + 4 + 16
    FLF2V        as I2V, and img_emb.emb_pos [1, 2*257, 1280] for the two pictures
    VACE         vace_patch_embedding (in 16 + 16 + 64) and vace_blocks.{j} with before_proj (j = 0 only) and after_proj
    Fun control  as I2V with in = 16 + 16 + 16, and ref_conv, which turns a reference latent into extra tokens
    Wan 2.2 I2V  in = 16 + 4 + 16 and nothing else: no CLIP any more. Stock takes it for a T2V
    Wan 2.2 5B   in = out = 48, for the Wan 2.2 VAE

Stock reads every size from the file but two. Heads are dim // 128, hence the width of 256 here. The width of the text
embedding is fixed at 4096 unless the file's metadata overrides it, in `config`: these files do, to go with a tiny UMT5.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from .storage import PLAIN, Cast, Noted, Scaled, Storage
from .umt5 import WIDTH as TEXT_WIDTH
from .weights import Spec, Table, conv, layer_norm, linear, scale

FREQUENCIES = 256
CLIP_WIDTH = 1280
CLIP_TOKENS = 257
PATCH = (1, 2, 2)

# Trained cross attention is sharp. Gains of one would average 512 tokens, nearly all of them padding, and hide the text.
SHARP = 2.0


@dataclass(frozen=True)
class WanSize:
    """The sizes of one transformer; what is zero is not there."""

    dim: int = 256
    ffn: int = 640
    layers: int = 4
    text: int = TEXT_WIDTH
    channels_in: int = 16
    channels_out: int = 16
    image: bool = False
    image_positions: int = 0
    vace_layers: int = 0
    vace_channels: int = 96
    reference_channels: int = 0


SIZES: dict[str, WanSize] = {
    "wan_t2v": WanSize(),
    "wan_i2v": WanSize(channels_in=36, image=True),
    "wan_flf2v": WanSize(channels_in=36, image=True, image_positions=2 * CLIP_TOKENS),
    "wan_vace": WanSize(vace_layers=2),
    "wan_fun_control": WanSize(channels_in=48, image=True, reference_channels=16),
    "wan22_i2v": WanSize(channels_in=36),
    "wan22_fun_control": WanSize(channels_in=52, reference_channels=16),
    "wan22_5b": WanSize(channels_in=48, channels_out=48),
}


def table(size: WanSize) -> Table:
    """Every tensor of one transformer."""
    dim = size.dim
    out = conv("patch_embedding", dim, size.channels_in, PATCH, fp8=False)
    out |= linear("text_embedding.0", dim, size.text) | linear("text_embedding.2", dim, dim)
    out |= linear("time_embedding.0", dim, FREQUENCIES) | linear("time_embedding.2", dim, dim)
    out |= linear("time_projection.1", 6 * dim, dim)
    if size.image:
        out |= _image_embedding(size)
    if size.reference_channels:
        out |= conv("ref_conv", dim, size.reference_channels, PATCH[1:], fp8=False)
    for index in range(size.layers):
        out |= _block(f"blocks.{index}", size)
    if size.vace_layers:
        out |= _vace(size)
    out |= linear("head.head", 4 * size.channels_out, dim)
    out["head.modulation"] = Spec((1, 2, dim), 0.05)
    return out


def _block(name: str, size: WanSize) -> Table:
    dim = size.dim
    out = {f"{name}.modulation": Spec((1, 6, dim), 0.05)}
    out |= _attention(f"{name}.self_attn", dim, gain=1.0)
    out |= layer_norm(f"{name}.norm3", dim)
    out |= _attention(f"{name}.cross_attn", dim, gain=SHARP)
    if size.image:
        out |= linear(f"{name}.cross_attn.k_img", dim, dim) | linear(f"{name}.cross_attn.v_img", dim, dim)
        out |= scale(f"{name}.cross_attn.norm_k_img.weight", dim)
    return out | linear(f"{name}.ffn.0", size.ffn, dim) | linear(f"{name}.ffn.2", dim, size.ffn)


def _attention(name: str, dim: int, gain: float) -> Table:
    out: Table = {}
    for part in "qkvo":
        out |= linear(f"{name}.{part}", dim, dim)
    return out | scale(f"{name}.norm_q.weight", dim, mean=gain) | scale(f"{name}.norm_k.weight", dim, mean=gain)


def _image_embedding(size: WanSize) -> Table:
    """LayerNorm, Linear, GELU (no weights, place 2), Linear, LayerNorm: CLIP's states [*, 1280] -> [*, dim]."""
    out = layer_norm("img_emb.proj.0", CLIP_WIDTH) | linear("img_emb.proj.1", CLIP_WIDTH, CLIP_WIDTH)
    out |= linear("img_emb.proj.3", size.dim, CLIP_WIDTH) | layer_norm("img_emb.proj.4", size.dim)
    if size.image_positions:
        out["img_emb.emb_pos"] = Spec((1, size.image_positions, CLIP_WIDTH), 0.5)
    return out


def _vace(size: WanSize) -> Table:
    """The side branch: block j feeds main block j * (layers // vace_layers)."""
    out = conv("vace_patch_embedding", size.dim, size.vace_channels, PATCH, fp8=False)
    for index in range(size.vace_layers):
        name = f"vace_blocks.{index}"
        out |= _block(name, size)
        if index == 0:
            out |= linear(f"{name}.before_proj", size.dim, size.dim)
        out |= linear(f"{name}.after_proj", size.dim, size.dim)
    return out


def metadata(size: WanSize) -> dict[str, str]:
    """The override that tells stock the width of the text embedding; published files have no need of it."""
    return {"config": json.dumps({"transformer": {"text_dim": size.text}})}


def in_block(layer: str) -> bool:
    """The layers that fp8 files made to be careful shrink: the blocks', not the embeddings and the head."""
    return layer.startswith(("blocks.", "vace_blocks."))


def _in_block_but_cross_output(layer: str) -> bool:
    return in_block(layer) and not layer.endswith("cross_attn.o")


def _input_scale(layer: str) -> float:
    # Both kinds that stock tells apart: it keeps the first and drops the second.
    return 1 / 64 if in_block(layer) else 1.0


STORAGES: dict[str, Storage] = PLAIN | {
    # wan2.1_*_fp8_e4m3fn.safetensors of Comfy-Org
    "fp8_e4m3fn": Cast(),
    # wan2.2_*_fp8_scaled.safetensors of Comfy-Org: every Linear, with scales for the inputs too
    "fp8_scaled": Scaled(marker=0, input_scale=_input_scale),
    # *_fp8_e4m3fn_scaled_KJ.safetensors of Kijai: the blocks' Linears only, all else in fp32
    "fp8_scaled_blocks": Scaled(marker=2, shape=(1,), rest=torch.float32, chosen=in_block),
    # the Wan files Comfy-Org publishes since the notes exist: one Linear of each block stays wide
    "fp8_comfy_quant": Noted(in_metadata=False, chosen=_in_block_but_cross_output),
    # the same by the letter of ComfyUI's QUANTIZATION.md
    "fp8_metadata": Noted(in_metadata=True, chosen=in_block),
}
