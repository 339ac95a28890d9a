"""What a step would take on cards that nobody measured: counts of operations and bytes, at rates that are told one by one.

    python bench prediction            the table, the assumptions, and the same model's error on the card that was measured
    python bench prediction --write    the same into bench/README, and a card of each generation into README

Products and attention are operations over a rate, everything else bytes over the bandwidth, weights that do not fit bytes over
the bus; a step is the sum of the first three, or the last if that is longer. On the H200 the rates are those of its kernels'
rows, and what comes out is held against its whole models' rows: that is the error of adding up. On other cards the rates are
shares of the data sheet's peaks, predicted from the machine code (bench/turing).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .end_to_end.bounds import WAN, cost_of, wan_tokens
from .end_to_end.rows import Row, sampling

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "README.md"
README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- prediction:begin -->\n).*?(<!-- prediction:end -->)", re.DOTALL)
PROMPTS = 2
WAN13, WAN14 = "Wan 1.3B 480x832x81", "Wan 14B 480x832x81"


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
IN_SHORT = ("RTX 2060 Super", "RTX 3060 Ti", "RTX 4060")  # one of each generation, for README
STEPS = {"1.3B": 30, "14B": 20}  # of a video, as the examples have them
REACHED = 0.85  # of the memory's rate, by a plain read (bench/turing/machine.py)
# Of the tensor cores' peak, by stock's products: measured on an RTX 4090 at a held clock (spatters/mma-matmul).
CUBLAS = 0.93
# Where the shares of each kind of card are: the file, and the attention that torch runs there.
MODELS = {True: ("turing-model.json", "32x128"), False: ("ampere-ada-model.json", "sm_86 head 128")}
ASSUMED = (
    f"cuBLAS reaches {CUBLAS:.0%} of the tensor cores' peak, as was measured on an RTX 4090, a plain read {REACHED:.0%} of the "
    "memory's rate: assumed",
    "torch's attention and all of ours: the share that bench/turing predicts from machine code, of sm_75 for Turing, of sm_86 for "
    "Ampere and Ada; of ours never less than torch's, which `auto` would take",
    "passes over memory take as many bytes as on the H200, where the rows of bench/results were measured",
    "copies run beside compute, stock's too; weights keep 7 GiB less the activations; no clock is throttled",
)


@dataclass(frozen=True)
class Rates:
    """Operations per second of products and attention, bytes per second of memory and bus."""

    gemm: float
    attention: float
    memory: float
    bus: float


@dataclass(frozen=True)
class Passes:
    """Bytes that everything but products and attention moves, for each element of x and each of the ffn's hidden values."""

    width: float
    hidden: float


def step_seconds(row: Row, rates: Rates, passes: Passes, gib: float) -> float:
    """Of one sampling step with guidance."""
    cost, size, tokens = cost_of(row), WAN[row.model], wan_tokens(row)
    moved = size.layers * tokens * (size.dim * passes.width + size.ffn * passes.hidden)
    compute = cost.gemm / rates.gemm + cost.attention / rates.attention + moved / rates.memory
    held = max(0.0, gib * 2**30 - 6 * tokens * size.dim * 2)  # activations as fusion/families/wan/block.py has them
    return PROMPTS * max(compute, max(0.0, cost.weights - held) / rates.bus)


# -------------------------------------------------------------------------------------------------------- what was measured


def kernels_row(results: Mapping[str, Any], op: str, label: str) -> Mapping[str, Any]:
    found = [r for r in results["kernels"]["rows"] if r["op"] == op and r["label"].startswith(label)]
    if not found:
        raise LookupError(f"no row {op}: {label} in the results")
    row: Mapping[str, Any] = found[0]
    return row


def passes_of(results: Mapping[str, Any], who: str) -> Passes:
    """who: `stock` or `ours`. Bytes, at the copy bandwidth of each row's own run."""
    rows = {
        "modulate": ("norm_modulate", f"{WAN13}:", 2.0),
        "norm": ("norm_modulate", "Wan cross attention, weight and bias", 1.0),
        "rope": ("rms_rope_", WAN13, 1.0),
        "gate": ("gated_residual_", f"{WAN13}:", 2.0),
        "add": ("gated_residual_", "Wan cross attention, no gate", 1.0),
    }
    total = 0.0
    for op, label, times in rows.values():
        row = kernels_row(results, op, label)
        total += times * row[f"{who} us"] * 1e-6 * row["copy GB/s"] * 1e9
    elements = 32760 * 1536
    query = kernels_row(results, "rms_rope_", "Wan 14B cross attention, no rope")
    width = total / elements + query[f"{who} us"] * 1e-6 * query["copy GB/s"] * 1e9 / (32760 * 5120)
    gelu = kernels_row(results, "gelu", "Wan 1.3B feed-forward, tanh")
    hidden = gelu["stock us"] * 1e-6 * gelu["copy GB/s"] * 1e9 / (32760 * 8960) if who == "stock" else 0.0
    return Passes(width, hidden)


def measured_rates(results: Mapping[str, Any], model: str, who: str) -> Rates:
    """Of the card of these results, by the rows of kernels at this model's shapes."""
    label = WAN13 if model == "wan13" else WAN14
    attention = kernels_row(results, "attention", f"{WAN13}, self")  # heads of 128 in either
    flops = attention["TFLOP/s"] * attention["ours us"] * 1e6
    names = ("q", "o with gate and residual", "ffn in with GELU", "ffn out with gate and residual")
    seconds = operations = 0.0
    for name in names:
        row = kernels_row(results, "linear", f"{label}, {name}")
        times = 3.0 if name == "q" else 1.0  # q, k and v; the cross attention's q and o are as these two
        operations += times * row["TFLOP/s"] * row["ours us"] * 1e6
        # Stock's passes are counted apart; ours are in the product's own time, and then not again.
        seconds += times * row["auto us" if who == "ours" else "stock us"] * 1e-6
    memory = kernels_row(results, "norm_modulate", f"{label}:")["copy GB/s"] * 1e9
    bus = next(r["found"] for r in results["pager"]["rows"] if r["label"] == "pinned host to device") * 1e9
    spent = attention["auto us" if who == "ours" else "stock us"] * 1e-6
    return Rates(operations / seconds, flops / spent, memory, bus)


def passes_beside_products(results: Mapping[str, Any], who: str) -> Passes:
    """Those that the measured products' times do not hold already: norms and RoPE."""
    whole = passes_of(results, who)
    held = 0.0
    for label, times in ((f"{WAN13}:", 2.0), ("Wan cross attention, no gate", 1.0)):
        row = kernels_row(results, "gated_residual_", label)
        held += times * row[f"{who} us"] * 1e-6 * row["copy GB/s"] * 1e9 / (32760 * 1536)
    return Passes(whole.width - held, 0.0)


def check(results: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """(row, who, predicted seconds, measured seconds) of every sampling row that is held to nothing."""
    by_name = {row["name"]: row for row in results.get("models", {}).get("rows", [])}
    for row in measured_rows():
        found = by_name.get(row.name, {})
        for who in ("stock", "ours"):
            if "s" in found.get(who, {}):
                rates = measured_rates(results, row.model, who)
                seconds = step_seconds(row, rates, passes_beside_products(results, who), gib=7.0)
                yield row.name, who, seconds, found[who]["s"]


def measured_rows() -> list[Row]:
    return [
        sampling("wan13", 480, 832, 81, 4),
        sampling("wan14", 480, 832, 81, 3),
        sampling("wan14", 720, 1280, 81, 2),
    ]


# ------------------------------------------------------------------------------------------------------- what is predicted


def predicted_rows() -> list[Row]:
    return [sampling("wan13", 480, 832, 33, 3), *measured_rows()]


def shares(model: Mapping[str, Any], torchs_attention: str) -> dict[str, float]:
    """Of the tensor cores' peak, by the machine code: ours with FP32 and FP16 sums, and torch's attention. Of the ways to cut a
    product, `auto` takes the fastest."""

    def share(name: str) -> float:
        found: float = next(p["share"] for p in model[name]["predictions"] if p["as_compiled"])
        return found

    def best(precision: str) -> float:
        return max(share(name) for name in model if name.startswith("linear ") and name.endswith(f" {precision}"))

    torchs = next(name for name in model if name.startswith("torch ") and torchs_attention in name)
    return {
        "gemm precise": best("precise"),
        "gemm fast": best("fast"),
        "attention precise": share("attention 128 precise"),
        "attention fast": share("attention 128 fast"),
        "attention torch": share(torchs),
    }


def rates_on(card: Card, who: str, share: Mapping[str, float]) -> Rates:
    """who: `stock`, `precise` or `fast`."""
    memory = card.memory * REACHED
    torchs = card.tensor * share["attention torch"]
    if who == "stock":
        return Rates(card.tensor * CUBLAS, torchs, memory, card.bus)
    peak = card.half if who == "fast" else card.tensor
    # `auto` takes torch's where that is faster.
    gemm = max(peak * share[f"gemm {who}"], card.tensor * CUBLAS)
    return Rates(gemm, max(peak * share[f"attention {who}"], torchs), memory, card.bus)


def predictions(results: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(card, work, seconds a step by `stock`, `precise`, `fast`)."""
    found = {turing: shares(read(file), torchs) for turing, (file, torchs) in MODELS.items()}
    passes = {who: passes_of(results, "stock" if who == "stock" else "ours") for who in ("stock", "precise", "fast")}
    for card in CARDS:
        for row in predicted_rows():
            seconds = {
                who: step_seconds(row, rates_on(card, who, found[card.turing]), passes[who], card.gib) for who in passes
            }
            yield card.name, row.name, seconds


def stock_told(work: str, seconds: Mapping[str, float]) -> str:
    """What stock does of it: with 8 GiB free the H200 could not, and no card of 8 GB will."""
    return "out of memory" if "720x1280" in work else f"{seconds['stock']:.3g}"


def table(results: Mapping[str, Any]) -> str:
    lines = [
        "| Card | Work | stock, s/step | FuseStream precise | fast | precise / fast over stock |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for card, work, s in predictions(results):
        stock = stock_told(work, s)
        gain = "-" if "720x1280" in work else f"{s['stock'] / s['precise']:.2f} / {s['stock'] / s['fast']:.2f}"
        lines.append(f"| {card} | {work} | {stock} | {s['precise']:.3g} | {s['fast']:.3g} | {gain} |")
    return "\n".join(lines)


def error_table(results: Mapping[str, Any]) -> str:
    lines = ["| Work | | predicted, s/step | measured | error |", "| --- | --- | --- | --- | --- |"]
    for name, who, predicted, measured in check(results):
        lines.append(f"| {name} | {who} | {predicted:.3g} | {measured:.3g} | {predicted / measured - 1:+.0%} |")
    return "\n".join(lines)


def farthest(results: Mapping[str, Any]) -> float | None:
    """How far the sums are off where they can be held against something."""
    return max((abs(predicted / measured - 1) for *_, predicted, measured in check(results)), default=None)


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def load() -> dict[str, Any]:
    """What was measured."""
    return read("nvidia-h200.json")


def text() -> str:
    """Everything, as Markdown."""
    results = load()
    assumed = "\n".join(f"- {line}" for line in ASSUMED)
    worst = farthest(results)
    said = "" if worst is None else f"At most {worst:.0%} off. "
    return (
        f"Predicted, not measured, seconds a step with guidance:\n\n{table(results)}\n\nAssumed:\n\n{assumed}\n\n"
        f"The same sums on the H200, from its kernels' rows, against its whole models:\n\n{error_table(results)}\n\n"
        f"{said}That holds the adding up to account, not the shares assumed for other cards: those from the machine code were "
        "within 5 % of what is published for two attention kernels on a T4, and within 9 % on Ampere and Ada where the clock is "
        "known (`bench/turing`).\n"
    )


def short_text() -> str:
    """For README: a line for a card of each generation, and how far to believe it."""
    results = load()
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in IN_SHORT}
    for card, work, seconds in predictions(results):
        if card in found:
            found[card][work] = seconds
    works = [row.name for row in predicted_rows()]
    lines = [f"| Card | {' | '.join(works)} |", f"| --- |{' --- |' * len(works)}"]
    for card, by_work in found.items():
        told = (f"{stock_told(work, s)} / {s['precise']:.3g} / {s['fast']:.3g}" for work, s in by_work.items())
        lines.append(f"| {card} | {' | '.join(told)} |")
    table_text = "\n".join(lines)
    card, by_work = next(iter(found.items()))
    minutes = ", ".join(
        f"{_minutes(seconds['precise'] * steps)} ({work}, {steps} steps)"
        for work, seconds in by_work.items()
        for size, steps in STEPS.items()
        if work.startswith(f"{size} ")
    )
    table_text += f"\n\nMinutes for a video by that, on an {card}, *precise*, text and frames not counted: {minutes}."
    worst = farthest(results)
    said = "" if worst is None else f"The same sums for the H200 are at most {worst:.0%} off what was measured there."
    return (
        "Predicted, not measured: seconds a step with guidance by stock / FuseStream *precise* / *fast*:\n\n"
        f"{table_text}\n\n{said}\n"
    )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.2g}" if seconds < 600 else f"{seconds / 60:.0f}"


def rendered(page: str) -> str:
    """bench/README with the prediction between its markers."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{text()}\n{found[2]}", page)


def rendered_short(readme: str) -> str:
    """README with the short one between its markers."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{short_text()}\n{found[2]}", readme)


def main(arguments: Sequence[str] = ()) -> int:
    if "--write" not in arguments:
        print(text())
        return 0
    for path, render in ((PAGE, rendered), (README, rendered_short)):
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0
