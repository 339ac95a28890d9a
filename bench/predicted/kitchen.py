"""A load as the newest ComfyUI computes it: comfy-kitchen's product for each shape, its passes, its attention.

The rule is what its Python (0.2.40) and the thresholds in its launchers' machine code say; speeds are
predictions of that code (`turing/kernels.py`). An INT8 product of few columns goes to cuBLAS
on Turing: sums of 32 bits, and a pass that makes halves of them. Each Linear rotates and rounds its own
input, so q, k and v do it three times. Where a row fits in shared memory that is one pass, which does
GELU or SwiGLU too; where it does not, it is a product with the rotation and a pass.

Where it could be either, the peer is given the better: every model is taken to use what the library
has, and cuBLAS to take the fastest of its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..card_rates import CUBLAS, REACHED, SLOW, STORED, Card, Code, Who, read
from ..turing.kernels import CUBLAS as CUBLAS_INT8
from ..turing.kernels import stored_label
from .load import Linear, Load, Speeds

FILES: Mapping[Code, str] = {
    "sm_75": "turing-model.json",
    "sm_80": "ampere-ada-model.json",
    "sm_89": "ampere-ada-model.json",
    "sm_120": "blackwell-model.json",
}
HEAD = 128
PROMPT = 512  # keys of a prompt
FASTEST = {8: "product INT8 128x256x64", 4: "product INT4 128x256x128"}
ROTATION = 256  # elements that are turned together
# Bytes for each element. Rounded: read in FP16, written in 8 or 4 bits; SwiGLU reads two. A row that does not fit is read and
# written by a product of its own before. Sums of cuBLAS: read in 32 bits, written in FP16.
ROUNDED = {8: 3.0, 4: 2.5}
TOGETHER = {"gelu": 3.0, "swiglu": 5.0}
SUMS = 4.0 + 2.0
# q and k are read and written in bytes, v is read twice; of a prompt's attention q alone counts.
HEADS, HEADS_TO_PROMPT = 3.0 + 3.0 + 5.0, 3.0
UNPACKED = 0.5 + 1.0  # of a weight of 4 bits, where they are multiplied as bytes
# torch's `addcmul` at best; in the product's own writing where that is CUTLASS' for RTX 30 and newer.
GATED, GATED_IN_PRODUCT = 6.0, 2.0
SHARED = {True: 48 * 1024, False: 99 * 1024}  # bytes that a rounding block may have on Turing and elsewhere
WIDEST = 16384  # elements of the longest row that is rounded at once
SMALL_TILE = 40960  # keys up to which RTX 30 attend in the small one


def way(code: Code, bits: int, linear: Linear) -> str | None:
    """The label of a product's kernel; None: cuBLAS."""
    m, n, k = linear.rows, linear.out, linear.into
    if code != "sm_75":
        # Of 4 bits the fastest by a trial at its first use; in the model others are not faster.
        return FASTEST[4] if bits == 4 else f"product INT8 {_tile(m, n, k)}"
    if bits == 4:
        return FASTEST[4] if m > 256 else "product INT4 64x64x128"
    if m > 128 and n < 2 * k:
        return None
    return FASTEST[8] if m > 512 else "product INT8 64x128x64"


def _tile(m: int, n: int, k: int) -> str:
    """Of RTX 30 to 50. What has very few rows or columns gets smaller ones, which no load here has."""
    large, middle = "128x256x64", "128x128x64"
    if n > 24832:
        share = n * k <= m * 11096
        return large if share or m * n <= 108_003_328 else f"{large}, stream K"
    if m * n <= 1_477_632:
        return "64x128x64" if n * k <= 16_252_928 else f"{middle}, stream K"
    if m * n <= 4_193_792:
        return middle if n * k <= 5_275_648 else f"{middle}, stream K"
    return large if m * k <= n * 5675 else f"{large}, stream K"


def attention_tile(code: Code, tokens: int) -> str:
    """Of heads of 128, without a mask."""
    small = tokens <= SMALL_TILE if code == "sm_80" else code == "sm_120" and 4096 <= tokens <= 4608
    if tokens <= 1024:
        return "attention 128 128x64"
    return "attention 128 64x128" if small else "attention 128 128x128"


def rounds_at_once(turing: bool, into: int) -> bool:
    """Whether a row of INT8 is rotated and rounded in one pass: it lies in shared memory in FP32, with two times 256 elements for
    every 64 threads."""
    threads = next(count for most, count in ((3072, 128), (6144, 256), (12287, 512), (into, 1024)) if into <= most)
    return into % ROTATION == 0 and into <= WIDEST and 4 * (into + threads // 64 * 512) < SHARED[turing]


@lru_cache(maxsize=16)
def _model(code: Code) -> Mapping[str, Any]:
    return read(FILES[code])


def speed(card: Card, label: str | None, slow: bool = False) -> float:
    """Operations per second; None: of cuBLAS in INT8. The prediction is of one card; others of its
    generation have the same share of their peak."""
    name = CUBLAS_INT8 if label is None else stored_label(card.code, label)
    there = [p for p in _model(card.code)[name]["predictions"] if p["as_compiled"]]
    usual = there[0]
    found = next((p for p in there if slow and p["card"].endswith(SLOW)), usual)
    peak = card.half * (4 if "INT4" in name else 2)
    return peak * float(usual["share"]) * float(found["tflops"]) / float(usual["tflops"])


def computed(
    card: Card, who: Who, load: Load, stock: Mapping[str, float], ours: Mapping[str, float], torchs: float, slow: bool
) -> tuple[Load, Speeds]:
    """The load as it is done, and how fast. stock, ours: bytes of passes. torchs: the speed of torch's attention."""
    four = who == "newest_w4a4"
    bits = 4 if four and card.code != "sm_120" else 8
    cublas = card.tensor * CUBLAS
    passes = dict(load.passes)
    seconds, moved = _rest(load) / cublas, 0.0
    for linear in load.linears:
        label = way(card.code, bits, linear)
        elements = linear.times * linear.rows * linear.into
        at_once = bits == 4 or rounds_at_once(card.turing, linear.into)
        together = bool(linear.after) and at_once and not four
        seconds += linear.operations / speed(card, label, slow)
        seconds += 0.0 if at_once else 2.0 * ROTATION * elements / cublas
        moved += elements * (TOGETHER[linear.after] if together else ROUNDED[bits])
        moved += linear.times * linear.rows * linear.out * SUMS if label is None else 0.0
        moved += linear.times * linear.into * linear.out * UNPACKED if four and bits == 8 else 0.0
        if together:
            passes[linear.after] -= elements
    own = to_prompt = torchs
    if who != "newest":
        own, to_prompt = (speed(card, attention_tile(card.code, keys), slow) for keys in (load.tokens, PROMPT))
        moved += passes.get("round heads", 0.0) * (HEADS + HEADS_TO_PROMPT * bool(load.to_prompt))
    gated = GATED if card.turing or four else GATED_IN_PRODUCT
    bytes_ = {
        **stock,
        **{name: min(stock[name], ours[name]) for name in ("modulate", "rope")},
        **{name: min(stock[name], gated) for name in ("gate", "add", "add in product")},
        **dict.fromkeys(("round", "rounded norm", "round heads"), 0.0),
        "rounded": 1.0,
    }
    products, memory = load.products / seconds, card.memory * REACHED
    heads = {HEAD: own}, {HEAD: to_prompt}
    speeds = Speeds(products, cublas, products, *heads, memory, card.bus, bytes_, STORED[who])
    return replace(load, passes={**passes, "rounded": moved}), speeds


def _rest(load: Load) -> float:
    """Operations of the products that stay FP16: the ends."""
    return max(0.0, load.products - sum(linear.operations for linear in load.linears))
