"""What cards that nobody measured do in a second, by who computes: shares of the data sheet's peaks, from machine code where there
is some (bench/turing), or assumed, and then ASSUMED says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..fusion.estimate.rates import Rates

Who = Literal["stock", "peer", "precise", "fast", "turbo", "sparse"]
OURS: tuple[Who, ...] = ("precise", "fast", "turbo", "sparse")
WHO: tuple[Who, ...] = ("stock", "peer", *OURS)
IN_INT8: tuple[Who, ...] = ("peer", "turbo", "sparse")  # who multiplies bytes, from a file of bytes


@dataclass(frozen=True)
class Card:
    """From NVIDIA's data sheets: operations per second of the tensor cores with FP32 and with FP16 sums, bytes per second of the
    memory; gib: what a desktop leaves free. bus: bytes per second that pinned copies reach, 0.78 of the link's rate."""

    name: str
    tensor: float
    half: float
    memory: float
    bus: float
    gib: float
    turing: bool


CARDS = (
    Card("RTX 2060 Super", 28.7e12, 57.4e12, 448e9, 12.3e9, 7.0, True),
    Card("RTX 2070", 29.9e12, 59.7e12, 448e9, 12.3e9, 7.0, True),
    Card("RTX 2080", 40.3e12, 80.5e12, 448e9, 12.3e9, 7.0, True),
    Card("RTX 3060 Ti", 32.4e12, 64.8e12, 448e9, 24.6e9, 7.0, False),
    Card("RTX 4060", 30.2e12, 60.5e12, 272e9, 12.3e9, 7.0, False),
)
REACHED = 0.85  # of the memory's rate, by a plain read (bench/turing/machine.py)
# Of the tensor cores' peak, by stock's products: measured on an RTX 4090 at a held clock (spatters/mma-matmul).
CUBLAS = 0.93
# Where the shares of each kind of card are: the file, and the attention that torch runs there.
MODELS = {True: ("turing-model.json", "32x128"), False: ("ampere-ada-model.json", "sm_86 head 128")}
SLOW = ", IMMA at half rate"  # behind a card's name in these files

# Of `sparse`: the share of key blocks that are visited; for each of the others one term, a block having 64 tokens.
VISITED, BLOCK = 0.5, 64
# The strongest peer, stock with an INT8 file and comfy-kitchen's INT8 attention, as shares of the peak with FP16 sums. Turing: the
# attention as the machine model has a kernel of its kind, on an RTX 2060 Super 57 TFLOP/s of 57.4, 41 were IMMA half as fast;
# products guessed at 70, and slowed as INT8 products are in the model (87 to 53). Others: 70 % of each one's peak.
PEER = {
    True: {"attention": 57 / 57.4, "gemm": 70 / 57.4},
    False: {"attention": 0.7, "gemm": 0.7 * 2},
}
PEER_SLOW = {"attention": 41 / 57.4, "gemm": 70 * 53 / 87 / 57.4}
INT8_STORED = 0.5  # bytes of weights in an INT8 file, against FP16's

ASSUMED = (
    f"cuBLAS reaches {CUBLAS:.0%} of the tensor cores' peak, as was measured on an RTX 4090, a plain read {REACHED:.0%} of the "
    "memory's rate: assumed",
    "torch's attention and all of ours: the share that bench/turing predicts from machine code, of sm_75 for Turing, of sm_86 for "
    "Ampere and Ada; of ours never less than torch's, which `auto` would take",
    "*turbo* multiplies in INT8, every product of the blocks, by the same model of `linear_int8`; rounding its five inputs of "
    "width and the hidden one is a pass of its own, 3 bytes for each element. Its file is an INT8 one: weights of FP16 are twice "
    "as many bytes on the bus, and rounded anew at each use",
    f"*turbo*, {VISITED:.0%}: a step in which FuseStream Sparse Attention visits that share of the key blocks of self attention, "
    f"by the kernels that read lists; {1 / BLOCK:.1%} of a block's work for each one left out, routing free. The first steps of a "
    "video are dense",
    "the newest ComfyUI with an INT8 file and comfy-kitchen's INT8 attention switched on, both only with torch for CUDA 13. On "
    "Turing its attention by the machine model, its products guessed at 70 T/s on an RTX 2060 Super; elsewhere 70 % of the INT8 "
    "peak for products, of the peak with FP16 sums for attention. It was not run on any of these cards",
    "in brackets: if INT8 products run at half of the sheet's rate on a GeForce of Turing, of which no measured rate was found",
    "passes over memory take as many bytes as on the H200, where the rows of bench/results were measured; *turbo* has 8 bytes more "
    "for each element of q and k",
    "copies run beside compute, stock's too; weights keep 7 GiB less the activations; no clock is throttled",
)


def shares(model: Mapping[str, Any], torchs_attention: str, slow: bool = False) -> dict[str, float]:
    """Of the tensor cores' peak with these sums, by the machine code: ours and torch's attention. Of the ways to cut a product,
    `auto` takes the fastest. What multiplies bytes is told as a share of the peak with FP32 sums.

    slow: with IMMA at half its rate.
    """

    def found(name: str) -> Mapping[str, Any]:
        there = [p for p in model[name]["predictions"] if p["as_compiled"]]
        doubted = [p for p in there if slow and p["card"].endswith(SLOW)]
        chosen: Mapping[str, Any] = (doubted or there)[0]
        return chosen

    def share(name: str) -> float:
        return float(found(name)["share"])

    def best(precision: str) -> float:
        return max(share(name) for name in model if name.startswith("linear ") and name.endswith(f" {precision}"))

    torchs = next(name for name in model if name.startswith("torch ") and torchs_attention in name)
    peak = float(found("attention 128 precise")["tflops"]) / share("attention 128 precise")  # with FP32 sums

    def fastest(listed: str) -> float:
        """Of all that `turbo` offers."""
        tiers = ("precise", "fast", "turbo", "turbo_half")
        return max(float(found(f"attention 128 {tier}{listed}")["tflops"]) for tier in tiers) / peak

    return {
        "gemm precise": best("precise"),
        "gemm fast": best("fast"),
        "gemm turbo": max(float(found(name)["tflops"]) for name in model if name.startswith("linear_int8 ")) / peak,
        "attention precise": share("attention 128 precise"),
        "attention fast": share("attention 128 fast"),
        "attention turbo": fastest(""),
        "attention listed": fastest(" listed"),
        "attention torch": share(torchs),
    }


def rates_on(card: Card, who: Who, share: Mapping[str, float], slow: bool = False) -> Rates:
    """share: of the same `slow`."""
    memory = card.memory * REACHED
    torchs = card.tensor * share["attention torch"]
    if who == "stock":
        return Rates(card.tensor * CUBLAS, torchs, memory, card.bus)
    if who == "peer":
        of = PEER_SLOW if slow and card.turing else PEER[card.turing]
        return Rates(card.half * of["gemm"], card.half * of["attention"], memory, card.bus)
    sums = "precise" if who == "precise" else "fast"
    peak = card.tensor if who == "precise" else card.half
    # `auto` takes torch's where that is faster.
    gemm = max(peak * share[f"gemm {sums}"], card.tensor * CUBLAS)
    if who in ("precise", "fast"):
        return Rates(gemm, max(peak * share[f"attention {who}"], torchs), memory, card.bus)
    gemm = max(card.tensor * share["gemm turbo"], gemm)
    dense = max(card.tensor * share["attention turbo"], torchs)
    if who == "turbo":
        return Rates(gemm, dense, memory, card.bus)
    done = VISITED + (1 - VISITED) / BLOCK
    return Rates(gemm, dense, memory, card.bus, own=card.tensor * share["attention listed"] / done)
