"""Transformers as loads: Wan, Flux, Z-Image, and Qwen3 as a text encoder. x is what passes from block to block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...fusion.base.cost import Cost
from ...fusion.families.wan.cost import TEXT_TOKENS
from ..end_to_end.bounds import Language, Sizes, qwen3_forward, wan_forward
from ..end_to_end.pictures import HALF, Klein, ZImage, klein_forward, z_image_forward
from .load import Linear, Load

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
        # The input of both o, and the hidden values. That of q, k and v, of the cross attention's q and of the feed-forward
        # comes from norms.
        "round": 2 * x + hidden,
        "rounded norm": 3 * x,
        "round heads": x,
    }
    held = ACTIVATIONS * tokens * size.dim * HALF
    d, layers = size.dim, size.layers
    linears = (
        Linear(tokens, d, d, 6 * layers),
        Linear(TEXT_TOKENS, d, d, 2 * layers),
        Linear(tokens, d, size.ffn, layers),
        Linear(tokens, size.ffn, d, layers, after="gelu"),
    )
    return transformer(cost, own, passes, held, linears, tokens)


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
    return _flux(cost, d, size.double, size.single, (pixels // 4, size.tokens), size.ffn * d, "gelu")


def flux2(size: Klein, pixels: int) -> Load:
    """pixels: of the latent, a token each."""
    cost = klein_forward(size, pixels)
    return _flux(cost, size.dim, size.double, size.single, (pixels, size.tokens), 3 * size.dim, "swiglu")


def _flux(cost: Cost, dim: int, double: int, single: int, streams: tuple[int, int], ffn: int, activation: str) -> Load:
    """ffn: of the hidden values. streams: tokens of the picture and of the prompt, which a double block multiplies apart."""
    tokens = sum(streams)
    one = float(tokens * dim)
    x, hidden = (double + single) * one, float((double + single) * tokens * ffn)
    of_two = x + double * one  # passes that a single block has once and a double block twice
    passes = {
        "modulate": of_two,
        "rope": x,
        "gate": of_two,
        activation: hidden,
        "layout": single * float(tokens * (dim + ffn)),  # of a single block stock puts both halves together
        "round": x + hidden,
        "rounded norm": of_two,
        "round heads": x,
    }
    held = HALF * tokens * (ACTIVATIONS * dim + ffn)
    wide = 2 * ffn if activation == "swiglu" else ffn
    linears = [
        linear
        for rows in streams
        for linear in (
            Linear(rows, dim, 3 * dim, double),
            Linear(rows, dim, dim, double),
            Linear(rows, dim, wide, double),
            Linear(rows, ffn, dim, double, after=activation),
        )
    ]
    # What a single block's second product reads is put together of both halves.
    linears += [Linear(tokens, dim, 3 * dim + wide, single), Linear(tokens, dim + ffn, dim, single)]
    return transformer(cost, cost.attention, passes, held, linears, tokens)


def transformer(
    cost: Cost, own: float, passes: Mapping[str, float], held: float, linears: Iterable[Linear], tokens: int
) -> Load:
    """own: operations of attention of tokens among themselves, a prompt's among them or not; the others are to a prompt."""
    to_prompt = cost.attention - own
    return Load(
        cost.gemm,
        own={HEAD: own},
        to_prompt={HEAD: to_prompt} if to_prompt else {},
        passes=passes,
        weights=cost.weights,
        held=held,
        linears=tuple(linears),
        tokens=tokens,
    )


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
        "round": x + hidden,
        "rounded norm": 2 * x,
        "round heads": x,
    }
    held = HALF * (picture + size.tokens) * size.dim * (ACTIVATIONS + 2)
    d, both = size.dim, picture + size.tokens
    linears = [
        linear
        for rows, blocks in ((both, size.layers), (picture, size.refiners), (size.tokens, size.refiners))
        for linear in (
            Linear(rows, d, 3 * d, blocks),
            Linear(rows, d, d, blocks),
            Linear(rows, d, size.ffn, 2 * blocks),  # two, whose results are multiplied by each other in a pass
            Linear(rows, size.ffn, d, blocks),
        )
    ]
    return transformer(cost, cost.attention, passes, held, linears, both)


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
