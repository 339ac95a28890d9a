"""Transformers as loads: Wan, Flux, Z-Image, and Qwen3 as a text encoder. x is what passes from block to block."""

from __future__ import annotations

from dataclasses import dataclass

from ...fusion.cost import Cost
from ...fusion.families.wan.cost import TEXT_TOKENS
from ..end_to_end.bounds import Language, Sizes, qwen3_forward, wan_forward
from ..end_to_end.pictures import HALF, Klein, ZImage, klein_forward, z_image_forward
from .load import Load

HEAD = 128  # of all of them
ACTIVATIONS = 6  # of x: as fusion/families/*/need.py has them


def wan(size: Sizes, tokens: int) -> Load:
    cost = wan_forward(size, tokens)
    x, hidden = float(size.layers * tokens * size.dim), float(size.layers * tokens * size.ffn)
    own = cost.attention * tokens / (tokens + TEXT_TOKENS)
    passes = {
        "modulate": 2 * x,
        "norm": x,
        "rope": x,
        "query norm": x,
        "gate": 2 * x,
        "add": x,
        "gelu": hidden,
        # The input of q, k and v, of both o, of the cross attention's q and of the feed-forward; the hidden values are another.
        "round": 5 * x + hidden,
        "round heads": x,
    }
    held = ACTIVATIONS * tokens * size.dim * HALF
    return Load(
        cost.gemm,
        own={HEAD: own},
        to_prompt={HEAD: cost.attention - own},
        passes=passes,
        weights=cost.weights,
        held=held,
    )


@dataclass(frozen=True)
class Flux1:
    """Sizes of a Flux.1, whose blocks have a modulation each. ffn: of the width."""

    dim: int = 3072
    double: int = 19
    single: int = 38
    ffn: int = 4
    text: int = 4096
    tokens: int = 512
    channels: int = 64  # of four latent pixels, which are a token


def flux1(size: Flux1, pixels: int) -> Load:
    """pixels: of the latent, four in a token."""
    d, tokens = size.dim, pixels // 4 + size.tokens
    block = (4.0 + 2 * size.ffn) * d * d  # q, k, v and the projection; the feed-forward's way in and out
    count = size.double + size.single
    ends = 2.0 * d * (2 * pixels // 4 * size.channels + size.tokens * size.text)
    modulation = (2 * 6 * size.double + 3 * size.single) * d * d
    weights = HALF * (block * (2 * size.double + size.single) + modulation)
    cost = Cost(count * 2 * tokens * block + ends, count * 4.0 * tokens * tokens * d, weights)
    return _flux(cost, d, size.double, size.single, tokens, size.ffn * d, "gelu")


def flux2(size: Klein, pixels: int) -> Load:
    """pixels: of the latent, a token each."""
    cost, tokens = klein_forward(size, pixels), pixels + size.tokens
    return _flux(cost, size.dim, size.double, size.single, tokens, 3 * size.dim, "swiglu")


def _flux(cost: Cost, dim: int, double: int, single: int, tokens: int, ffn: int, activation: str) -> Load:
    """ffn: of the hidden values."""
    one = float(tokens * dim)
    x, hidden = (double + single) * one, float((double + single) * tokens * ffn)
    of_two = x + double * one  # passes that a single block has once and a double block twice
    passes = {
        "modulate": of_two,
        "rope": x,
        "gate": of_two,
        activation: hidden,
        "layout": single * float(tokens * (dim + ffn)),  # of a single block stock puts both halves together
        "round": of_two + x + hidden,
        "round heads": x,
    }
    held = HALF * tokens * (ACTIVATIONS * dim + ffn)
    return Load(cost.gemm, own={HEAD: cost.attention}, passes=passes, weights=cost.weights, held=held)


def z_image(size: ZImage, pixels: int) -> Load:
    """pixels: of the latent."""
    cost, picture = z_image_forward(size, pixels), pixels // size.patch**2
    tokens = size.layers * (picture + size.tokens) + size.refiners * (picture + size.tokens)
    x, hidden = float(tokens * size.dim), float(tokens * size.ffn)
    passes = {
        "modulate": 2 * x,
        "norm": 2 * x,
        "rope": x,
        "gate": 2 * x,
        "swiglu": hidden,
        "round": 3 * x + hidden,
        "round heads": x,
    }
    held = HALF * (picture + size.tokens) * size.dim * (ACTIVATIONS + 2)
    return Load(cost.gemm, own={HEAD: cost.attention}, passes=passes, weights=cost.weights, held=held)


def qwen3(size: Language, tokens: int = TEXT_TOKENS) -> Load:
    """An FP32 stream; stock has FP32 throughout, and widens each weight at its use."""
    cost = qwen3_forward(size, tokens)
    x, hidden = float(size.layers * tokens * size.width), float(size.layers * tokens * size.ffn)
    passes = {
        "modulate": 4 * x,  # in FP32
        "rope": x * size.heads * size.head_width / size.width,
        "add in product": 4 * x,
        "swiglu": 2 * hidden,
        "widen": cost.weights / HALF,
    }
    held = HALF * tokens * (2 * ACTIVATIONS * size.width + size.ffn)
    return Load(cost.gemm, own={HEAD: cost.attention}, passes=passes, weights=cost.weights, held=held)
