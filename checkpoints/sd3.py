"""Stable Diffusion 3.5 medium, with Stability's tensor names, without the prefix that whole checkpoints have.

    x_embedder.proj        Conv2d  [dim, 16, 2, 2]      one token per 2x2 latent pixels
    pos_embed              [1, n*n, dim]                added to the pixels: the middle of n by n places is cut out
    t_embedder.mlp.0, .2   Linear  256 -> dim -> dim    SiLU between, after a sinusoid
    y_embedder.mlp.0, .2   Linear  2048 -> dim -> dim   the pooled outputs of CLIP L (768) and G (1280)
    context_embedder       Linear  text -> dim
    joint_blocks.{i}       .context_block and .x_block, which attend jointly
    final_layer            .linear dim -> 64, .adaLN_modulation.1 dim -> 2*dim

Either half of a block has attn.qkv (in one), attn.ln_q and attn.ln_k (RMS per head), attn.proj, mlp.fc1 and .fc2 (4*dim, GELU), and
adaLN_modulation.1 (dim -> 6*dim: shift, scale, gate for attention and for the MLP). Linears have biases. Two exceptions:

    the last context_block has only attn.qkv, its gains, and adaLN_modulation.1 [2*dim]: nothing reads the prompt after it
    in the first blocks the pixels attend to themselves once more: x_block.attn2, as attn, and adaLN_modulation.1 [9*dim]

Stock makes the width 64 times what it calls the depth, and as many blocks as that: four blocks are 256 wide, with heads of 64.
"""

from __future__ import annotations

from dataclasses import dataclass

from .storage import PLAIN, Cast, Storage
from .umt5 import WIDTH as T5_WIDTH
from .weights import Spec, Table, conv, linear, scale

FREQUENCIES = 256
HEAD = 64
CHANNELS = 16
POOLED = 768 + 1280


@dataclass(frozen=True)
class Sd3Size:
    """The sizes of one transformer."""

    layers: int = 4
    twice: int = 2  # how many blocks have attn2
    text: int = T5_WIDTH
    places: int = 16

    @property
    def dim(self) -> int:
        return HEAD * self.layers


SIZE = Sd3Size()


def table(size: Sd3Size) -> Table:
    """Every tensor of one transformer."""
    dim = size.dim
    out = conv("x_embedder.proj", dim, CHANNELS, (2, 2), fp8=False)
    out["pos_embed"] = Spec((1, size.places**2, dim), 0.7)  # sines and cosines, in the published one
    out |= linear("t_embedder.mlp.0", dim, FREQUENCIES) | linear("t_embedder.mlp.2", dim, dim)
    out |= linear("y_embedder.mlp.0", dim, POOLED) | linear("y_embedder.mlp.2", dim, dim)
    out |= linear("context_embedder", dim, size.text)
    for index in range(size.layers):
        name = f"joint_blocks.{index}"
        out |= _half(f"{name}.context_block", dim, last=index == size.layers - 1)
        out |= _half(f"{name}.x_block", dim, twice=index < size.twice)
    return (
        out | linear("final_layer.linear", 4 * CHANNELS, dim) | linear("final_layer.adaLN_modulation.1", 2 * dim, dim)
    )


def _half(name: str, dim: int, *, last: bool = False, twice: bool = False) -> Table:
    out = _queries(f"{name}.attn", dim)
    out |= linear(f"{name}.adaLN_modulation.1", (2 if last else 9 if twice else 6) * dim, dim)
    if last:
        return out
    out |= linear(f"{name}.attn.proj", dim, dim)
    if twice:
        out |= _queries(f"{name}.attn2", dim) | linear(f"{name}.attn2.proj", dim, dim)
    return out | linear(f"{name}.mlp.fc1", 4 * dim, dim) | linear(f"{name}.mlp.fc2", dim, 4 * dim)


def _queries(name: str, dim: int) -> Table:
    return linear(f"{name}.qkv", 3 * dim, dim) | scale(f"{name}.ln_q.weight", HEAD) | scale(f"{name}.ln_k.weight", HEAD)


STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}
