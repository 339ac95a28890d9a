"""Rates of cards that nobody measured, by who computes: shares of the data sheet's peaks, from machine code where there
is some (bench/turing), or assumed, and then ASSUMED says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..fusion.base.card_rates import Rates

# newest...: the newest ComfyUI with an INT8 file, as installed and with its INT8 attention, and with a W4A4 file. stored: ours with
# *auto* and an INT8 file, whose products are of 8-bit numbers and whose attention is that of *precise*.
Who = Literal["stock", "newest", "newest_attention", "newest_w4a4", "stored", "precise", "fast", "turbo", "sparse"]
PEERS: tuple[Who, ...] = ("newest", "newest_attention", "newest_w4a4")
OURS: tuple[Who, ...] = ("stored", "precise", "fast", "turbo", "sparse")
WHO: tuple[Who, ...] = ("stock", *PEERS, *OURS)
# Who multiplies bytes or less, and how many bytes of weights are in the file, against FP16's.
STORED: dict[Who, float] = {**dict.fromkeys((*PEERS, "stored", "turbo", "sparse"), 0.5), "newest_w4a4": 0.25}
IN_INT8: tuple[Who, ...] = tuple(STORED)
Code = Literal["sm_75", "sm_80", "sm_89", "sm_120"]


@dataclass(frozen=True)
class Card:
    """From NVIDIA's data sheets: operations per second of the tensor cores with FP32 and with FP16 sums, bytes per second of the
    memory; PCIe's generation and lanes; gib: what a desktop leaves free; code: which of comfy-kitchen's it runs."""

    name: str
    tensor: float
    half: float
    memory: float
    pcie: int
    lanes: int
    gib: float
    code: Code

    @property
    def turing(self) -> bool:
        return self.code == "sm_75"

    @property
    def bus(self) -> float:
        """Bytes per second that pinned copies reach."""
        return PINNED * LANE[self.pcie] * self.lanes


LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}  # bytes per second of a lane, by PCIe's generation
PINNED = 0.78  # of the link's rate, by pinned copies
DESKTOP = 1.0  # GiB that it takes of a card


def _card(name: str, half: float, memory: float, link: tuple[int, int], gib: float, code: Code) -> Card:
    """Of a GeForce, which sums in FP32 half as fast. gib: of the data sheet."""
    return Card(name, half / 2, half, memory, *link, gib - DESKTOP, code)


CARDS = (
    _card("RTX 2060", 51.6e12, 336e9, (3, 16), 6, "sm_75"),
    _card("RTX 2060 Super", 57.4e12, 448e9, (3, 16), 8, "sm_75"),
    _card("RTX 2070", 59.7e12, 448e9, (3, 16), 8, "sm_75"),
    _card("RTX 2080", 80.5e12, 448e9, (3, 16), 8, "sm_75"),
    _card("RTX 3060 12 GB", 51.0e12, 360e9, (4, 16), 12, "sm_80"),
    _card("RTX 3060 Ti", 64.8e12, 448e9, (4, 16), 8, "sm_80"),
    _card("RTX 3070", 81.3e12, 448e9, (4, 16), 8, "sm_80"),
    _card("RTX 4060", 60.5e12, 272e9, (4, 8), 8, "sm_89"),
    _card("RTX 5060", 76.7e12, 448e9, (5, 8), 8, "sm_120"),  # the shares below are not its own: ASSUMED
)
REACHED = 0.85  # of the memory's rate, by a plain read (bench/turing/machine.py)
# Of the tensor cores' peak, by stock's products: measured on an RTX 4090 at a held clock (spatters/mma-matmul).
CUBLAS = 0.93
# Where the shares of each kind of card are: the file, and the attention that torch runs there.
MODELS = {True: ("turing-model.json", "f16_aligned_32x128"), False: ("ampere-ada-model.json", "sm_86 head 128")}
SLOW = ", IMMA at half rate"  # behind a card's name in these files
RESULTS = Path(__file__).parent / "results"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


# Of `sparse`: the share of key blocks that are visited; for each of the others one term, a block having 64 tokens.
VISITED, BLOCK = 0.5, 64

ASSUMED = (
    f"cuBLAS reaches {CUBLAS:.0%} of the tensor cores' peak, as was measured on an RTX 4090, a plain read {REACHED:.0%} of the "
    "memory's rate: assumed. cuDNN's convolutions are taken to be as cuBLAS' products, channels last, to which torch brings what "
    "stock has in another order",
    "torch's attention and all of ours: the share that bench/turing predicts from machine code, of sm_75 for Turing, of sm_86 for "
    "Ampere and Ada; of ours never less than torch's, which `auto` would take. Heads of 40, 80 and 160 are torch's, filled up to "
    "the next size that it has. Our convolutions: sm_75's by the same model, elsewhere cuDNN's",
    "RTX 5060: the shares of Ampere and Ada. Its own machine code (sm_120), read with Ada's numbers, is within 3 % of them in "
    "products and in attention (`bench/turing`, *RTX 50*); no figure was found to hold that against",
    "*turbo* multiplies in INT8, every product of the blocks, by the same model of `linear_int8`; rounding what they read is a "
    "pass of its own, 3 bytes for each element, but behind norms, which write bytes; of queries, keys and values 13 bytes. Its "
    "file is an INT8 one: weights of FP16 are twice as many bytes on the bus, and "
    "rounded anew at each use. Of U-Nets there is none: their weights are FP16, and rounded where a product has 1024 rows or more",
    f"*turbo*, {VISITED:.0%}: a step in which FuseStream Sparse Attention visits that share of the key blocks of self attention, "
    f"by the kernels that read lists; {1 / BLOCK:.1%} of a block's work for each one left out, routing free. The first steps of a "
    "video are dense",
    "*auto* with an INT8 file: products as *turbo* has them, attention as *precise*; only what "
    "products read is rounded. With other files it is *precise*",
    "the newest ComfyUI: comfy-kitchen 0.2.40, which needs torch for CUDA 13, with an INT8 ConvRot "
    "or a W4A4 file; its INT8 attention is off unless it is switched on. That attention and its "
    "products by the same model of their machine code, for each shape the one that its launcher "
    "takes (`predicted/kitchen.py`); RTX 50 by code of its own, where W4A4 is multiplied as bytes. "
    "It was not run on any of these cards",
    "**guessed**: cuBLAS, to which the newest ComfyUI goes in INT8 on Turing wherever a product has "
    "fewer columns than twice its depth, takes the fastest of its kernels for INT8 that were read there "
    "(13.1.0.3, tiles of 128x256); its sums take 6 bytes more",
    "passes of the newest ComfyUI, by its code: each Linear rotates and rounds its own input, 3 "
    "bytes an element, 2.5 for W4A4; rows of more than 8191 elements on Turing by a product with the "
    "rotation first; with its attention 11 bytes for each element of x. **Guessed**, in its favour: "
    "every model uses its kernels for norm with modulation and norm with rope (as ours), for gate "
    "with residual, and for GELU or SwiGLU while rounding, where they fit; the rest as stock",
    "in brackets: if INT8 and INT4 products run at half of the sheet's rate on a GeForce of Turing, "
    "of which no measured rate was found",
    "passes over memory take as many bytes as on the H200, where the rows of bench/results were measured; *turbo* has 8 bytes more "
    "for each element of q and k. But torch's norm over groups, which leaves most of a large card idle, is taken as the 10 bytes "
    "that it reads and writes",
    "Qwen3: ComfyUI multiplies in FP32, which no tensor core does; *precise* splits what products read into two halves",
    f"copies run beside compute, stock's too, over PCIe as the card has it (its generation and lanes, of whose rate pinned copies "
    f"reach {PINNED:.0%}); weights keep what a desktop leaves, {DESKTOP:g} GiB less than the card has, less the activations; no "
    "clock is throttled. Prompts of a video's step are computed apart, those of a picture's together. 6 GB were never tried",
    "not counted: text encoders, VAEs and files before the first step, and the host. A U-Net's call of tens of milliseconds may "
    "wait for Python, stock's longer than ours: take frames a second as the most that can be",
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
        tiers = ("precise", "fast", "turbo", "turbo_half", "turbo_int8")
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


def rates_on(card: Card, who: Who, share: Mapping[str, float]) -> Rates:
    """Of a card that nobody measured. What the newest ComfyUI does depends on shapes: `predicted/kitchen.py`."""
    memory = card.memory * REACHED
    torchs = card.tensor * share["attention torch"]
    if who == "stock":
        return Rates(card.tensor * CUBLAS, torchs, memory, card.bus)
    exact = who in ("precise", "stored")
    sums = "precise" if exact else "fast"
    peak = card.tensor if exact else card.half
    # `auto` takes torch's where that is faster.
    gemm = max(peak * share[f"gemm {sums}"], card.tensor * CUBLAS)
    if who in ("precise", "fast"):
        return Rates(gemm, max(peak * share[f"attention {who}"], torchs), memory, card.bus)
    gemm = max(card.tensor * share["gemm turbo"], gemm)
    if who == "stored":
        return Rates(gemm, max(peak * share["attention precise"], torchs), memory, card.bus)
    dense = max(card.tensor * share["attention turbo"], torchs)
    if who == "turbo":
        return Rates(gemm, dense, memory, card.bus)
    done = VISITED + (1 - VISITED) / BLOCK
    return Rates(gemm, dense, memory, card.bus, own=card.tensor * share["attention listed"] / done)
