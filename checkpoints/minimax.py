"""MiniMax H3: prompt, audio and video in one stream of tokens, with the tensor names of Comfy-Org's files.

    video_patch_proj   Linear  96 -> dim     one token per 2x2 latent pixels of 24 channels
    audio_patch_proj   Linear  32 -> dim     one token per step and ear
    condition_proj     Linear  text -> dim   the prompt: Qwen3-VL's states after layer 50
    token_refiner      .blocks.{0,1}, for the prompt alone, without adaln_proj; .final_norm
    time_embedder      .proj_in, .proj_out: 256 -> between -> time, SiLU between, after a sinusoid
    rope.inv_freq      [16]                  the angles' speeds, the same for time, height and width
    blocks.{i}         for all tokens
    final_layer        .norm, .adaln_proj.linear time -> 2*dim, .video_out dim -> 96, .audio_out dim -> 32

A block has .norm1, .norm2 (RMS); .attn with qkv_proj (in one), q_norm, k_norm (RMS per head) and out_proj; .mlp.fc1 and .fc2
(SwiGLU, both halves in one); no biases; and .adaln_proj.linear, time -> 6*3*dim with a bias: shift, scale, gate for attention and
for the MLP, for each of the three sorts of tokens. Inside, attention is wider than the stream.

In a pruned file, `minimax_h3_pruned`, the timestep's vector is looked up instead, between two rows of adaln_t_table [steps, 8], and
goes into adaln_proj.linear without a SiLU; time_embedder is not there.

Published files have both ends, the timestep and the angles in fp32, whatever the rest is in; so do these. Stock reads every size
from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .storage import PLAIN, Cast, Storage, Stored
from .weights import Spec, Table, linear, scale

FREQUENCIES = 256
PATCH = 4 * 24
AUDIO = 32
ROTATIONS = 16
REFINERS = 2
MODALITIES = 3
CURVES = 8

WIDE = (
    "video_patch_proj.",
    "audio_patch_proj.",
    "time_embedder.",
    "adaln_t_table",
    "rope.",
    "final_layer.video_out.",
    "final_layer.audio_out.",
)


@dataclass(frozen=True)
class MiniMaxSize:
    """The sizes of one transformer; `steps` are the rows of a pruned file's table."""

    dim: int = 192
    heads: int = 2
    head: int = 128
    ffn: int = 384
    layers: int = 4
    text: int = 64
    between: int = 192
    time: int = 96
    steps: int = 0


SIZES = {"minimax_h3": MiniMaxSize(), "minimax_h3_pruned": MiniMaxSize(steps=65, time=CURVES)}


def table(size: MiniMaxSize) -> Table:
    """Every tensor of one transformer."""
    dim = size.dim
    out = linear("video_patch_proj", dim, PATCH) | linear("audio_patch_proj", dim, AUDIO)
    out |= linear("condition_proj", dim, size.text)
    if size.steps:
        out["adaln_t_table"] = Spec((size.steps, size.time), 0.5)
    else:
        out |= linear("time_embedder.proj_in", size.between, FREQUENCIES)
        out |= linear("time_embedder.proj_out", size.time, size.between)
    out["rope.inv_freq"] = Spec((ROTATIONS,), 0.1, 0.3)  # powers of a base, in the published ones
    for index in range(REFINERS):
        out |= _block(f"token_refiner.blocks.{index}", size)
    out |= scale("token_refiner.final_norm.weight", dim)
    for index in range(size.layers):
        name = f"blocks.{index}"
        out |= _block(name, size) | linear(f"{name}.adaln_proj.linear", 6 * MODALITIES * dim, size.time)
    out |= scale("final_layer.norm.weight", dim) | linear("final_layer.adaln_proj.linear", 2 * dim, size.time)
    return out | linear("final_layer.video_out", PATCH, dim) | linear("final_layer.audio_out", AUDIO, dim)


def _block(name: str, size: MiniMaxSize) -> Table:
    inner = size.heads * size.head
    out = scale(f"{name}.norm1.weight", size.dim) | scale(f"{name}.norm2.weight", size.dim)
    out |= linear(f"{name}.attn.qkv_proj", 3 * inner, size.dim, bias=False)
    out |= linear(f"{name}.attn.out_proj", size.dim, inner, bias=False)
    out |= scale(f"{name}.attn.q_norm.weight", size.head) | scale(f"{name}.attn.k_norm.weight", size.head)
    out |= linear(f"{name}.mlp.fc1", 2 * size.ffn, size.dim, bias=False)
    return out | linear(f"{name}.mlp.fc2", size.dim, size.ffn, bias=False)


@dataclass(frozen=True)
class Islands:
    """Another layout, but that what published files keep in fp32 stays in fp32."""

    sea: Storage

    def store(self, table: Table, tensors: Mapping[str, torch.Tensor]) -> Stored:
        stored = self.sea.store(table, tensors)
        return Stored(
            stored.tensors | {name: tensors[name] for name in tensors if name.startswith(WIDE)}, stored.metadata
        )


STORAGES: dict[str, Storage] = {
    **{name: Islands(plain) for name, plain in PLAIN.items()},
    "fp8_e4m3fn": Islands(Cast(rest=torch.bfloat16)),
}
