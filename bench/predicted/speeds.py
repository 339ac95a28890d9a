"""Speeds of a card that nobody measured, by who computes and what: `card_rates.py` has the transformers' products and
attention; here are other sizes of heads, convolutions, and text encoders. The newest ComfyUI's are in `kitchen.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from ..card_rates import CUBLAS, MODELS, SLOW, STORED, Card, Who, rates_on, read, shares
from .load import Speeds

Kind = Literal["video", "picture", "u-net", "text"]
HEAD = 128  # of the rates in card_rates
OTHER_HEADS = (40, 64, 80, 160)
# torch's attention fills a head up to one of these; beyond the last it is taken to be as fast as there.
FILLED = {True: (64, 128, 192), False: (64, 96, 128, 192)}
TORCHS = {
    True: {64: "f16_aligned_64x64", 128: "f16_aligned_32x128"},
    False: {64: "sm_86 head 64", 96: "sm_86 head 96", 128: "sm_86 head 128"},
}
FP32_KERNEL = "f32_aligned_32x128"
OUR_HEADS = (64, 96, 128)
CONVOLUTION = "conv 3x3 16x96"
FP32_CORES = {
    True: 1 / 4,
    False: 1 / 2,
}  # their rate, of the tensor cores' with FP32 sums; no tensor core multiplies FP32
ENCODER_PARTS = 2  # into which `precise` splits what a text encoder's products read


@lru_cache(maxsize=8)
def model_of(turing: bool, slow: bool) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """The stored predictions of a generation, and what card_rates makes of them."""
    file, torchs = MODELS[turing]
    model = read(file)
    return model, shares(model, torchs, slow)


def speeds_on(card: Card, who: Who, kind: Kind, pass_bytes: Mapping[str, float], *, slow: bool = False) -> Speeds:
    """slow: with INT8 products of a Turing card at half of the sheet's rate. pass_bytes: of who computes."""
    model, share = model_of(card.turing, slow and card.turing)
    rates = rates_on(card, who, share)
    own = {HEAD: rates.own or rates.attention}
    to_prompt = {HEAD: rates.attention}
    for head in OTHER_HEADS:
        own[head] = to_prompt[head] = attention(card, who, head, model, slow)
    products, stored = rates.gemm, 1.0
    if kind in ("video", "picture"):
        stored = STORED.get(who, 1.0)
    if kind == "text":
        if who == "stock":
            products = own[HEAD] = card.tensor * FP32_CORES[card.turing] * CUBLAS
        elif who == "precise":
            products /= ENCODER_PARTS
    in_halves = rates_on(card, "fast", share).gemm if who in ("turbo", "sparse") else products
    convolutions = convolution(card, who, model)
    return Speeds(products, convolutions, in_halves, own, to_prompt, rates.memory, rates.bus, pass_bytes, stored)


def convolution(card: Card, who: Who, model: Mapping[str, Any]) -> float:
    """Where there is no prediction of ours, cuDNN's."""
    cudnn = card.tensor * CUBLAS
    tier = "precise" if who in ("precise", "stored") else "fast"
    found = model.get(f"{CONVOLUTION} {tier}")
    if who == "stock" or found is None:
        return cudnn
    share: float = _as_compiled(found)["share"]
    return max(cudnn, (card.tensor if tier == "precise" else card.half) * share)


def attention(card: Card, who: Who, head: int, model: Mapping[str, Any], slow: bool) -> float:
    """With heads of this size: torch's, or the fastest that a tier of ours offers."""
    fastest = torchs_attention(card, head, model)
    if who == "stock" or head not in OUR_HEADS:
        return fastest
    tiers = {"stored": ("precise",), "precise": ("precise",), "fast": ("fast",)}.get(
        who, ("precise", "fast", "turbo", "turbo_half", "turbo_int8")
    )
    peak = _peak_of_prediction(model)
    for tier in tiers:
        found = _as_compiled(model[f"attention {head} {tier}"], slow and card.turing)
        fastest = max(fastest, card.tensor * found["tflops"] / peak)
    return fastest


def torchs_attention(card: Card, head: int, model: Mapping[str, Any]) -> float:
    filled = next(size for size in FILLED[card.turing] if size >= head)
    kernels = TORCHS[card.turing]
    kernel = kernels[min(filled, max(kernels))]
    name = next(name for name in model if name.startswith("torch ") and kernel in name)
    share: float = _as_compiled(model[name])["share"]
    return card.tensor * share * head / filled


def fp32_attention(card: Card, model: Mapping[str, Any]) -> float:
    """torch's with heads of 128 in FP32, as its code for Turing has it: shared memory is busy all the time."""
    name = next(name for name in model if name.startswith("torch ") and FP32_KERNEL in name)
    rate: float = _as_compiled(model[name])["tflops"]
    return card.tensor * rate / _peak_of_prediction(model)


def _peak_of_prediction(model: Mapping[str, Any]) -> float:
    """TFLOP/s with FP32 sums of the card that the stored predictions begin with."""
    found = _as_compiled(model["attention 128 precise"])
    peak: float = found["tflops"] / found["share"]
    return peak


def _as_compiled(entry: Mapping[str, Any], slow: bool = False) -> Mapping[str, Any]:
    there = [p for p in entry["predictions"] if p["as_compiled"]]
    doubted = [p for p in there if slow and p["card"].endswith(SLOW)]
    found: Mapping[str, Any] = (doubted or there)[0]
    return found
