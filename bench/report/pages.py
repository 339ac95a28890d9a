"""The pages' tables and plots, written from the files of results: no figure in them is typed.

python bench report              README, bench/results.md, docs/how-it-works.md, docs/images, and the rates of
                                 predicted cards that fusion/base ships
python bench report --check      exit 1 if they differ from bench/results
python bench report prediction   print the prediction for cards that were not at hand
python bench report turing       predict a kernel's main loop from its machine code
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...fusion.base.card_rates import FILE as CARD_RATES
from .. import prediction
from ..fidelity import long, steps
from ..fidelity import table as fidelity
from ..lab import table as lab
from ..predicted.shipped import shipped_text
from . import by_default, claims, documents, figures, groups, nearness, tables
from .charts import CHARTS, Chart
from .chosen import CHOSEN_MODELS
from .frontier import NAME as FRONTIER
from .frontier import TITLE, frontier
from .tables import markdown

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGE = ROOT / "bench" / "results.md"
CLAIMS = ROOT / "docs" / "how-it-works.md"
LAB = ROOT / "bench" / "lab" / "README.md"
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- ([\w ]+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)
NOT_YET = "Not measured yet.\n"
Results = Mapping[str, Any]
Parts = dict[str, list[str]]
SECTION = {"matrix": "kernels", "tiers": "kernels"}  # of the results, where it has not the part's own name


GRID = (
    "Every quality with every way to store the file: the error of a model call / frames after all steps, dB / changes from frame "
    "to frame, dB, each the median video:"
)


def fidelity_tables(results: Results) -> str:
    """Every way to compute; every quality with every file, where the card computed them; and longer videos."""
    every = f"\n\n{GRID}\n\n{fidelity.grid(results)}" if fidelity.has_grid(results) else ""
    return f"{fidelity.table(results)}{every}\n{long.text(results)}".rstrip("\n")


TABLES: Mapping[str, Callable[[Results], str]] = {**tables.TABLES, fidelity.SECTION: fidelity_tables}


# ------------------------------------------------------------------------------------------------- what was measured


def measured_cards() -> list[tuple[str, dict[str, Any]]]:
    """Each card's name and results, the one with most whole models first."""
    paths = sorted(RESULTS.glob("nvidia-*.json"))
    found = [(path.stem.replace("-", " "), json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return sorted(found, key=lambda each: -len(models_rows(each[1])))


def both_sides(results: Results) -> list[dict[str, Any]]:
    """Whole models with both sides from one run on a card. Tries of the bench on the CPU are left out."""
    rows: list[dict[str, Any]] = results.get("models", {}).get("rows", [])
    return [row for row in rows if "quick" not in row and {"stock", "ours"} <= row.keys()]


def models_rows(results: Results) -> list[dict[str, Any]]:
    """The rows that say how fast whole models are."""
    shown = ("table", "pictures", "live", "writing")
    return [row for row in both_sides(results) if row["group"] in shown]


def of_all(environments: Sequence[dict[str, str]]) -> dict[str, str]:
    """The first of these, with the dates of all."""
    dates = sorted({one["date"] for one in environments})
    return environments[0] | ({"date": f"{dates[0]} to {dates[-1]}"} if len(dates) > 1 else {})


def measured_with(results: Results, part: str) -> dict[str, str]:
    """Versions and date of a table."""
    nothing = {"torch": "-", "date": "-"}
    if part == "models":
        environments = [row["environment"] for row in models_rows(results)]
        return of_all(environments) if environments else nothing
    section = results[SECTION.get(part, part)]
    if "environment" in section:
        found: dict[str, str] = section["environment"]
        return found
    needed = {"matrix": "auto us", "modules": "environment"}.get(part, "ours us")
    return next((row["environment"] for row in section["rows"] if needed in row), nothing)


def head(card: str, results: Results, part: str) -> str:
    """Where and with what a table was measured."""
    environment = measured_with(results, part)
    text = f"Measured on {card} with torch {environment['torch']} ({environment['date']})"
    if part == "pager":
        rows = results["pager"]
        text += f", {rows['gb']:g} GB in {rows['layers']} layers through {rows['window gb']:g} GB"
    if part == tables.TWO_CARDS:
        text += f", stock ComfyUI {environment['ComfyUI']}, {results[part]['free GiB']:g} GiB of each card free"
    if part == fidelity.SECTION:
        text += f", {fidelity.extent(results)}"
    if part == "models":
        free = models_rows(results)[0]["free GiB"]
        text += f", stock ComfyUI {environment['ComfyUI']}, {free:g} GiB of the card free"
    return f"{text}:"


# ---------------------------------------------------------------------------------------------------------- the pages


def models_table(cards: Sequence[tuple[str, Results]]) -> str:
    """README's whole models, each from the card where it was measured last. Empty where none was measured."""
    rows, environments = [], []
    for name in CHOSEN_MODELS:
        measured = [(card, row) for card, results in cards for row in both_sides(results) if row["name"] == name]
        if measured:
            card, row = max(measured, key=lambda one: one[1]["environment"]["date"])
            told = groups.cells(row)
            environments.append(row["environment"])
            rows.append((name, figures.short_name(card), told.stock, told.ours, told.faster, told.peak))
    if not rows:
        return ""
    one = of_all(environments)
    versions = f"stock ComfyUI {one['ComfyUI']}, torch {one['torch']} ({one['date']})"
    table = markdown(("Work", "Card", "Stock", "FuseStream", "Faster", "Peak, stock / ours"), rows)
    return f"Measured with {versions}, 8 GiB of the card free or what a row says:\n\n{table}\n"


def rendered(readme: str) -> str:
    """README: the whole models that say most, a plot, fidelity in short, the prediction in short."""
    cards = measured_cards()
    parts: Parts = {"models": [models_table(cards) or NOT_YET], "plot": []}
    told = [
        f"{head(card, results, fidelity.SECTION)}\n\n{fidelity.short(results)}\n"
        for card, results in cards
        if fidelity.SECTION in results
    ]
    parts[fidelity.SECTION] = told or [NOT_YET]
    drawn = [(chart, *one) for chart in CHARTS for one in cards if not chart.missing(groups.by_name(one[1]))]
    for chart, card, results in drawn[:1] or [(CHARTS[0], *one) for one in cards[:1]]:
        parts["plot"].append(shown(chart, card, results, "docs/images"))
    return filled(readme, parts, prediction.short_text)


def rendered_page(page: str) -> str:
    """bench/results.md: all tables, groups and plots of every card, and the prediction.

    What a card's file lacks is left out. Only a plot that no card has is named, under the first.
    """
    cards = measured_cards()
    parts: Parts = {name: [] for name in ("plots", "default", "groups", *TABLES)}
    missing = {card: [c for c in CHARTS if c.missing(groups.by_name(results))] for card, results in cards}
    nowhere = [chart for chart in CHARTS if all(chart in lacking for lacking in missing.values())]
    for i, (card, results) in enumerate(cards):
        for part, table_of in TABLES.items():
            if SECTION.get(part, part) in results:
                parts[part].append(f"{head(card, results, part)}\n\n{table_of(results)}\n")
        charts = [chart for chart in CHARTS if (i == 0 and chart in nowhere) or chart not in missing[card]]
        parts["plots"] += [shown(chart, card, results, "../docs/images") for chart in charts]
        if i == 0 or models_rows(results):
            date = f" {head(card, results, 'models')}" if models_rows(results) else ""
            elsewhere = {name for other, rows in cards if other != card for name in groups.by_name(rows)}
            told = groups.text(results, whole=i == 0, elsewhere=elsewhere)
            parts["groups"].append(f"**{card}**.{date}\n\n{told}")
            parts["default"].append(f"**{card}**.{date}\n\n{by_default.text(groups.by_name(results))}")
    return filled(page, {name: found or [NOT_YET] for name, found in parts.items()}, prediction.text)


def rendered_claims(page: str) -> str:
    """docs/how-it-works: the claims beside figures, each of the card that most was measured on and that has it; steps left out."""
    left_out = f"![{TITLE}](images/{FRONTIER})\n\n{steps.table(steps.measured_before())}"
    return filled(
        page, {"claims": [f"{claims.tables(measured_cards(), documents.DOCUMENTS)}\n"], "step cache": [left_out]}
    )


def rendered_lab(page: str) -> str:
    """bench/lab: what each technique took, on each card where it was tried."""
    parts = []
    for path in sorted(RESULTS.glob("lab-*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        parts.append(f"**{path.stem.removeprefix('lab-').replace('-', ' ')}**:\n\n{lab.figures(rows)}\n")
    return filled(page, {"lab": parts or [NOT_YET]})


def filled(text: str, parts: Parts, predicted: Callable[[], str] | None = None) -> str:
    """The page with its blocks anew; a block that is none of the parts stays."""

    def block(found: re.Match[str]) -> str:
        if found[2] == "prediction" and predicted is not None:
            return f"{found[1]}\n{predicted()}\n{found[3]}"
        return f"{found[1]}\n" + "\n".join(parts[found[2]]) + f"\n{found[3]}" if found[2] in parts else found[0]

    return BLOCK.sub(block, text)


def shown(chart: Chart, card: str, results: Results, images: str) -> str:
    """A plot, or the command that measures its missing rows."""
    missing = chart.missing(groups.by_name(results))
    if missing:
        return f"*{chart.title}*, {card}: {len(missing)} of its rows have yet to be measured. `{chart.fills}` fills them.\n"
    return f"![{chart.title}, {card}]({images}/{image_name(chart, card)})\n"


def nearness_panels() -> list[nearness.Panel]:
    """Of the card on which longer videos were measured; none where there is none."""
    measured = ((card, nearness.rows_of(results)) for card, results in measured_cards())
    card, rows = next(((card, rows) for card, rows in measured if rows), ("", []))
    return nearness.panels(rows, card, prediction.all_predictions()) if rows else []


def image_name(chart: Chart, card: str) -> str:
    return f"bench-{chart.name}-{card.replace(' ', '-')}.svg"


def images() -> dict[str, str]:
    """Every plot that can be drawn, by the name of its file."""
    left_out = {FRONTIER: frontier(steps.measured_before()["steps"])}
    near = {nearness.NAME: nearness.nearness(drawn)} if (drawn := nearness_panels()) else {}
    drawn_rows = {
        image_name(chart, card): chart.draw(rows)
        for card, results in measured_cards()
        for chart in CHARTS
        if not chart.missing(rows := groups.by_name(results))
    }
    return left_out | near | drawn_rows


# --------------------------------------------------------------------------------------------------------- the command


def pages() -> dict[Path, Callable[[str], str]]:
    """Each page, and the function from its old text to the new one."""
    rates = {CARD_RATES: lambda _: shipped_text(prediction.load())}
    return {README: rendered, PAGE: rendered_page, CLAIMS: rendered_claims, LAB: rendered_lab, **rates}


def stale() -> list[str]:
    """Names of the files that differ from the results."""
    found = [
        str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        for path, render in pages().items()
        if render(old := path.read_text(encoding="utf-8")) != old
    ]
    wanted = images()
    there = {path.name: path.read_text(encoding="utf-8") for path in IMAGES.glob("bench-*.svg")}
    return found + sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def write() -> None:
    """Pages and plots; a plot that cannot be drawn any more goes."""
    for path, render in pages().items():
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    wanted = images()
    for path in IMAGES.glob("bench-*.svg"):
        if path.name not in wanted:
            path.unlink()
    for name, drawn in wanted.items():
        (IMAGES / name).write_text(drawn, encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] = ()) -> int:
    if "--check" not in arguments:
        write()
        return 0
    differ = stale()
    print(f"these differ, call dev.py bench report: {', '.join(differ)}" if differ else "all are as in bench/results")
    return int(bool(differ))
