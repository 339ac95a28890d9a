"""Tables of all rows of whole models, group by group, from the files of results. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ..compare import is_faster, spread
from ..end_to_end.results import is_of
from ..end_to_end.row_types import Row
from ..end_to_end.rows import ASKED_FOR, all_rows
from . import beside
from .tables import MISSED, markdown

# In the order in which the page has them: what a user asks first comes first.
HEADINGS = {
    "table": "What is promised",
    "backend": "Slots and managed memory",
    "budget": "Budgets of VRAM for weights",
    "small": "Little of the card free",
    "short": "Short work, and the first time",
    "lora": "With a LoRA",
    "video": "A whole video, text to frames",
    "whole": "From a text to a picture or a video",
    "machine": "The same on a machine of 16 GB with a PCIe 3 slot",
    "vaes": "VAEs that no family knows",
    "text": "Text encoders of other models",
    "growth": "More frames, more pixels",
    "switches": "What each kernel is worth: ours with it off",
    "stock": "Stock with other switches",
    "storage": "Other storage",
    "ram": "Budgets of RAM",
    "packed": "GGUF and INT8 files",
    "default": "By default, files as people have them",
    "windows": "As on Windows, with a bus of 12 GB/s",
    "cold": "A cold file",
    "pictures": "Pictures",
    "live": "Live video, seconds a frame",
    "writing": "Text",
    "general": "Models without their family's code",
    "peers": "Beside torch.compile and SageAttention",
    "cards": "On two cards",
}
HEAD = (
    *("Work", "Stock", "FuseStream", "Faster", "Over the plain row"),
    *("First, stock / ours", "Peak, stock / ours", "Share of the bound"),
)
# The groups of which some rows are promised something.
PROMISED = (
    *("table", "small", "short", "packed", "default", "windows", "pictures", "live", "writing"),
    *("whole", "machine", "vaes"),
)
PROMISED_HEAD = (*HEAD[:4], "Promised", *HEAD[4:])
Rows = Mapping[str, Mapping[str, Any]]  # results by name
TELLS_RAM = ("packed", "windows", "whole", "machine")
WHO = {"stock": "stock", "ours": "FuseStream"}


def by_name(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Rows that are known here and were measured on a card as they are now, each side that it has."""
    known = {row.name: row for row in all_rows()}
    rows = [row for row in results.get("models", {}).get("rows", []) if "quick" not in row and row["name"] in known]

    def is_whole(one: Mapping[str, Any]) -> bool:
        row = known[one["name"]]
        return {who for who, _ in row.sides} <= one.keys() and is_of(row, one)

    return {row["name"]: row for row in rows if is_whole(row)}


def seconds(side: Mapping[str, Any], name: str = "s") -> str:
    if name in side:
        return f"{side[name]:.3g} s"
    return str(side.get("error", "-"))


def over_plain(row: Row, found: Rows) -> str:
    """How many times what the same side takes for the same work with nothing set."""
    plain = found.get(row.plain) if row.plain else None
    shown = []
    for who, _ in row.sides:
        own, base = found[row.name][who].get("s"), (plain or {}).get(who, {}).get("s")
        if own is not None and base is not None:
            shown.append(f"{own / base:.2f}x")
    return " / ".join(shown) or "-"


class Cells(NamedTuple):
    """Cells that all tables have in common, misses and failures included."""

    stock: str
    ours: str
    faster: str
    first: str
    peak: str
    share: str


def cells(one: Mapping[str, Any]) -> Cells:
    """Of a row as it was measured; a side that it does not have is left out."""
    stock, ours = one.get("stock", {}), one.get("ours", {})
    missed = MISSED if one.get("met") is False else ""
    peak = " / ".join(f"{side['peak GiB']:.2f}" if "peak GiB" in side else "-" for side in (stock, ours) if side)
    wins = "s" in stock and "s" in ours and is_faster(stock["s"], ours["s"])
    return Cells(
        stock=f"**{seconds(stock)}**" if wins else seconds(stock),
        ours=missed + seconds(ours),
        faster=f"{one['stock / ours']:.2f}x" if "stock / ours" in one else "-",
        first=" / ".join(seconds(side, "first s") for side in (stock, ours) if side),
        peak=f"{peak} GiB",
        share=f"{ours['share of bound']:.0%}" if "share of bound" in ours else "-",
    )


def promised(one: Mapping[str, Any]) -> str:
    """The promises of a row, without its peak."""
    told = [f"{one['asked']:g}x"] if one["asked"] else []
    told += [f"{one['asked over peers']:g}x over stock in tiles"] if one.get("asked over peers") else []
    told += [f"< {one['asked s']:g} s"] if one["asked s"] else []
    told += [f"first {one['asked first']:g}x"] if one.get("asked first") else []
    told += [f"first < {one['asked first s']:g} s"] if one.get("asked first s") else []
    told += [f"RAM < {one['asked held GiB']:.3g} GiB"] if one.get("asked held GiB") else []
    told += [f"peak < {one['asked peak GiB']:g} GiB"] if one.get("asked peak GiB") else []
    return ", ".join(told) or "-"


def line(row: Row, found: Rows) -> tuple[str, ...]:
    """The row's cells."""
    one = found[row.name]
    told, over = cells(one), over_plain(row, found)
    promise = (promised(one),) if row.group in PROMISED else ()
    return row.name, told.stock, told.ours, told.faster, *promise, over, told.first, told.peak, told.share


def notes(row: Row, found: Rows) -> list[str]:
    """The parts of a whole video's or picture's time, the first in a process and a later one; and errors against fp32, where
    stock was run so."""
    one = found[row.name]
    sides = {called: one[who] for who, called in WHO.items() if who in one}
    lines = [f"- {row.name}, {called}: {parts(side)}" for called, side in sides.items() if "parts s" in side]
    if row.group != "peers":  # which has a table of them
        lines += [f"- {row.name}, {who}: {peer(one[who], one.get('ours', {}))}" for who, _ in row.peers]
    if row.group in TELLS_RAM:
        held = {called: side["RAM held GiB"] for called, side in sides.items() if "RAM held GiB" in side}
        lines += (
            [f"- {row.name}, RAM held: " + ", ".join(f"{who} {gib:.3g} GiB" for who, gib in held.items())]
            if held
            else []
        )
    errors = one.get("accuracy", {})
    if WHO.keys() <= errors.keys():
        told = ", ".join(f"{called} {errors[who]:.2g}" for who, called in WHO.items())
        lines.append(f"- {row.name}, error against stock in fp32: {told}")
    return lines


def peer(side: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """A peer's seconds, how many times ours are faster, and its peak."""
    if "s" not in side:
        return beside.failure(side)
    over = f", FuseStream is {side['s'] / ours['s']:.2f}x as fast" if "s" in ours else ""
    return f"{seconds(side)}, first {seconds(side, 'first s')}{over}; peak {beside.peak(side)}"


def parts(side: Mapping[str, Any]) -> str:
    """Of the first video or picture and of a later one."""
    told = [
        f"{which} " + ", ".join(f"{part} {s:.3g} s" for part, s in took.items())
        for which, took in zip(("first", "later"), side["parts s"], strict=True)
    ]
    if tuned := side.get("kernels measured s"):  # by a version that compared them beside the work
        told.append(f"{tuned:.3g} s of the first for comparing kernels that no earlier row had compared")
    return "; ".join(told)


def repetitions(found: Rows) -> str:
    """How far the later steps of a row lie apart, where it has several."""
    sides = [
        (f"{name}, {called}", one[who]) for name, one in found.items() for who, called in WHO.items() if who in one
    ]
    apart = {name: spread(side) for name, side in sides if any(len(run) > 2 for run in side.get("all s", ()))}
    if not apart:
        return ""
    most = max(apart, key=lambda name: apart[name])
    return (
        f"Later steps of a row lie {statistics.median(apart.values()):.1%} apart in the middle of {len(apart)}, "
        f"{apart[most]:.1%} at most ({most}); a row of two steps has one later step.\n\n"
    )


def group(name: str, found: Rows, *, whole: bool = True, elsewhere: Collection[str] = ()) -> str:
    """One group's heading, table, and where it is to be whole, what is missing of it. elsewhere: rows of other cards."""
    rows = [row for row in all_rows() if row.group == name]
    measured = [row for row in rows if row.name in found]
    lines = [f"### {HEADINGS[name]}", ""]
    if measured and name == "peers":
        lines += [*beside.table(measured, found), ""]
    elif measured:
        heads = PROMISED_HEAD if name in PROMISED else HEAD
        lines += [markdown(heads, (line(row, found) for row in measured)), ""]
    extra = [text for row in measured for text in notes(row, found)]
    lines += [*extra, ""] if extra else []
    missing = sum(row.name not in found and row.name not in elsewhere for row in rows)
    if missing and whole:
        lines += [
            f"Not measured yet: {missing} of {len(rows)} rows. `dev.py bench models --group {name}` fills them.",
            "",
        ]
    return "\n".join(lines)


def text(results: Mapping[str, Any], *, whole: bool = True, elsewhere: Collection[str] = ()) -> str:
    """All groups of one card. whole: what was not measured is told of, too, unless another card has it: rows `elsewhere`."""
    found = by_name(results)

    def is_told(row: Row) -> bool:
        return row.name in found or (whole and row.name not in elsewhere and row.group not in ASKED_FOR)

    names = [name for name in HEADINGS if any(is_told(row) for row in all_rows() if row.group == name)]
    return repetitions(found) + "\n".join(group(name, found, whole=whole, elsewhere=elsewhere) for name in names)
