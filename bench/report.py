"""README's, bench/README's and docs/how-it-works' tables and plots, written from the measured files: no figure in them was typed.

python bench report           rewrite tables and plots
python bench report --check   exit 1 if they differ from bench/results
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import claims, default, groups, kitchen, two
from .chosen import CHOSEN, CHOSEN_MATRIX, CHOSEN_MODELS, CHOSEN_TIERS
from .compare import is_faster
from .fidelity import long
from .fidelity import table as fidelity
from .plots.charts import CHARTS, Chart

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "bench" / "README.md"
CLAIMS = ROOT / "docs" / "how-it-works.md"
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(
    r"(<!-- (kernels|matrix|tiers|modules|pager|host|saving|pair|two|fidelity|models|plot|plots|default|groups|claims):begin -->\n)"
    r".*?(<!-- \2:end -->)",
    re.DOTALL,
)


def peer(text: str, theirs: float, ours: float) -> str:
    """A peer's time, bold where it wins."""
    return f"**{text}**" if is_faster(theirs, ours) else text


def matrix_table(results: dict[str, Any]) -> str:
    """A Markdown table of the chosen rows of matrix work, with float sums."""
    lines = [
        "| Operation | Shape | Stock | FuseStream | Faster | What served | Our kernel |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for choice in CHOSEN_MATRIX:
        op, label = choice.split("|", 1)
        found = (r for r in results["kernels"]["rows"] if r["op"] == op and r["label"].startswith(label))
        row = next((r for r in found if r["label"].endswith(" precise") and "auto us" in r), None)
        if row is None:
            continue
        lines.append(
            f"| `{op}` | {row['label'].removesuffix(' precise')} | {row['stock us']:.0f} us | {row['auto us']:.0f} us | "
            f"{row['stock / auto']:.2f}x | {row['auto']} | {row['TFLOP/s']:.0f} TFLOP/s |"
        )
    return "\n".join(lines)


def tiers_table(results: dict[str, Any]) -> str:
    """A Markdown table of the chosen rows of attention, in every tier, beside comfy-kitchen's where it was there."""
    lines = [
        "| Operation | Shape | Tier | Stock | Our kernel | Error | comfy-kitchen | Its error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for choice in CHOSEN_TIERS:
        op, label = choice.split("|", 1)
        for row in results["kernels"]["rows"]:
            if row["op"] != op or not row["label"].startswith(label) or "errors" not in row:
                continue
            shape, tier = row["label"].rsplit(" ", 1)
            rival = next((name for name in row["errors"] if name.startswith(kitchen.NAME)), None)
            theirs = ["-", "-"]
            if rival is not None:
                time = row[f"{rival} us"]
                theirs = [peer(f"{time:.0f} us", time, row["ours us"]), f"{row['errors'][rival]:.2%}"]
            cells = (
                f"`{op}`",
                shape,
                tier,
                f"{row['stock us']:.0f} us",
                f"{row['ours us']:.0f} us, {row['TFLOP/s']:.0f} TFLOP/s",
                f"{row['errors']['ours']:.2%}",
                *theirs,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(results: dict[str, Any]) -> str:
    """A Markdown table of the chosen rows of one card's file."""
    rows = results["kernels"]["rows"]
    lines = [
        "| Operation | Shape | Stock | FuseStream | Faster | torch.compile | Share of copy bandwidth |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for choice in CHOSEN:
        op, label = choice.split("|", 1)
        row = next((r for r in rows if r["op"] == op and r["label"].startswith(label) and "ours us" in r), None)
        if row is None:
            continue
        time = row.get("torch.compile us")
        compiled = "fails" if time is None else peer(f"{time:.0f} us", time, row["ours us"])
        lines.append(
            f"| `{op}` | {row['label']} | {row['stock us']:.0f} us | {row['ours us']:.0f} us | "
            f"{row['stock / ours']:.1f}x | {compiled} | {row['share of copy']:.0%} |"
        )
    left = results["kernels"].get("left")
    unmeasured = [f"{left} of its rows were not reached, when an error of the bench ended it."] if left else []
    return "\n".join([*lines, "", auto_told(results), *unmeasured])


def slower_than_stock(results: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], float]]:
    """Rows of kernels in which what `auto` chose took longer than stock in the same run, and how many times as long.

    But for noise: 2 %, or a tenth of a microsecond where the work is one launch and nothing else.
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


def auto_told(results: Mapping[str, Any]) -> str:
    """What `auto` is promised to do, and where it did not."""
    rows, slower = results["kernels"]["rows"], slower_than_stock(results)
    told = [f"`{row['op']}`, {row['label']} ({times:.2f} times, {row['auto']})" for row, times in slower]
    missed = f" **missed** in {len(told)}: {'; '.join(told)}" if told else ""
    return f"Within noise what `auto` chose was not slower than stock in {len(rows) - len(told)} of {len(rows)} rows.{missed}"


def modules_table(results: dict[str, Any]) -> str:
    """A Markdown table of all rows of the modules' bench, promises and misses included."""
    lines = [
        "| What | Eager | torch.compile | Others | FuseStream | Over ours | Promised | Peak |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["modules"]["rows"]:
        others = [*row.get("others", ()), "products alone", "stock", "stock, --fast autotune"]
        timed = {name: row[f"{name} ms"] for name in others if f"{name} ms" in row}
        told = [peer(f"{name} {time:.4g} ms", time, row["ours ms"]) for name, time in timed.items()]
        ratios = [f"{short} {row[f'{name} / ours']:.2f}x" for name, short in COMPARED if f"{name} / ours" in row]
        promised = [
            ("at most {:g} GiB" if name == "GiB" else f"{{:g}}x {name}").format(row["asked"][name])
            for name in row["asked"]
        ]
        missed = "**missed** " if row["met"] is False else ""
        wrong = "" if row.get("right", True) else " **wrong result**"
        cells = (
            row["label"] + wrong,
            *(_milliseconds(row, name) for name in ("eager", "torch.compile")),
            ", ".join(told),
            f"{row['ours ms']:.4g} ms",
            ", ".join(ratios),
            missed + ", ".join(promised),
            _gib(row),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


UNTRIED = "not tried"
COMPARED = (("eager", "eager"), ("torch.compile", "compile"), ("torch's best", "best"), ("stock", "stock"))


def _milliseconds(row: dict[str, Any], name: str) -> str:
    """Of one of torch's ways, and in which of its forms; or why there are none."""
    if f"{name} ms" in row:
        text = f"{row[f'{name} ms']:.4g} ms" + (f" ({row[f'{name} is']})" if f"{name} is" in row else "")
        return peer(text, row[f"{name} ms"], row["ours ms"])
    failed = str(row.get(f"{name} failed", ""))
    return "fails" if failed and not failed.startswith(UNTRIED) else failed.partition(":")[0]


def _gib(row: dict[str, Any]) -> str:
    return " / ".join(f"{row[f'{who} GiB']:.2f}" for who in ("eager", "ours") if f"{who} GiB" in row)


def pager_table(results: dict[str, Any]) -> str:
    """A Markdown table of all rows of the pager's bench, misses included."""
    lines = ["| What | Found | Promised | |", "| --- | --- | --- | --- |"]
    for row in results["pager"]["rows"]:
        if "error" in row:
            lines.append(f"| {row['label']} | | | {row['error']} |")
            continue
        promised = "" if row["bound"] is None else f"at most {row['bound']:g}"
        missed = "**missed** " if row["bound"] is not None and row["found"] > row["bound"] else ""
        lines.append(f"| {row['label']} | {missed}{row['found']:g} {row['unit']} | {promised} | {row['note']} |")
    return "\n".join(lines)


def host_table(results: dict[str, Any]) -> str:
    """A Markdown table of what a block costs the host, beside what it should at most."""
    lines = ["| What | Host's time | At most |", "| --- | --- | --- |"]
    for row in results["host"]["rows"]:
        aim = "" if row["bound"] is None else f"{row['bound']:.0f} us"
        missed = "**missed** " if row["bound"] is not None and row["us"] > row["bound"] else ""
        lines.append(f"| {row['label']} | {missed}{row['us']:.0f} us | {aim} |")
    return "\n".join(lines)


def saving_table(results: dict[str, Any]) -> str:
    """A Markdown table of what saving a model takes, beside what it may."""
    lines = ["| What | Found | Below |", "| --- | --- | --- |"]
    for row in results["saving"]["rows"]:
        unit = "" if row["bound"] is None else " GiB"
        missed = "**missed** " if row["bound"] is not None and row["value"] >= row["bound"] else ""
        bound = "" if row["bound"] is None else f"{row['bound']:g} GiB"
        lines.append(f"| {row['label']} | {missed}{row['value']:.2f}{unit} | {bound} |")
    return "\n".join(lines)


def pair_table(results: dict[str, Any]) -> str:
    """A Markdown table of two models that take turns in little RAM."""
    lines = [
        "| Files, model, turn | First step | from the disk | Later steps | from the disk |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results["pair"]["rows"]:
        times = f"{row['first s']:.2f} s | {row['first GB']:.1f} GB | {row['s']:.3f} s | {row['later GB']:.2f} GB"
        lines.append(f"| {row['label']} | {times} |")
    return "\n".join(lines)


def models_table(cards: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A Markdown table of the whole models that say most to a user, each from the card where it was measured last, misses included;
    bench/README has all of them, of every card. Empty where none was measured."""
    lines, environments = [], []
    for name in CHOSEN_MODELS:
        measured = [(card, row) for card, results in cards for row in both_sides(results) if row["name"] == name]
        if measured:
            card, row = max(measured, key=lambda one: one[1]["environment"]["date"])
            told = groups.cells(row)
            environments.append(row["environment"])
            sides = f"{told.stock} | {told.ours} | {told.faster} | {told.peak}"
            lines.append(f"| {name} | {claims.short_name(card)} | {sides} |")
    if not lines:
        return ""
    one = of_all(environments)
    versions = f"stock ComfyUI {one['ComfyUI']}, torch {one['torch']} ({one['date']})"
    title = "| Work | Card | Stock | FuseStream | Faster | Peak, stock / ours |\n| --- | --- | --- | --- | --- | --- |"
    table = "\n".join([title, *lines])
    return f"Measured with {versions}, 8 GiB of the card free or what a row says:\n\n{table}\n"


def both_sides(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Whole models with both sides from one run, on a card: tries of the bench on the CPU are none."""
    rows: list[dict[str, Any]] = results.get("models", {}).get("rows", [])
    return [row for row in rows if "quick" not in row and {"stock", "ours"} <= row.keys()]


def models_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Of these what says how fast whole models are."""
    shown = ("table", "pictures", "live", "writing")
    return [row for row in both_sides(results) if row["group"] in shown]


def of_all(environments: Sequence[dict[str, str]]) -> dict[str, str]:
    """The first of these, with the dates of all."""
    dates = sorted({one["date"] for one in environments})
    return environments[0] | ({"date": f"{dates[0]} to {dates[-1]}"} if len(dates) > 1 else {})


def measured_with(results: dict[str, Any], part: str) -> dict[str, str]:
    """Versions and date of a table's first row."""
    if part == "models":
        environments = [row["environment"] for row in models_rows(results)]
        return of_all(environments) if environments else {"torch": "-", "date": "-"}
    if part in ("pager", "host", "saving", "pair", two.SECTION, fidelity.SECTION):
        found: dict[str, str] = results[part]["environment"]
        return found
    if part == "modules":
        environment: dict[str, str] = results[part]["rows"][0]["environment"]
        return environment
    needed = "auto us" if part == "matrix" else "ours us"
    return next(
        (row["environment"] for row in results["kernels"]["rows"] if needed in row), {"torch": "-", "date": "-"}
    )


def rendered(readme: str) -> str:
    """README: the whole models that say most, and a plot."""
    cards = measured_cards()
    parts: dict[str, list[str]] = {"models": [models_table(cards) or "Not measured yet.\n"]}
    parts |= {"plot": [], fidelity.SECTION: []}
    for card, results in cards:
        if fidelity.SECTION in results:
            told = fidelity.short(results)
            parts[fidelity.SECTION].append(f"{head(card, results, fidelity.SECTION)}\n\n{told}\n")
    drawn = [(chart, *one) for chart in CHARTS for one in cards if not chart.missing(groups.by_name(one[1]))]
    for chart, card, results in drawn[:1] or [(CHARTS[0], *one) for one in cards[:1]]:
        parts["plot"].append(shown(chart, card, results, "docs/images"))
    parts[fidelity.SECTION] = parts[fidelity.SECTION] or [fidelity.NOT_YET]
    return filled(readme, parts)


def head(card: str, results: dict[str, Any], part: str) -> str:
    """Where and with what a table was measured."""
    environment = measured_with(results, part)
    text = f"Measured on {card} with torch {environment['torch']} ({environment['date']})"
    if part == "pager":
        rows = results["pager"]
        text += f", {rows['gb']:g} GB in {rows['layers']} layers through {rows['window gb']:g} GB"
    if part == two.SECTION:
        text += f", stock ComfyUI {environment['ComfyUI']}, {results[part]['free GiB']:g} GiB of each card free"
    if part == fidelity.SECTION:
        text += f", {fidelity.extent(results)}"
    if part == "models":
        free = models_rows(results)[0]["free GiB"]
        text += f", stock ComfyUI {environment['ComfyUI']}, {free:g} GiB of the card free"
    return f"{text}:"


def fidelity_tables(results: dict[str, Any]) -> str:
    """Every way to compute, and what is told apart by longer videos."""
    return f"{fidelity.table(results)}\n{long.text(results)}".rstrip("\n")


TABLES = {
    "kernels": table,
    "matrix": matrix_table,
    "tiers": tiers_table,
    "modules": modules_table,
    "pager": pager_table,
    "host": host_table,
    "saving": saving_table,
    "pair": pair_table,
    two.SECTION: two.table,
    fidelity.SECTION: fidelity_tables,
}
SECTION = {"matrix": "kernels", "tiers": "kernels"}  # of the results, where it has not the part's own name


def rendered_page(page: str) -> str:
    """bench/README: every table, every group, what ours do by default and all plots of every card. What a card's file lacks is left
    out, but for a plot that no card has: that is said of the first."""
    parts: dict[str, list[str]] = {"plots": [], "default": [], "groups": [], **{part: [] for part in TABLES}}
    cards = measured_cards()
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
            parts["default"].append(f"**{card}**.{date}\n\n{default.text(groups.by_name(results))}")
    parts[two.SECTION] = parts[two.SECTION] or [two.NOT_YET]
    parts[fidelity.SECTION] = parts[fidelity.SECTION] or [fidelity.NOT_YET]
    parts["modules"] = parts["modules"] or ["Not measured yet.\n"]
    return filled(page, parts)


def rendered_claims(page: str) -> str:
    """docs/how-it-works: the claims beside figures, each of the card that most was measured on and that has it."""
    return filled(page, {"claims": [f"{claims.table(measured_cards())}\n"]})


def shown(chart: Chart, card: str, results: dict[str, Any], images: str) -> str:
    """A plot, or which command measures what it lacks."""
    missing = chart.missing(groups.by_name(results))
    if missing:
        return f"*{chart.title}*, {card}: {len(missing)} of its rows have yet to be measured. `{chart.fills}` fills them.\n"
    return f"![{chart.title}, {card}]({images}/{image_name(chart, card)})\n"


def image_name(chart: Chart, card: str) -> str:
    return f"bench-{chart.name}-{card.replace(' ', '-')}.svg"


def images() -> dict[str, str]:
    """Every plot that can be drawn, by the name of its file."""
    return {
        image_name(chart, card): chart.draw(rows)
        for card, results in measured_cards()
        for chart in CHARTS
        if not chart.missing(rows := groups.by_name(results))
    }


def measured_cards() -> list[tuple[str, dict[str, Any]]]:
    """Each with its results, the one that most was measured on first. Of others only what they have is shown."""
    paths = sorted(RESULTS.glob("nvidia-*.json"))
    found = [(path.stem.replace("-", " "), json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return sorted(found, key=lambda each: -len(models_rows(each[1])))


def filled(text: str, parts: dict[str, list[str]]) -> str:
    return BLOCK.sub(lambda found: f"{found[1]}\n" + "\n".join(parts[found[2]]) + f"\n{found[3]}", text)


def pages() -> dict[Path, Callable[[str], str]]:
    return {README: rendered, PAGE: rendered_page, CLAIMS: rendered_claims}


def stale() -> list[str]:
    """Names of the files that are not what the measured ones say."""
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
    print(
        f"these differ, call dev.py bench report: {', '.join(differ)}" if differ else "all are those of bench/results"
    )
    return int(bool(differ))
