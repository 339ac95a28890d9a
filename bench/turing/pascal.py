"""GTX 10: the rates of our code in bytes, and a step of Wan 1.3B by them, against FP32.

A step is the work that bench/predicted counts for every card, at these rates:

ours    products and attention by what is kept of the machine code (`--pascal`); the few products that stay in FP16 elsewhere,
        and all that is not said, as stock; passes over memory with the bytes that were measured on the H200
stock   cuBLAS and torch's memory-efficient attention, both in FP32, at the shares below; twice the bytes of FP16's passes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..card_rates import DESKTOP, LANE, PINNED, read
from ..predicted.load import Speeds, step_seconds
from ..predicted.passes import pass_bytes
from ..predicted.works import Work, works
from ..report.tables import markdown
from .cards import CARDS
from .kernels import PASCAL_ATTENTION, PASCAL_CARDS, PASCAL_PRODUCTS, our_label
from .machine import Card, at_best

MEMORY = {"1060": 6, "1070": 8, "1080": 8, "1080ti": 11, "p40": 24}  # GiB of the data sheets
WORK, HEAD = "Wan 1.3B 480x832x81", 128
MEASURED = "nvidia-h200.json"
# Of the FP32 peak, by cuBLAS: 10.18 TFLOP/s for 4096^3 on a GTX 1080 Ti (zkh2016/sgemm), whose clock is not said.
SGEMM = 0.90
# The same by torch's attention in FP32: nobody's figure. The model has 47 % for the one of sm_75 (turing-model.json).
ATTENTION = (0.47, 0.60)
Kept = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """Seconds with guidance. ours: as careful as the model is, and at best (machine.at_best).
    stock: at the larger and the smaller share of its attention."""

    card: Card
    ours: tuple[float, float]
    stock: tuple[float, float]


def fp32_peak(card: Card) -> float:
    """FLOP/s: a dot product of four bytes takes the place of one multiply-add."""
    return card.peak("s32") / 4


def rate(kept: Kept, label: str, card: Card) -> float:
    """Operations per second of a kernel, as it was kept."""
    found = next(p for p in kept[label]["predictions"] if p["card"] == card.name)
    return 1e12 * float(found["tflops"])


def product_label(tile: tuple[int, int]) -> str:
    return f"linear_int8 {tile[0]}x{tile[1]}"


def product_rate(kept: Kept, card: Card) -> float:
    """Of the fastest of our tiles."""
    return max(rate(kept, product_label(tile), card) for tile in PASCAL_PRODUCTS)


def steps(kept: Kept) -> list[Step]:
    work = next(work for work in works() if work.name == WORK)
    measured = read(MEASURED)
    return [_step(kept, measured, work, name) for name in PASCAL_CARDS]


def _step(kept: Kept, measured: Mapping[str, Any], work: Work, name: str) -> Step:
    card = CARDS[name]
    memory, bus = card.bandwidth * card.reached, PINNED * LANE[3] * 16
    in_floats = fp32_peak(card) * SGEMM

    def seconds(speeds: Speeds) -> float:
        return step_seconds(work.load, speeds, MEMORY[name] - DESKTOP, work.prompts, work.forwards)

    def ours(card: Card) -> float:
        attention = {HEAD: rate(kept, our_label(HEAD, "turbo_int8", ""), card)}
        moved = pass_bytes(measured, "ours", rounds="heads")
        return seconds(
            Speeds(product_rate(kept, card), in_floats, in_floats, attention, attention, memory, bus, moved, stored=0.5)
        )

    def stock(share: float) -> float:
        attention = {HEAD: fp32_peak(card) * share}
        moved = {name: 2 * bytes_ for name, bytes_ in pass_bytes(measured, "stock").items()}
        return seconds(Speeds(in_floats, in_floats, in_floats, attention, attention, memory, bus, moved))

    least, most = ATTENTION
    return Step(card, (ours(card), ours(at_best(card))), (stock(most), stock(least)))


def rates_table(kept: Kept) -> str:
    """T/s of every kernel on every card, and behind a stroke at best."""
    cards = [CARDS[name] for name in PASCAL_CARDS]
    labels = [product_label(tile) for tile in PASCAL_PRODUCTS]
    labels += [our_label(head, "turbo_int8", listed) for head, listed in PASCAL_ATTENTION]
    peaks = ("peak of dp4a", *(f"{card.peak('s32') / 1e12:.1f}" for card in cards))
    return markdown(("T/s", *(_short(card) for card in cards)), [peaks, *_rows(kept, labels, cards)])


def _rows(kept: Kept, labels: list[str], cards: list[Card]) -> Iterator[tuple[str, ...]]:
    for label in labels:
        told = (" / ".join(f"{rate(kept, label, c) / 1e12:.1f}" for c in (card, at_best(card))) for card in cards)
        yield (label, *told)


def steps_table(kept: Kept) -> str:
    heads = (f"{WORK}, seconds a step", "ours, `turbo`", "FP32", "times as fast")
    return markdown(heads, map(_step_row, steps(kept)))


def _step_row(step: Step) -> tuple[str, ...]:
    times = f"{step.stock[0] / step.ours[0]:.1f} to {step.stock[1] / step.ours[1]:.1f}"
    return _short(step.card), *(f"{min(both):.1f} to {max(both):.1f}" for both in (step.ours, step.stock)), times


def _short(card: Card) -> str:
    return card.name.removeprefix("GeForce ")
