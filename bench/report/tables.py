"""Markdown tables of a card's results: a row for each measurement, misses included. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import kitchen
from ..compare import is_faster
from .chosen import CHOSEN, CHOSEN_MATRIX, CHOSEN_TIERS

Results = Mapping[str, Any]
Row = Mapping[str, Any]
MISSED = "**missed** "
TWO_CARDS = "two"  # the section of what a second card gains


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with these headings."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def peer(text: str, theirs: float, ours: float) -> str:
    """A peer's time, bold where it wins."""
    return f"**{text}**" if is_faster(theirs, ours) else text


def missed(value: float, bound: float | None) -> str:
    """The word before a value that is above its bound."""
    return MISSED if bound is not None and value > bound else ""


def _kernel_rows(results: Results, choices: Iterable[str], having: str) -> list[list[Row]]:
    """For each choice, `op|label`, the rows that have this figure."""
    asked = (choice.split("|", 1) for choice in choices)
    rows = [row for row in results["kernels"]["rows"] if having in row]
    return [[row for row in rows if row["op"] == op and row["label"].startswith(label)] for op, label in asked]


def kernels(results: Results) -> str:
    """The chosen rows of ops that memory bounds, and where `auto` was slower than stock."""
    rows = []
    for row in (found[0] for found in _kernel_rows(results, CHOSEN, "ours us") if found):
        time = row.get("torch.compile us")
        compiled = "fails" if time is None else peer(f"{time:.0f} us", time, row["ours us"])
        us = (f"{row['stock us']:.0f} us", f"{row['ours us']:.0f} us", f"{row['stock / ours']:.1f}x")
        rows.append((f"`{row['op']}`", row["label"], *us, compiled, f"{row['share of copy']:.0%}"))
    heads = ("Operation", "Shape", "Stock", "FuseStream", "Faster", "torch.compile", "Share of copy bandwidth")
    left = results["kernels"].get("left")
    unmeasured = [f"{left} of its rows were not reached, when an error of the bench ended it."] if left else []
    return "\n".join([markdown(heads, rows), "", auto_told(results), *unmeasured])


def matrix(results: Results) -> str:
    """The chosen rows of matrix work, with float sums."""
    rows = []
    for found in _kernel_rows(results, CHOSEN_MATRIX, "auto us"):
        row = next((one for one in found if one["label"].endswith(" precise")), None)
        if row is not None:
            us = (f"{row['stock us']:.0f} us", f"{row['auto us']:.0f} us", f"{row['stock / auto']:.2f}x")
            label = row["label"].removesuffix(" precise")
            rows.append((f"`{row['op']}`", label, *us, row["auto"], f"{row['TFLOP/s']:.0f} TFLOP/s"))
    return markdown(("Operation", "Shape", "Stock", "FuseStream", "Faster", "What served", "Our kernel"), rows)


def tiers(results: Results) -> str:
    """The chosen rows of attention in every tier, beside comfy-kitchen's where that was there."""
    rows = []
    for row in (row for found in _kernel_rows(results, CHOSEN_TIERS, "errors") for row in found):
        shape, tier = row["label"].rsplit(" ", 1)
        rival = next((name for name in row["errors"] if name.startswith(kitchen.NAME)), None)
        theirs = ["-", "-"]
        if rival is not None:
            time = row[f"{rival} us"]
            theirs = [peer(f"{time:.0f} us", time, row["ours us"]), f"{row['errors'][rival]:.2%}"]
        ours = f"{row['ours us']:.0f} us, {row['TFLOP/s']:.0f} TFLOP/s"
        error = f"{row['errors']['ours']:.2%}"
        rows.append((f"`{row['op']}`", shape, tier, f"{row['stock us']:.0f} us", ours, error, *theirs))
    heads = ("Operation", "Shape", "Tier", "Stock", "Our kernel", "Error", "comfy-kitchen", "Its error")
    return markdown(heads, rows)


def slower_than_stock(results: Results) -> list[tuple[Row, float]]:
    """Rows of kernels in which the choice of `auto` took longer than stock in the same run, and how many times as long.

    Noise is left out: 2 %, or a tenth of a microsecond where the work is one launch and nothing else.
    """
    slower = []
    for row in results.get("kernels", {}).get("rows", []):
        winner = row.get("auto", "stock")
        us = row.get("auto us")
        if us is None:
            # The latter: `auto` took another way to accumulate than the row's, which was not timed by itself.
            if winner == "stock" or ("TFLOP/s" in row and winner.split()[-1] not in row["label"]):
                continue
            us = row.get(f"{winner} us", row["ours us"])
        noise = 1.05 if winner == "stock" else 1.02  # stock against itself: the clock moved in between
        if us > max(row["stock us"] * noise, row["stock us"] + 0.1):
            slower.append((row, us / row["stock us"]))
    return slower


def auto_told(results: Results) -> str:
    """The promise of `auto`, and the rows that miss it."""
    rows, slower = results["kernels"]["rows"], slower_than_stock(results)
    told = [f"`{row['op']}`, {row['label']} ({times:.2f} times, {row['auto']})" for row, times in slower]
    late = f" **missed** in {len(told)}: {'; '.join(told)}" if told else ""
    return f"Within noise what `auto` chose was not slower than stock in {len(rows) - len(told)} of {len(rows)} rows.{late}"


def modules(results: Results) -> str:
    """All rows of the modules, promises and misses included."""
    heads = ("What", "Eager", "torch.compile", "Others", "FuseStream", "Over ours", "Promised", "Peak")
    rows = []
    for row in results["modules"]["rows"]:
        others = [*row.get("others", ()), "products alone", "stock", "stock, --fast autotune"]
        timed = {name: row[f"{name} ms"] for name in others if f"{name} ms" in row}
        told = [peer(f"{name} {time:.4g} ms", time, row["ours ms"]) for name, time in timed.items()]
        ratios = [f"{short} {row[f'{name} / ours']:.2f}x" for name, short in COMPARED if f"{name} / ours" in row]
        asked = [
            f"at most {most:g} GiB" if name == "GiB" else f"{most:g}x {name}" for name, most in row["asked"].items()
        ]
        wrong = "" if row.get("right", True) else " **wrong result**"
        peaks = " / ".join(f"{row[f'{who} GiB']:.2f}" for who in ("eager", "ours") if f"{who} GiB" in row)
        late = MISSED if row["met"] is False else ""
        torchs = (_milliseconds(row, name) for name in ("eager", "torch.compile"))
        ours = (f"{row['ours ms']:.4g} ms", ", ".join(ratios), late + ", ".join(asked), peaks)
        rows.append((row["label"] + wrong, *torchs, ", ".join(told), *ours))
    return markdown(heads, rows)


UNTRIED = "not tried"
COMPARED = (("eager", "eager"), ("torch.compile", "compile"), ("torch's best", "best"), ("stock", "stock"))


def _milliseconds(row: Row, name: str) -> str:
    """The time of one of torch's ways and its form, or the reason why there is none."""
    if f"{name} ms" in row:
        text = f"{row[f'{name} ms']:.4g} ms" + (f" ({row[f'{name} is']})" if f"{name} is" in row else "")
        return peer(text, row[f"{name} ms"], row["ours ms"])
    failed = str(row.get(f"{name} failed", ""))
    return "fails" if failed and not failed.startswith(UNTRIED) else failed.partition(":")[0]


def pager(results: Results) -> str:
    """All rows of the pager."""

    def cells(row: Row) -> Sequence[str]:
        if "error" in row:
            return row["label"], "", "", row["error"]
        promised = "" if row["bound"] is None else f"at most {row['bound']:g}"
        found = f"{missed(row['found'], row['bound'])}{row['found']:g} {row['unit']}"
        return row["label"], found, promised, row["note"]

    return markdown(("What", "Found", "Promised", "Note"), map(cells, results["pager"]["rows"]))


def host(results: Results) -> str:
    """The host's time for a block, beside its bound."""

    def cells(row: Row) -> Sequence[str]:
        bound = "" if row["bound"] is None else f"{row['bound']:.0f} us"
        return row["label"], f"{missed(row['us'], row['bound'])}{row['us']:.0f} us", bound

    return markdown(("What", "Host's time", "At most"), map(cells, results["host"]["rows"]))


def saving(results: Results) -> str:
    """Memory and time of saving a model, beside their bounds."""

    def cells(row: Row) -> Sequence[str]:
        if row["bound"] is None:
            return row["label"], f"{row['value']:.2f}", ""
        late = MISSED if row["value"] >= row["bound"] else ""
        return row["label"], f"{late}{row['value']:.2f} GiB", f"{row['bound']:g} GiB"

    return markdown(("What", "Found", "Below"), map(cells, results["saving"]["rows"]))


def pair(results: Results) -> str:
    """Two models that take turns in little RAM."""

    def cells(row: Row) -> Sequence[str]:
        first, later = f"{row['first s']:.2f} s", f"{row['s']:.3f} s"
        return row["label"], first, f"{row['first GB']:.1f} GB", later, f"{row['later GB']:.2f} GB"

    heads = ("Files, model, turn", "First step", "from the disk", "Later steps", "from the disk")
    return markdown(heads, map(cells, results["pair"]["rows"]))


def two_cards(results: Results) -> str:
    """A step on one card and on two."""
    section = results[TWO_CARDS]

    def seconds(side: Row, name: str) -> str:
        return f"{side[name]:.3g} s" if name in side else str(side.get("error", "-"))

    def cells(row: Row) -> Sequence[str]:
        one, two = row.get("one", {}), row.get("two", {})
        peaks = ", ".join(f"{gib:.2f}" for gib in two.get("peaks GiB", ())) or "-"
        return (
            row["label"],
            seconds(one, "s"),
            (MISSED if row["met"] is False else "") + seconds(two, "s"),
            "-" if row["faster"] is None else f"{row['faster']:.2f}x",
            "-" if row["asked"] is None else f"{row['asked']:g}x",
            f"{seconds(one, 'first s')} / {seconds(two, 'first s')}",
            f"{one['peak GiB']:.2f} / {peaks} GiB" if "peak GiB" in one else f"- / {peaks} GiB",
            "-" if row["error"] is None else f"{row['error']:.2g}",
        )

    heads = ("One card", "Two cards", "Faster", "Promised", "First, one / two", "Peak, one / of each of two")
    table = markdown((section["name"], *heads, "Error beside one card"), map(cells, section["rows"]))
    beside = next((row["beside stock"] for row in section["rows"] if row["beside stock"] is not None), None)
    return table if beside is None else f"{table}\n\nOn one card FuseStream's result is {beside:.2g} from ComfyUI's."


TABLES: Mapping[str, Callable[[Results], str]] = {
    "kernels": kernels,
    "matrix": matrix,
    "tiers": tiers,
    "modules": modules,
    "pager": pager,
    "host": host,
    "saving": saving,
    "pair": pair,
    TWO_CARDS: two_cards,
}
