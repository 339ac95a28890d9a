"""The tables of pages and of the terminal, from the results alone. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..report.tables import markdown
from .variants import (
    MATRIX,
    OFFERED,
    OURS_PRECISE,
    QUALITIES,
    REFERENCE,
    SHORT,
    STOCK_FP16,
    STOCKS,
    STORED_AS,
    VARIANTS,
    Variant,
)

SECTION = "fidelity"
AS_NEAR = 1.05  # times the error of stock in FP16
PROMISED = {one.name for one in VARIANTS if one.promised}
Rows = Sequence[Mapping[str, Any]]


def bound(rows: Rows) -> float | None:
    """The most that a model call of what is promised may be off by. None: stock in FP16 was not measured."""
    stock = next((row for row in rows if row["name"] == STOCK_FP16.name and "call" in row), None)
    return None if stock is None else AS_NEAR * float(stock["call"]["median"])


def missed(rows: Rows) -> list[str]:
    """Names of the rows that are farther from FP32 than they are promised to be."""
    most = bound(rows)
    held = [row for row in rows if row["name"] in PROMISED and "call" in row]
    return [row["name"] for row in held if most is not None and row["call"]["median"] > most]


def percent(error: float) -> str:
    """Two digits: 0.052 %, 0.10 %."""
    if error == 0:
        return "0"
    return f"{100 * error:#.2g}".rstrip(".") + " %" if error >= 1e-5 else "< 0.001 %"


def decibels(found: Mapping[str, float | None]) -> str:
    """The median and the worst video; what is equal to the last bit has none."""
    return " / ".join("same" if value is None else f"{value:.0f}" for value in (found["median"], found["worst"]))


def both(found: Mapping[str, float]) -> str:
    return f"{percent(found['median'])} / {percent(found['worst'])}"


def extent(results: Mapping[str, Any]) -> str:
    """How much was made: "60 videos of 20 steps"."""
    made = results[SECTION]
    return f"{made['prompts'] * made['seeds']} videos of {made['steps']} steps"


def table(results: Mapping[str, Any]) -> str:
    """Markdown: every variant, misses and failures included."""
    rows: Rows = results[SECTION]["rows"]
    late = missed(rows)
    heads = (
        "Way to compute", "Text", "A model call", "Decoding, dB", "Latents", "Latents, dB", "Frames, dB", "Changes, dB",
        "Colour and direction", "Shape", "Background",
    )  # fmt: skip
    in_grid = {one.name for one in MATRIX}
    return markdown(heads, (_cells(row, row["name"] in late) for row in rows if row["name"] not in in_grid))


def has_grid(results: Mapping[str, Any]) -> bool:
    """Whether more of the grid was measured than what every card's table has."""
    return not {one.name for one in MATRIX}.isdisjoint(row["name"] for row in results[SECTION]["rows"])


def grid(results: Mapping[str, Any]) -> str:
    """Markdown: every quality with every way to store the file, and stock. In a cell the error of a model call, what comes of all
    steps in dB, and the changes from frame to frame in dB."""
    by = {row["name"]: row for row in results[SECTION]["rows"]}
    qualities = [quality for quality, _ in QUALITIES]

    def cell(variant: Variant | None) -> str:
        row = by.get(variant.name) if variant else None
        if row is None:
            return "-" if variant is None else "not measured"
        if "error" in row:
            return "fails"
        frames = row["frames dB"]["median"]
        return f"{percent(row['call']['median'])} / {'same' if frames is None else f'{frames:.0f}'} / {flicker(row, worst=False)}"

    lines = (
        (file or "FP16", cell(STOCKS.get(storage)), *(cell(OFFERED[quality, storage]) for quality in qualities))
        for storage, file in STORED_AS.items()
    )
    return markdown(("File", "ComfyUI", *(f"*{quality}*" for quality in qualities)), lines)


def flicker(row: Mapping[str, Any], *, worst: bool = True) -> str:
    """Of the changes from frame to frame, where they were measured."""
    found = row.get("flicker dB")
    if found is None:
        return "-"
    return decibels(found) if worst else decibels({**found, "worst": None}).partition(" / ")[0]


def _cells(row: Mapping[str, Any], is_missed: bool) -> list[str]:
    if "error" in row:
        return [row["name"], f"fails: {row['error']}", *[""] * 9]
    shares = [f"{share:.0%}" for share in row["right"].values()]
    if "call" not in row:
        return [f"{row['name']}, the reference", *["-"] * 7, *shares]
    return [
        row["name"],
        percent(row["text"]["median"]),
        ("**missed** " if is_missed else "") + percent(row["call"]["median"]),
        decibels(row["frames alone dB"]),
        both(row["latents"]),
        decibels(row["latents dB"]),
        decibels(row["frames dB"]),
        flicker(row),
        *shares,
    ]


def short(results: Mapping[str, Any]) -> str:
    """Markdown: what says most to a user."""
    rows = [row for row in results[SECTION]["rows"] if row["name"] in SHORT and "call" in row]
    late = missed(rows)
    heads = ("Way to compute", "Error of a model call", "Frames after all steps, dB", "Videos as their prompts say")
    lines = []
    for row in rows:
        call = ("**missed** " if row["name"] in late else "") + percent(row["call"]["median"])
        moves = f"{row['right']['colour and direction']:.0%}"
        lines.append([row["name"], call, decibels(row["frames dB"]), moves])
    return markdown(heads, lines)


def line(row: Mapping[str, Any]) -> str:
    """For the terminal."""
    head = f"{row['name'][:50]:50}"
    if "error" in row:
        return f"{head} {row['error']}"
    obeyed = " ".join(f"{share:5.0%}" for share in row["right"].values())
    if "call" not in row:
        return f"{head} {'-':>10} {'-':>10} {'-':>12} {'-':>20} {'-':>12} {obeyed} {row['seconds']:6.1f}"
    return (
        f"{head} {percent(row['text']['median']):>10} {percent(row['call']['median']):>10} "
        f"{decibels(row['frames alone dB']):>12} {both(row['latents']):>20} {decibels(row['frames dB']):>12} "
        f"{obeyed} {row['seconds']:6.1f}"
    )


HEAD = (
    f"{'':50} {'text':>10} {'call':>10} {'decoding dB':>12} {'latents':>20} {'frames dB':>12} color shape backg seconds"
)


def verdict(rows: Rows) -> str:
    """Whether the promise is kept."""
    late, most = missed(rows), bound(rows)
    if most is None or not any(row["name"] == OURS_PRECISE.name and "call" in row for row in rows):
        return f"what is promised of {OURS_PRECISE.name} was not measured"
    told = f"a model call within {AS_NEAR:g} times the error of {STOCK_FP16.name} beside {REFERENCE.name}"
    return f"missed: {told}: {', '.join(late)}" if late else f"kept: {told}"
