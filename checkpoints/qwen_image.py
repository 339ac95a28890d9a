"""Qwen-Image, with diffusers' tensor names, as Comfy-Org's files have them.

    img_in                   Linear  64 -> dim           one token per 2x2 latent pixels
    txt_norm, txt_in         RMS [text], Linear text -> dim: the prompt, Qwen2.5-VL's last states
    time_text_embed          .timestep_embedder.linear_1, .linear_2: 256 -> dim -> dim, SiLU between, after a sinusoid
    transformer_blocks.{i}   two streams that attend jointly
    norm_out.linear          Linear  dim -> 2*dim        scale and shift for the last LayerNorm
    proj_out                 Linear  dim -> 64

A block has .img_mod.1 and .txt_mod.1 (dim -> 6*dim, SiLU before: shift, scale, gate for attention and for the MLP); .img_mlp and
.txt_mlp with net.0.proj and net.2 (4*dim, GELU); and .attn with to_q, to_k, to_v, to_out.0 for the pixels, add_q_proj, add_k_proj,
add_v_proj, to_add_out for the prompt, and RMS gains per head: norm_q, norm_k, norm_added_q, norm_added_k. Linears have biases,
LayerNorms no weights. Nothing reads the prompt after the last block: its half of that block, but for keys and values, is idle.

Stock fixes the width at 24 heads of 128, and the prompt's at 3584, which makes a block 680 MB: smaller files load while `narrow`
is open.
"""

from __future__ import annotations

from dataclasses import dataclass

from .storage import PLAIN, Cast, Storage
from .weights import Table, linear, scale

FREQUENCIES = 256
HEAD = 128
PATCH = 64

# Shifts, scales and gates come from the timestep's vector alone, which two SiLUs have made small.
MODULATION = 2.0


@dataclass(frozen=True)
class QwenImageSize:
    """The sizes of one transformer."""

    dim: int = 256
    layers: int = 4
    text: int = 64


SIZE = QwenImageSize()


def table(size: QwenImageSize) -> Table:
    """Every tensor of one transformer."""
    dim = size.dim
    out = linear("img_in", dim, PATCH) | scale("txt_norm.weight", size.text) | linear("txt_in", dim, size.text)
    out |= linear("time_text_embed.timestep_embedder.linear_1", dim, FREQUENCIES)
    out |= linear("time_text_embed.timestep_embedder.linear_2", dim, dim)
    for index in range(size.layers):
        out |= _block(f"transformer_blocks.{index}", dim)
    return out | linear("norm_out.linear", 2 * dim, dim) | linear("proj_out", PATCH, dim)


def _block(name: str, dim: int) -> Table:
    out: Table = {}
    for stream in ("img", "txt"):
        out |= linear(f"{name}.{stream}_mod.1", 6 * dim, dim, gain=MODULATION)
        out |= linear(f"{name}.{stream}_mlp.net.0.proj", 4 * dim, dim) | linear(
            f"{name}.{stream}_mlp.net.2", dim, 4 * dim
        )
    for part in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
        out |= linear(f"{name}.attn.{part}", dim, dim)
    for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        out |= scale(f"{name}.attn.{norm}.weight", HEAD)
    return out


STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}
