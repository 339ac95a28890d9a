"""README's tables, written from the measured files: no figure in the README was typed.

python bench/report.py           rewrite the tables
python bench/report.py --check   exit 1 if they differ from bench/results
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

if not __package__:  # started as a plain script: the pack under its alias, without running its entry point
    _package = types.ModuleType("fusestream")
    _package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["fusestream"] = _package
    __package__ = "fusestream.bench"
    importlib.import_module(__package__)

from .chosen import CHOSEN, CHOSEN_MATRIX

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- (kernels|matrix|pager|models):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


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
        compiled = f"{row['torch.compile us']:.0f} us" if "torch.compile us" in row else "fails"
        lines.append(
            f"| `{op}` | {row['label']} | {row['stock us']:.0f} us | {row['ours us']:.0f} us | "
            f"{row['stock / ours']:.1f}x | {compiled} | {row['share of copy']:.0%} |"
        )
    return "\n".join(lines)


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


def models_table(results: dict[str, Any]) -> str:
    """A Markdown table of the whole models that were promised something and measured on both sides, misses included."""
    lines = [
        "| Work | Stock | FuseStream | Faster | Promised | First, stock / ours | Peak, stock / ours | Share of the bound |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in models_rows(results):
        stock, ours = row["stock"], row["ours"]
        faster = f"{row['stock / ours']:.2f}x" if "stock / ours" in row else "-"
        promised = f"{row['asked']:g}x" if row["asked"] else f"< {row['asked s']:g} s" if row["asked s"] else "-"
        promised += f", first {row['asked first']:g}x" if row.get("asked first") else ""
        missed = "**missed** " if row["met"] is False else ""
        peak = " / ".join(f"{side['peak GiB']:.2f}" for side in (stock, ours))
        first = f"{_seconds(stock, 'first s')} / {_seconds(ours, 'first s')}"
        share = f"{ours['share of bound']:.0%}" if "share of bound" in ours else "-"
        lines.append(
            f"| {row['name']} | {_seconds(stock, 's')} | {missed}{_seconds(ours, 's')} | {faster} | {promised} | {first} | "
            f"{peak} GiB | {share} |"
        )
    return "\n".join(lines)


def models_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Both sides from one run, on a card: tries of the bench on the CPU are none."""
    rows: list[dict[str, Any]] = results["models"]["rows"]
    return [r for r in rows if r["group"] == "table" and "quick" not in r and {"stock", "ours"} <= r.keys()]


def _seconds(side: dict[str, Any], name: str) -> str:
    if name in side:
        return f"{side[name]:.3g} s"
    return str(side.get("error", "-"))


def measured_with(results: dict[str, Any], part: str) -> dict[str, str]:
    """Versions and date of a table's first row."""
    if part == "models":
        return next((row["environment"] for row in models_rows(results)), {"torch": "-", "date": "-"})
    if part == "pager":
        found: dict[str, str] = results["pager"]["environment"]
        return found
    needed = "auto us" if part == "matrix" else "ours us"
    return next(
        (row["environment"] for row in results["kernels"]["rows"] if needed in row), {"torch": "-", "date": "-"}
    )


def rendered(readme: str) -> str:
    """`readme` with the tables of every results file between its markers."""
    parts: dict[str, list[str]] = {"kernels": [], "matrix": [], "pager": [], "models": []}
    for path in sorted(RESULTS.glob("nvidia-*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        tables = {"kernels": table, "matrix": matrix_table, "pager": pager_table, "models": models_table}
        for part in parts.keys() & (results.keys() | {"matrix"}):
            if part == "models" and not models_rows(results):
                continue
            environment = measured_with(results, part)
            card = path.stem.replace("-", " ")
            head = f"Measured on {card} with torch {environment['torch']} ({environment['date']})"
            if part == "pager":
                rows = results["pager"]
                head += f", {rows['gb']:g} GB in {rows['layers']} layers through {rows['window gb']:g} GB"
            if part == "models":
                free = models_rows(results)[0]["free GiB"]
                head += f", stock ComfyUI {environment['ComfyUI']}, {free:g} GiB of the card free"
            head += ":"
            parts[part].append(f"{head}\n\n{tables[part](results)}\n")
    parts["models"] = parts["models"] or ["Not measured yet.\n"]
    return BLOCK.sub(lambda found: f"{found[1]}\n" + "\n".join(parts[found[2]]) + f"\n{found[3]}", readme)


def main() -> int:
    old = README.read_text(encoding="utf-8")
    new = rendered(old)
    if "--check" in sys.argv:
        print(
            "README's tables are those of bench/results"
            if new == old
            else "README's tables differ: dev.py bench report"
        )
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
