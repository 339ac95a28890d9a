"""The table of ours by default beside stock as it is installed: a line for each model, a column for each storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..end_to_end.row_types import TITLES, Model
from ..end_to_end.rows import BY_DEFAULT, KINDS_OF_FILES, WITHOUT, by_default
from ..end_to_end.storages import heading
from .tables import markdown

NOT_YET = "not measured"
MOST = 1.0  # of stock's time


def text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table, what was slower, and what there is no row of. found: results by name."""
    rows = ((title(model), *(cell(model, kind, found) for kind in KINDS_OF_FILES)) for model in BY_DEFAULT)
    table = markdown(("Model", *map(heading, KINDS_OF_FILES)), rows)
    return "\n".join([table, "", summary(found), "", *without()]) + "\n"


def title(model: Model) -> str:
    """The model and the size of its work."""
    height, width, frames, _ = BY_DEFAULT[model]
    return f"{TITLES[model]} {height}x{width}" + (f"x{frames}" if frames else "")


def cell(model: Model, storage: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Stock's seconds, ours, and how much of stock's time ours is."""
    row = by_default(model, storage)
    if row is None:
        return "-"
    if row.name not in found:
        return NOT_YET
    sides = [found[row.name].get(who, {}) for who in ("stock", "ours")]
    told = " / ".join(f"{side['s']:.3g} s" if "s" in side else str(side.get("error", "-")) for side in sides)
    part = share(found[row.name])
    if part is None:
        return told
    return f"{told}, {part:.2f}" + (" **slower**" if is_slower(part) else "")


def share(one: Mapping[str, Any]) -> float | None:
    """Of stock's time, ours."""
    stock, ours = one.get("stock", {}), one.get("ours", {})
    return ours["s"] / stock["s"] if "s" in stock and "s" in ours else None


def is_slower(part: float) -> bool:
    return part > MOST


def summary(found: Mapping[str, Mapping[str, Any]]) -> str:
    """In how many ours are not slower, and which have yet to be measured."""
    rows = [row for model in BY_DEFAULT for storage in KINDS_OF_FILES if (row := by_default(model, storage))]
    parts = [part for row in rows if row.name in found and (part := share(found[row.name])) is not None]
    kept = sum(not is_slower(part) for part in parts)
    missing = sum(row.name not in found for row in rows)
    left = f" {missing} of {len(rows)} rows have yet to be measured." if missing else ""
    return f"Ours are not slower in {kept} of {len(parts)} rows with both times.{left}"


def without() -> list[str]:
    """The models and storages without a row: a line for each reason."""
    reasons: dict[tuple[Model, str], list[str]] = {}
    for (model, storage), reason in WITHOUT.items():
        reasons.setdefault((model, reason), []).append(heading(storage))
    return [f"- {TITLES[model]} in {', '.join(kinds)}: {reason}." for (model, reason), kinds in reasons.items()]
