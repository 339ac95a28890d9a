"""Flux.1, Flux.2 klein and Chroma: two streams of tokens that attend jointly, then one. Black Forest Labs' tensor names.

    img_in               Linear  patch -> dim      one token per 2x2 latent pixels; in Flux.2 one per pixel
    txt_in               Linear  text -> dim
    double_blocks.{i}    .img_attn and .txt_attn with qkv (in one), norm.query_norm.scale, norm.key_norm.scale (RMS per head)
                         and proj; .img_mlp.0, .2 and .txt_mlp.0, .2
    single_blocks.{i}    .linear1: qkv and the MLP's way in, in one; .linear2: attention's and the MLP's way out, in one;
                         .norm.query_norm.scale, .norm.key_norm.scale
    final_layer.linear   Linear  dim -> patch

LayerNorms have no weights: shift, scale and gate come from a vector made of the timestep. Where they are made, tells the
kinds apart:

    Flux.1    time_in, guidance_in (256 -> dim -> dim, after a sinusoid) and vector_in (CLIP's pooled output) add up to the
              vector; every block has Linears of its own: .img_mod.lin, .txt_mod.lin [6*dim, dim], .modulation.lin [3*dim, dim].
              The MLP is 4*dim with a GELU. Every Linear has a bias
    Flux.2    time_in alone. One Linear does for all blocks: double_stream_modulation_img.lin, double_stream_modulation_txt.lin,
              single_stream_modulation.lin. The MLP is 3*dim, a SwiGLU, both halves in one. No biases
    Chroma    distilled_guidance_layer, five residual layers, makes the shifts, scales and gates of all blocks at once: [344, dim].
              No time_in, no modulation anywhere. Else as Flux.1
    but Chroma, all have final_layer.adaLN_modulation.1, Linear dim -> 2*dim

Stock renames every `.scale` to `.weight`. Heads are 128 wide, hence the width of 256 here, for two of them: with one, no
mistake in the order of heads would show. Sizes come from the file, but for those of Chroma's guidance layer: see `narrow`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .clip_l import WIDTH as POOLED_WIDTH
from .llama import QWEN3
from .storage import PLAIN, Cast, Storage
from .umt5 import WIDTH as T5_WIDTH
from .weights import Table, linear, scale

FREQUENCIES = 256
HEAD = 128
GUIDANCE_LAYERS = 5
GUIDANCE_INPUT = 64  # sinusoids: 16 of the timestep, 16 of the guidance, 32 of the row's number

# How large shifts, scales and gates are. Flux.1 sums three vectors before it makes them, and Chroma's layer is a sum of five;
# in Flux.2 there is the timestep's alone, which two SiLUs have made small.
MODULATION = 0.7
SHARED_MODULATION = 2.0


@dataclass(frozen=True)
class FluxSize:
    """The sizes of one transformer; what is zero is not there."""

    dim: int = 256
    double: int = 3
    single: int = 3
    text: int = T5_WIDTH
    patch: int = 64
    pooled: int = 0
    guidance: bool = False
    guidance_layer: int = 0
    shared: bool = False  # Flux.2: modulation for all blocks, gated MLP, no biases

    @property
    def ffn(self) -> int:
        return (3 if self.shared else 4) * self.dim

    @property
    def ffn_in(self) -> int:
        return 2 * self.ffn if self.shared else self.ffn


SIZES: dict[str, FluxSize] = {
    "flux1": FluxSize(pooled=POOLED_WIDTH, guidance=True),
    # klein reads three layers of Qwen3, one beside the other
    "flux2": FluxSize(text=3 * QWEN3.width, patch=128, shared=True),
    "chroma": FluxSize(guidance_layer=128),
}


def table(size: FluxSize) -> Table:
    """Every tensor of one transformer."""
    dim, bias = size.dim, not size.shared
    out = linear("img_in", dim, size.patch, bias=bias) | linear("txt_in", dim, size.text, bias=bias)
    if size.guidance_layer:
        out |= _guidance_layer(size)
    else:
        out |= embedder("time_in", dim, FREQUENCIES, bias=bias)
        out |= linear("final_layer.adaLN_modulation.1", 2 * dim, dim, bias=bias)
    if size.pooled:
        out |= embedder("vector_in", dim, size.pooled)
    if size.guidance:
        out |= embedder("guidance_in", dim, FREQUENCIES)
    if size.shared:
        for stream in ("img", "txt"):
            out |= linear(f"double_stream_modulation_{stream}.lin", 6 * dim, dim, gain=SHARED_MODULATION, bias=False)
        out |= linear("single_stream_modulation.lin", 3 * dim, dim, gain=SHARED_MODULATION, bias=False)
    for index in range(size.double):
        out |= _double(f"double_blocks.{index}", size)
    for index in range(size.single):
        out |= _single(f"single_blocks.{index}", size)
    return out | linear("final_layer.linear", size.patch, dim, bias=bias)


def embedder(name: str, out: int, into: int, *, bias: bool = True) -> Table:
    """Linear, SiLU, Linear."""
    return linear(f"{name}.in_layer", out, into, bias=bias) | linear(f"{name}.out_layer", out, out, bias=bias)


def _own_modulation(size: FluxSize) -> bool:
    return not size.shared and not size.guidance_layer


def _double(name: str, size: FluxSize) -> Table:
    dim, bias = size.dim, not size.shared
    out: Table = {}
    for stream in ("img", "txt"):
        if _own_modulation(size):
            out |= linear(f"{name}.{stream}_mod.lin", 6 * dim, dim, gain=MODULATION)
        out |= linear(f"{name}.{stream}_attn.qkv", 3 * dim, dim, bias=bias)
        out |= _head_norms(f"{name}.{stream}_attn")
        out |= linear(f"{name}.{stream}_attn.proj", dim, dim, bias=bias)
        out |= linear(f"{name}.{stream}_mlp.0", size.ffn_in, dim, bias=bias)
        out |= linear(f"{name}.{stream}_mlp.2", dim, size.ffn, bias=bias)
    return out


def _single(name: str, size: FluxSize) -> Table:
    dim, bias = size.dim, not size.shared
    out = linear(f"{name}.linear1", 3 * dim + size.ffn_in, dim, bias=bias)
    out |= linear(f"{name}.linear2", dim, dim + size.ffn, bias=bias) | _head_norms(name)
    return out | linear(f"{name}.modulation.lin", 3 * dim, dim, gain=MODULATION) if _own_modulation(size) else out


def _head_norms(name: str) -> Table:
    return scale(f"{name}.norm.query_norm.scale", HEAD) | scale(f"{name}.norm.key_norm.scale", HEAD)


def _guidance_layer(size: FluxSize) -> Table:
    name, width = "distilled_guidance_layer", size.guidance_layer
    out = linear(f"{name}.in_proj", width, GUIDANCE_INPUT)
    for index in range(GUIDANCE_LAYERS):
        out |= embedder(f"{name}.layers.{index}", width, width) | scale(f"{name}.norms.{index}.scale", width)
    return out | linear(f"{name}.out_proj", size.dim, width, gain=MODULATION)


STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}
