"""Z-Image, Lumina 2's successor, with the tensor names of Comfy-Org's files.

    x_embedder                   Linear  64 -> dim          one token per 2x2 latent pixels
    t_embedder.mlp.0, .2         Linear  256 -> dim -> 256  SiLU between, after a sinusoid; no wider than 1024 between
    cap_embedder.0, .1           RMS [text], Linear text -> dim: the prompt, Qwen3's states before its last layer
    x_pad_token, cap_pad_token   [1, dim]                   fill pixels and prompt up to multiples of 32
    noise_refiner.{0,1}          blocks for the pixels alone
    context_refiner.{0,1}        blocks for the prompt alone, without adaLN_modulation
    layers.{i}                   blocks for both, the prompt first
    final_layer                  .linear dim -> 64, .adaLN_modulation.1 256 -> dim

A block has .attention with qkv (in one) and out, without biases, and q_norm, k_norm (RMS per head); .feed_forward with w1, w2, w3
(SwiGLU, without biases); .adaLN_modulation.0, 256 -> 4*dim with a bias: a scale and a gate for either half, no shift; and four
RMS gains, of which attention_norm1 and 2 are for the one half, ffn_norm1 and 2 for the other:

    x += tanh(gate) * norm2(half(norm1(x) * (1 + scale)))

Stock knows the model by its width of 3840, which makes a block 362 MB: smaller files load while `narrow` is open, which tells
Z-Image by the padding tokens. Heads are 128 wide; the FFN is 8/3 of the width, rounded up to a multiple of 256.
"""

from __future__ import annotations

from dataclasses import dataclass

from .llama import QWEN3
from .storage import PLAIN, Cast, Storage
from .weights import Spec, Table, linear, scale

FREQUENCIES = 256
MODULATION = 256
HEAD = 128
PATCH = 64
REFINERS = 2
MULTIPLE = 256


@dataclass(frozen=True)
class ZImageSize:
    """The sizes of one transformer."""

    dim: int = 256
    layers: int = 4
    text: int = QWEN3.width

    @property
    def ffn(self) -> int:
        return -(-(8 * self.dim // 3) // MULTIPLE) * MULTIPLE


SIZE = ZImageSize()


def table(size: ZImageSize) -> Table:
    """Every tensor of one transformer."""
    dim, between = size.dim, min(size.dim, 1024)
    out = linear("x_embedder", dim, PATCH)
    out |= linear("t_embedder.mlp.0", between, FREQUENCIES) | linear("t_embedder.mlp.2", MODULATION, between)
    out |= scale("cap_embedder.0.weight", size.text) | linear("cap_embedder.1", dim, size.text)
    out |= {f"{name}_pad_token": Spec((1, dim), 1.0) for name in ("x", "cap")}
    for index in range(REFINERS):
        out |= _block(f"noise_refiner.{index}", size) | _block(f"context_refiner.{index}", size, modulated=False)
    for index in range(size.layers):
        out |= _block(f"layers.{index}", size)
    return out | linear("final_layer.linear", PATCH, dim) | linear("final_layer.adaLN_modulation.1", dim, MODULATION)


def _block(name: str, size: ZImageSize, *, modulated: bool = True) -> Table:
    dim = size.dim
    out = linear(f"{name}.attention.qkv", 3 * dim, dim, bias=False)
    out |= linear(f"{name}.attention.out", dim, dim, bias=False)
    out |= scale(f"{name}.attention.q_norm.weight", HEAD) | scale(f"{name}.attention.k_norm.weight", HEAD)
    out |= linear(f"{name}.feed_forward.w1", size.ffn, dim, bias=False)
    out |= linear(f"{name}.feed_forward.w2", dim, size.ffn, bias=False)
    out |= linear(f"{name}.feed_forward.w3", size.ffn, dim, bias=False)
    for norm in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
        out |= scale(f"{name}.{norm}.weight", dim)
    return out | linear(f"{name}.adaLN_modulation.0", 4 * dim, MODULATION) if modulated else out


STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}
