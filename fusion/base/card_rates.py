"""Operations and bytes that cards manage in a second: measured for cards of that name, or predicted
from the kernels' machine code, or unknown.

`card_rates.json` next to this file is written from bench/results (`python bench report`). It has
rates of measured cards from the rows of their kernels, and for GeForce generations shares of the
tensor cores' peak (bench/turing). A card's own peak follows from what its driver tells:
multiprocessors, clock, memory. Standard library only, because the bench writes the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from .cost import Cost

FILE = Path(__file__).with_name("card_rates.json")
STOCK = "stock"  # computed by ComfyUI, with our kernels off; other keys are precisions
# `auto` with a file of 8-bit numbers, which are multiplied as such; attention is as with `precise`.
STORED = "stored"
# Operations of a multiprocessor's tensor cores in a clock, on GeForce cards of these generations:
# FP16 with sums in FP16; half as many with FP32 sums. By NVIDIA's whitepapers on Turing, GA102 and
# Ada.
PER_CLOCK = 1024.0
PASCAL = (6, 1)  # as many of bytes, by dp4a, of which a quarter in FP32; there is nothing else
# Bytes per second of pinned copies over PCIe 3 with 16 lanes, or 4 with 8: assumed until measured.
BUS = 12.3e9


class Source(Enum):
    """The origin of seconds, the best first."""

    MEASURED = "measured here"
    SCALED = "from a run here at another size"
    CARD = "from kernels measured on a card of this name"
    PREDICTED = "predicted from the kernels' machine code, not measured"


@dataclass(frozen=True)
class Rates:
    """Operations per second of products and attention, bytes per second of memory and bus. own: of
    self-attention, if its rate differs from that of attention to a prompt."""

    gemm: float
    attention: float
    memory: float
    bus: float
    own: float | None = None


@dataclass(frozen=True)
class Passes:
    """Bytes that everything except products and attention moves, for each element of x and of the
    feed-forward's hidden values."""

    width: float
    hidden: float


@dataclass(frozen=True)
class Card:
    """A card as its driver describes it. clock: of the multiprocessors, in Hz; memory: bytes per
    second."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int = 0
    clock: float = 0.0
    memory: float = 0.0
    has_tensor_cores: bool = True


@lru_cache(maxsize=1)
def known() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def rates_of(card: Card, who: str, width: int) -> tuple[Rates, Passes, Source] | None:
    """The rates of a card, or None if they are unknown. who: `STOCK`, `STORED` or a precision.
    width: of the model's x, which selects the products of a measured card."""
    measured = known()["measured"].get(card.name)
    if measured is not None:
        return *_measured(measured[STOCK if who == STOCK else "ours"], width), Source.CARD
    shares = known()["shares"].get(f"{card.capability[0]}.{card.capability[1]}")
    # GeForce alone, because the FP32 sums of others' tensor cores may run at full rate.
    is_told = card.capability == PASCAL or ("GeForce" in card.name and card.has_tensor_cores)
    if shares is None or not is_told or not card.clock * card.memory:
        return None
    return _predicted(card, who, shares), Passes(*known()["passes"][who]), Source.PREDICTED


def _measured(rows: Mapping[str, Any], width: int) -> tuple[Rates, Passes]:
    """The rates at the nearest width that was measured."""
    of = min(rows["by width"], key=lambda row: abs(math.log(row["width"] / max(width, 1))))
    rates = Rates(of["gemm"], rows["attention to a prompt"], of["memory"], rows["bus"], rows["self attention"])
    return rates, Passes(*rows["passes"])


def _predicted(card: Card, who: str, shares: Mapping[str, float]) -> Rates:
    """Predicted rates. torch's attention and cuBLAS' products count where they are faster."""
    half = card.multiprocessors * PER_CLOCK * card.clock
    full, memory = half / 2, card.memory * known()["reached"]
    torchs, cublas = full * shares["attention torch"], full * shares.get("gemm torch", known()["cublas"])
    if who == STOCK:
        return Rates(cublas, torchs, memory, BUS)
    sums = "precise" if who in ("precise", STORED) else "fast"
    peak = full if sums == "precise" else half
    # Without tensor cores there are no kernels of halves: those of torch count.
    gemm, attention = max(peak * shares.get(f"gemm {sums}", 0), cublas), peak * shares.get(f"attention {sums}", 0)
    # Products of 8-bit numbers are given as a share of the peak with FP32 sums.
    if who in ("turbo", STORED):
        gemm = max(full * shares["gemm turbo"], gemm)
    if who == "turbo":  # its attention is in 8 bits, too
        attention = full * shares["attention turbo"]
    return Rates(gemm, max(attention, torchs), memory, BUS)


def compute_seconds(cost: Cost, rates: Rates, passes: Passes) -> float:
    """Seconds for one forward of one prompt, with all weights in their place."""
    attention = cost.own / (rates.own or rates.attention) + (cost.attention - cost.own) / rates.attention
    moved = cost.elements * passes.width + cost.hidden * passes.hidden
    return cost.gemm / rates.gemm + attention + moved / rates.memory
