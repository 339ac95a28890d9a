"""The table of rows that have peers beside stock: a line for each side, a peer that wins bold. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..compare import is_faster
from ..end_to_end.row_types import Row
from .tables import markdown

HEAD = ("Work", "Who", "A step", "FuseStream is faster", "First step", "Peak", "Error against ComfyUI's")
CALLED = {"stock": "ComfyUI", "ours": "FuseStream"}
REASON = 200  # letters of it
# Why a peer is faster than ours, by row and name. A test asks for one where the results have such a row.
WHY: dict[tuple[str, str], str] = {}
UNEXPLAINED = "not explained yet"


def called(who: str) -> str:
    return CALLED.get(who, f"ComfyUI, {who}")


def wins(one: Mapping[str, Any], who: str) -> bool:
    """Whether this side's later steps are faster than ours, by more than noise."""
    side, ours = one.get(who, {}), one.get("ours", {})
    return who != "ours" and "s" in side and ("s" not in ours or is_faster(side["s"], ours["s"]))


def won(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Rows, and who is faster than ours."""
    return [(row.name, who) for row in rows for who, _ in row.sides if wins(found[row.name], who)]


def table(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A Markdown table and its notes. rows: those that were measured."""
    sides = ((row, i, who) for row in rows for i, (who, _) in enumerate(ordered(row)))
    lines = ((row.name if i == 0 else "", *cells(found[row.name], who)) for row, i, who in sides)
    return [markdown(HEAD, lines), "", *(f"- {note}" for row in rows for note in notes(row, found[row.name]))]


def ordered(row: Row) -> list[tuple[str, Any]]:
    """Its sides, ours last."""
    return sorted(row.sides, key=lambda side: side[0] == "ours")


def cells(one: Mapping[str, Any], who: str) -> tuple[str, ...]:
    """Behind the row's name; where the work failed, why."""
    side, ours = one[who], one.get("ours", {})
    name = called(who)
    if "s" not in side:
        return name, failure(side), "-", "-", peak(side), "-"
    bold = "**" if wins(one, who) else ""
    faster = f"{bold}{side['s'] / ours['s']:.2f}x{bold}" if "s" in ours and who != "ours" else "-"
    error = one.get("accuracy", {}).get(f"{who} against stock")
    told = "-" if error is None else f"{error:.2g}"
    return f"{bold}{name}{bold}", f"{bold}{side['s']:.3g} s{bold}", faster, f"{side['first s']:.3g} s", peak(side), told


def peak(side: Mapping[str, Any]) -> str:
    return f"{side['peak GiB']:.2f} GiB" if "peak GiB" in side else "-"


def failure(side: Mapping[str, Any]) -> str:
    """In one line of a table."""
    reason = " ".join(str(side.get("error", "not measured")).split()).replace("|", "/")
    return reason if len(reason) <= REASON else f"{reason[:REASON]}..."


def notes(row: Row, one: Mapping[str, Any]) -> Iterator[str]:
    """The versions of the peers, and why one is faster."""
    for who, _ in ordered(row):
        peer = one[who].get("peer", {})
        if "graphs" in peer:
            yield f"{row.name}, {who}: {peer['versions']}; {peer['graphs']} graphs, {peer['graph breaks']} breaks between them"
        elif "calls" in peer:
            yield f"{row.name}, {who}: {peer['versions']}; served {peer['calls']} calls"
        if wins(one, who):
            yield f"**{row.name}: {called(who)} is faster**: {WHY.get((row.name, who), UNEXPLAINED)}"
