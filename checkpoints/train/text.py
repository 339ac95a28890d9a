"""UMT5's encoder over short captions. The weights' names and shapes: `checkpoints.text.umt5`.

Stock pads every prompt to 512 tokens, and gives zeros where a prompt has ended. Here are only as
many as the longest caption has.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..text import BUCKETS, Umt5Size, umt5
from ..toys.words import END, PAD
from .tensors import Tensors, count_blocks, linear, rms_norm, start

EPSILON = 1e-6
MAX_DISTANCE = 128
GAINS = {"shared": 1.0, "relative_attention_bias": 0.5}


def new(size: Umt5Size, seed: int, device: torch.device | str) -> Tensors:
    """An encoder that learned nothing yet."""
    return start(umt5(size), seed, device, GAINS)


def buckets(length: int, device: torch.device | str) -> torch.Tensor:
    """The relative bias's row for each pair of places, int64 [query, key]."""
    places = torch.arange(length, device=device)
    distance = places[None, :] - places[:, None]
    half, exact = BUCKETS // 2, BUCKETS // 4
    near = distance.abs()
    far = exact + (torch.log(near.clamp(min=1) / exact) / math.log(MAX_DISTANCE / exact) * (half - exact)).long()
    return (distance > 0) * half + torch.where(near < exact, near, far.clamp(max=half - 1))


def encode(weights: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Tokens int64 [B, L] to features [B, L, width] in `dtype`; zeros behind a caption's end."""
    batch, length = ids.shape
    there = alive(ids)
    hidden = torch.zeros(batch, 1, 1, length, device=ids.device).masked_fill(~there[:, None, None], -1e9)
    near = buckets(length, ids.device)
    x = F.embedding(ids, weights["shared.weight"])
    for i in range(count_blocks(weights, "encoder.block.")):
        name = f"encoder.block.{i}.layer.0"
        relative = weights[f"{name}.SelfAttention.relative_attention_bias.weight"]  # [buckets, heads]
        y = rms_norm(x, weights[f"{name}.layer_norm.weight"], EPSILON).to(dtype)
        q, k, v = (
            linear(weights, f"{name}.SelfAttention.{part}", y).unflatten(-1, (relative.shape[1], -1)).transpose(1, 2)
            for part in "qkv"
        )
        bias = relative[near].permute(2, 0, 1)
        scores = (q @ k.transpose(-1, -2)).float() + bias + hidden  # T5 does not divide by sqrt(head width)
        mixed = (scores.softmax(-1).to(dtype) @ v).transpose(1, 2).flatten(2)
        x = x + linear(weights, f"{name}.SelfAttention.o", mixed)
        name = f"encoder.block.{i}.layer.1"
        y = rms_norm(x, weights[f"{name}.layer_norm.weight"], EPSILON).to(dtype)
        gate, up = (linear(weights, f"{name}.DenseReluDense.{part}", y) for part in ("wi_0", "wi_1"))
        x = x + linear(weights, f"{name}.DenseReluDense.wo", F.gelu(gate, approximate="tanh") * up)
    out = rms_norm(x, weights["encoder.final_layer_norm.weight"], EPSILON)
    return (out * there[..., None]).to(dtype)


def alive(ids: torch.Tensor) -> torch.Tensor:
    """bool [B, L]: the tokens up to the end, itself among them."""
    ended = (ids == END).cumsum(1) - (ids == END).long()
    return (ended == 0) & (ids != PAD)
