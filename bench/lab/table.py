"""The lab's findings as text: a short table after a run, and rows of Markdown for a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .case import Case

HEAD = ("Case", "Shipped, us", "Technique, us", "Shipped / technique", "Predicted", "Others, us", "Error")
SIDES = ("shipped", "technique", "bound")
Row = Mapping[str, Any]


def quickest(row: Row, side: str) -> str | None:
    able = [name for name, of in row["sides"].items() if of == side]
    return min(able, key=lambda name: row["us"][name], default=None)


def told(row: Row, side: str) -> str:
    """The quickest way of a side."""
    name = quickest(row, side)
    return "-" if name is None else f"{row['us'][name]:.4g} ({name})"


def ratio(row: Row) -> str:
    """What a kernel of the technique was measured at, or else what bounds it, which is said."""
    for side in ("technique", "bound"):
        found = row.get(f"shipped / {side}")
        if found is not None:
            return f"{found:.3g}x" if side == "technique" else f"at most {found:.3g}x, a bound"
    return "-"


def cells(row: Row) -> tuple[str, ...]:
    best = {quickest(row, side) for side in ("shipped", "technique")}
    others = [
        f"{name} {us:.4g}{' (bound)' if row['sides'][name] == 'bound' else ''}"
        for name, us in sorted(row["us"].items(), key=lambda each: each[1])
        if name not in best
    ]
    others += [f"{name}: {why.splitlines()[0]}" for name, why in row["failed"].items()]
    errors = {name: row["errors"].get(name) for name in sorted(best & set(row["errors"]), key=str)}
    return (
        row["label"],
        told(row, "shipped"),
        told(row, "technique"),
        ratio(row),
        f"{row['predicted']['ratio']:.3g}x",
        "; ".join(others) or "-",
        ", ".join(f"{error:.1e}" for error in errors.values()) or "-",
    )


def techniques(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["technique"] for row in rows))


def markdown(rows: Sequence[Row], card: str) -> str:
    """A table for each technique, to be pasted."""
    return "\n\n".join(_of_technique(name, rows, card) for name in techniques(rows))


def figures(rows: Sequence[Row]) -> str:
    """The lab's page: each case in short, with what was predicted."""
    cut = [line(("Case", "Shipped, us", "Technique, us", "Shipped / technique", "Predicted")), line(["---"] * 5)]
    return "\n".join((*cut, *(line(cells(row)[:5]) for row in rows)))


def _of_technique(name: str, rows: Sequence[Row], card: str) -> str:
    lines = [f"**{name[0].upper()}{name[1:]}** ({card})", "", line(HEAD), line(["---"] * len(HEAD))]
    lines += [line(cells(row)) for row in rows if row["technique"] == name]
    return "\n".join(lines)


def line(of: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in of)} |"


def short(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each case."""
    for row in rows:
        _, shipped, technique, found, predicted, _, _ = cells(row)
        failed = f"; failed: {', '.join(row['failed'])}" if row["failed"] else ""
        yield f"{row['label'][:58]:58} {found:>22} (predicted {predicted:>6})  {shipped} -> {technique}{failed}"


def predictions(cases: Iterable[Case]) -> str:
    """What was written down before the run, as rows of Markdown."""
    return "\n".join(line((case.label, f"{case.predicted.ratio:.3g}x", case.predicted.why)) for case in cases)
