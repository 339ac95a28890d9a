"""The Wan 2.1 video transformer, latents channels last [B, T, H, W, 16]. The weights' names and
shapes: `wan.table`.

An fp32 stream around products in a dtype of choice. What stock computes of 512 text tokens, nearly
all of them the zeros behind a short prompt, is computed of one such token that counts as often as
there are of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .. import wan
from .tensors import Tensors, count_blocks, linear, rms_norm, start

HEAD = 128
EPSILON = 1e-6
THETA = 10000.0
PROMPT = 512  # tokens that stock gives
CHANNELS = 16
PIXELS = wan.PATCH[1] * wan.PATCH[2]
GAINS = {"head.head.weight": 0.0, "time_": 0.5, ".o.weight": 0.5, "ffn.2": 0.5}


def new(size: wan.WanSize, seed: int, device: torch.device | str) -> Tensors:
    """A transformer that learned nothing yet."""
    return start(wan.table(size), seed, device, GAINS)


def rotations(frames: int, height: int, width: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [tokens, 64] for tokens at (frame, row, column)."""
    pairs = (HEAD // 2 - 2 * (HEAD // 6), HEAD // 6, HEAD // 6)
    places = torch.meshgrid(*(torch.arange(n, device=device).float() for n in (frames, height, width)), indexing="ij")
    angles = []
    for place, count in zip(places, pairs, strict=True):
        frequencies = THETA ** (-torch.arange(count, device=device).float() / count)
        angles.append(place.reshape(-1, 1) * frequencies)
    angle = torch.cat(angles, 1)
    return angle.cos(), angle.sin()


@dataclass(frozen=True)
class Context:
    """The text for the blocks: features [B, L, dim], and their scores' bias, fp32 [B, L]."""

    features: torch.Tensor
    bias: torch.Tensor


def bias_of(there: torch.Tensor) -> torch.Tensor:
    """Zero for a prompt's tokens, bool [B, L]; the first behind them counts for all of stock's."""
    count = there.sum(1, keepdim=True)
    place = torch.arange(there.shape[1], device=there.device)[None]
    rest = torch.log((PROMPT - count).float())
    return torch.where(there, 0.0, torch.where(place == count, rest, -1e9))


BlockWeights = tuple[torch.Tensor, ...]
BlockCall = Callable[..., torch.Tensor]
BLOCK_NAMES = (
    "modulation",
    "norm3.weight",
    "norm3.bias",
    *(f"{a}.{part}.{of}" for a in ("self_attn", "cross_attn") for part in "qkvo" for of in ("weight", "bias")),
    *(f"{a}.norm_{part}.weight" for a in ("self_attn", "cross_attn") for part in "qk"),
    *(f"ffn.{i}.{of}" for i in (0, 2) for of in ("weight", "bias")),
)


def block(
    x: torch.Tensor, step: torch.Tensor, features: torch.Tensor, bias: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    *given: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """x fp32 [B, N, dim], step fp32 [B, 6, dim]; products in `features`' dtype; BLOCK_NAMES."""
    weights = dict(zip(BLOCK_NAMES, given, strict=True))
    dtype, dim = features.dtype, x.shape[-1]
    shift, scale, gate, shift_2, scale_2, gate_2 = (weights["modulation"] + step).chunk(6, 1)

    def heads(name: str, y: torch.Tensor) -> torch.Tensor:
        return linear(weights, name, y.to(dtype)).unflatten(-1, (-1, HEAD))

    def normed(name: str, part: str, y: torch.Tensor) -> torch.Tensor:
        flat = rms_norm(linear(weights, f"{name}.{part}", y.to(dtype)), weights[f"{name}.norm_{part}.weight"], EPSILON)
        return flat.unflatten(-1, (-1, HEAD))

    def turned(y: torch.Tensor) -> torch.Tensor:
        a, b = y.unflatten(-1, (HEAD // 2, 2)).unbind(-1)
        c, s = cos[:, None], sin[:, None]
        return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2).transpose(1, 2).to(dtype)

    y = F.layer_norm(x, (dim,), eps=EPSILON) * (1 + scale) + shift
    q, k = turned(normed("self_attn", "q", y)), turned(normed("self_attn", "k", y))
    mixed = F.scaled_dot_product_attention(q, k, heads("self_attn.v", y).transpose(1, 2))
    x = x + linear(weights, "self_attn.o", mixed.transpose(1, 2).flatten(2)) * gate

    y = F.layer_norm(x, (dim,), weights["norm3.weight"], weights["norm3.bias"], eps=EPSILON)
    q = normed("cross_attn", "q", y).transpose(1, 2).to(dtype)
    k = normed("cross_attn", "k", features).transpose(1, 2).to(dtype)
    scores = (q @ k.transpose(-1, -2)).float() * HEAD**-0.5 + bias[:, None, None]
    mixed = scores.softmax(-1).to(dtype) @ heads("cross_attn.v", features).transpose(1, 2)
    x = x + linear(weights, "cross_attn.o", mixed.transpose(1, 2).flatten(2))

    y = F.layer_norm(x, (dim,), eps=EPSILON) * (1 + scale_2) + shift_2
    inner = F.gelu(linear(weights, "ffn.0", y.to(dtype)), approximate="tanh")
    return x + linear(weights, "ffn.2", inner) * gate_2


class Transformer:
    """The network over weights that others hold and change. `one`: block, maybe compiled."""

    def __init__(self, weights: Tensors, one: BlockCall = block):
        self.weights = weights
        self.one = one

    def context(self, features: torch.Tensor, there: torch.Tensor) -> Context:
        """Features [B, L, text] for the blocks; those that are `there` [B, L] are the prompt's."""
        hidden = F.gelu(linear(self.weights, "text_embedding.0", features), approximate="tanh")
        return Context(linear(self.weights, "text_embedding.2", hidden), bias_of(there))

    def __call__(
        self, z: torch.Tensor, time: torch.Tensor, context: Context, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Noisy latents [B, T, H, W, 16], `time` [B] in 0 to 1 -> the noise's way, fp32."""
        dtype = context.features.dtype
        batch, frames, height, width, channels = z.shape
        rows, columns = height // 2, width // 2
        patches = (
            z.view(batch, frames, rows, 2, columns, 2, channels)
            .permute(0, 1, 2, 4, 6, 3, 5)
            .reshape(batch, -1, 4 * channels)
        )
        x = linear(self.weights, "patch_embedding", patches.to(dtype)).float()
        embedded = self._time(time).to(dtype)
        step = linear(self.weights, "time_projection.1", F.silu(embedded)).float().unflatten(-1, (6, -1))
        for i in range(count_blocks(self.weights, "blocks.")):
            given = [self.weights[f"blocks.{i}.{name}"] for name in BLOCK_NAMES]
            x = self.one(x, step, context.features, context.bias, cos, sin, *given)
        shift, scale = (self.weights["head.modulation"] + embedded.float()[:, None]).chunk(2, 1)
        x = F.layer_norm(x, (x.shape[-1],), eps=EPSILON) * (1 + scale) + shift
        out = linear(self.weights, "head.head", x.to(dtype)).float()
        out = out.view(batch, frames, rows, columns, 2, 2, channels)
        return out.permute(0, 1, 2, 4, 3, 5, 6).reshape(batch, frames, height, width, channels)

    def _time(self, time: torch.Tensor) -> torch.Tensor:
        half = wan.FREQUENCIES // 2
        frequencies = torch.exp(torch.arange(half, device=time.device).float() * (-math.log(10000) / half))
        turns = (time.float() * 1000)[:, None] * frequencies
        waves = torch.cat([turns.cos(), turns.sin()], 1)
        return linear(self.weights, "time_embedding.2", F.silu(linear(self.weights, "time_embedding.0", waves)))
