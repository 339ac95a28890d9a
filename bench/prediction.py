"""What a step would take on cards that nobody measured: counts of operations and bytes, at rates that are told one by one.

    python bench prediction            the table, the assumptions, and the same model's error on the card that was measured
    python bench prediction --write    the same into bench/README, a card of each generation into README, and what the node that
                                       estimates goes by into fusion/estimate

Products and attention are operations over a rate, everything else bytes over the bandwidth, weights that do not fit bytes over
the bus; a step is the sum of the first three, or the last if that is longer. On the H200 the rates are those of its kernels'
rows, and what comes out is held against its whole models' rows: that is the error of adding up. On other cards the rates are
shares of the data sheet's peaks, predicted from the machine code (bench/turing).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..fusion.estimate.rates import FILE, Passes, Rates, compute_seconds
from .card_rates import (
    ASSUMED,
    CARDS,
    CUBLAS,
    IN_INT8,
    INT8_STORED,
    MODELS,
    REACHED,
    VISITED,
    WHO,
    Card,
    Who,
    rates_on,
    shares,
)
from .end_to_end.bounds import cost_of, wan_tokens
from .end_to_end.rows import Row, sampling

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "README.md"
README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- prediction:begin -->\n).*?(<!-- prediction:end -->)", re.DOTALL)
PROMPTS = 2
ROUNDED = 8.0  # bytes for each element of x: q and k are read, k's mean too, and written in 8 bits
# Products in 8 bits: what each reads is read in FP16 and written in bytes. Of x that is the input of q, k and v, of both o, of the
# cross attention's q and of the feed-forward; the hidden values are another.
TO_BYTES, INPUTS = 3.0, 5
WAN13, WAN14 = "Wan 1.3B 480x832x81", "Wan 14B 480x832x81"
IN_SHORT = ("RTX 2060 Super", "RTX 3060 Ti", "RTX 4060")  # one of each generation, for README
USUAL = "x81"  # frames: the work that README shows
STEPS = {"1.3B": 30, "14B": 20}  # of a video, as the examples have them


def step_seconds(row: Row, rates: Rates, passes: Passes, gib: float, stored: float = 1.0) -> float:
    """Of one sampling step with guidance. stored: bytes of the weights, against FP16's."""
    cost = cost_of(row)
    compute = compute_seconds(cost, rates, passes)
    held = max(
        0.0, gib * 2**30 - 6 * wan_tokens(row) * cost.width * 2
    )  # activations as fusion/families/wan/block.py has them
    return PROMPTS * max(compute, max(0.0, stored * cost.weights - held) / rates.bus)


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


@dataclass(frozen=True)
class Told:
    """Seconds a step, and with INT8 products at half their rate, where that is in doubt and makes a difference."""

    seconds: float
    slow: float | None = None

    def __str__(self) -> str:
        return f"{self.seconds:.3g}" + ("" if self.slow is None else f" ({self.slow:.3g})")


def _rounding(ours: Passes) -> Passes:
    """Of `turbo`, which rounds what its products read."""
    return Passes(ours.width + ROUNDED + INPUTS * TO_BYTES, ours.hidden + TO_BYTES)


def predictions(results: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[Who, Told]]]:
    """(card, work, seconds a step by each)."""
    models = {turing: (read(file), torchs) for turing, (file, torchs) in MODELS.items()}
    found = {(turing, slow): shares(*models[turing], slow=slow) for turing in models for slow in (False, True)}
    ours, stock = passes_of(results, "ours"), passes_of(results, "stock")
    rounding = _rounding(ours)
    passes = {
        who: stock if who in ("stock", "peer") else rounding if who in ("turbo", "sparse") else ours for who in WHO
    }
    for card in CARDS:
        for row in predicted_rows():

            def seconds(who: Who, slow: bool, card: Card = card, row: Row = row) -> float:
                rates = rates_on(card, who, found[card.turing, slow], slow)
                stored = INT8_STORED if who in IN_INT8 else 1.0
                return step_seconds(row, rates, passes[who], card.gib, stored)

            told = {who: Told(seconds(who, False)) for who in WHO}
            for who in IN_INT8:
                if (slow := seconds(who, True)) != told[who].seconds:
                    told[who] = replace(told[who], slow=slow)
            yield card.name, row.name, told


def cells(work: str, told: Mapping[Who, Told]) -> list[str]:
    """What stock does of 720p: with 8 GiB free the H200 could not, and no card of 8 GB will. The peer's file is smaller; nobody
    tried it."""
    too_large = {"stock": "out of memory", "peer": "?"} if "720x1280" in work else {}
    return [too_large.get(who, str(told[who])) for who in WHO]


HEADS = ("ComfyUI", "newest ComfyUI, INT8", "*precise*", "*fast*", "*turbo*", f"*turbo*, {VISITED:.0%} of the blocks")


def table(results: Mapping[str, Any]) -> str:
    heads = ("Card", "Work", *HEADS, "*turbo* over ComfyUI", f"*turbo*, {VISITED:.0%}, over the newest")
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for card, work, told in predictions(results):
        gains = ["-", "-"]
        if "720x1280" not in work:
            ratios = (("stock", "turbo"), ("peer", "sparse"))
            gains = [f"{told[theirs].seconds / told[ours].seconds:.2f}" for theirs, ours in ratios]  # type: ignore[index]
        lines.append(f"| {card} | {work} | {' | '.join([*cells(work, told), *gains])} |")
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
    heads = ("Card", "Work", *HEADS)
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    minutes = []
    for card, work, told in predictions(results):
        if card not in IN_SHORT or USUAL not in work:
            continue
        lines.append(f"| {card} | {work} | {' | '.join(cells(work, told))} |")
        if card == IN_SHORT[0]:
            steps = next(count for size, count in STEPS.items() if work.startswith(f"{size} "))
            each = " / ".join(_minutes(told[who].seconds * steps) for who in ("precise", "turbo"))
            minutes.append(f"{each} ({work}, {steps} steps)")
    table_text = "\n".join(lines)
    table_text += (
        f"\n\nMinutes for a video by that, on an {IN_SHORT[0]}, *precise* / *turbo*, text and frames not counted: "
        f"{', '.join(minutes)}."
    )
    worst = farthest(results)
    said = "" if worst is None else f"The same sums for the H200 are at most {worst:.0%} off what was measured there."
    return (
        "Predicted, not measured: seconds a step with guidance. In brackets: if a Turing card multiplies INT8 at half the rate of "
        "its sheet. The newest ComfyUI is taken with an INT8 file, its INT8 attention switched on, and torch for CUDA 13.\n\n"
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


# ------------------------------------------------------------------------------------------------------------- what ships


def shipped() -> dict[str, Any]:
    """What FuseStream Plan reckons by: fusion/estimate/rates.py."""
    results = load()
    name = results["models"]["rows"][0]["environment"]["card"]
    there = {turing: shares(read(file), torchs) for turing, (file, torchs) in MODELS.items()}
    ours, stock = passes_of(results, "ours"), passes_of(results, "stock")
    rounding = _rounding(ours)
    passes = {"stock": stock, "precise": ours, "fast": ours, "turbo": rounding}
    return {
        "measured": {name: {who: _shipped_rows(results, who) for who in ("ours", "stock")}},
        "shares": {
            capability: {what: round(share, 4) for what, share in there[turing].items()}
            for capability, turing in (("7.5", True), ("8.6", False), ("8.9", False))
        },
        "passes": {who: [_short(found.width), _short(found.hidden)] for who, found in passes.items()},
        "cublas": CUBLAS,
        "reached": REACHED,
    }


def _shipped_rows(results: Mapping[str, Any], who: str) -> dict[str, Any]:
    """Of the card of these results."""
    found = {width: measured_rates(results, model, who) for width, model in ((1536, "wan13"), (5120, "wan14"))}
    one, beside = found[1536], passes_beside_products(results, who)
    cross = kernels_row(results, "attention", f"{WAN13}, cross")
    spent = cross["auto us" if who == "ours" else "stock us"]
    return {
        "by width": [
            {"width": width, "gemm": _short(rates.gemm), "memory": _short(rates.memory)}
            for width, rates in found.items()
        ],
        "self attention": _short(one.attention),
        "attention to a prompt": _short(cross["TFLOP/s"] * cross["ours us"] / spent * 1e12),
        "bus": _short(one.bus),
        "passes": [_short(beside.width), _short(beside.hidden)],
    }


def _short(figure: float) -> float:
    return float(f"{figure:.4g}")


def shipped_text() -> str:
    return json.dumps(shipped(), indent=1) + "\n"


def main(arguments: Sequence[str] = ()) -> int:
    if "--write" not in arguments:
        print(text())
        return 0
    for path, render in ((PAGE, rendered), (README, rendered_short)):
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    FILE.write_text(shipped_text(), encoding="utf-8")
    return 0
