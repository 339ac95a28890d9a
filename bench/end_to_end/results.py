"""The results of rows: from runs to figures, in the card's file, shown as a table. Standard library only."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .bounds import LIMIT_GIB, Rates, bound, is_known, measured_rates
from .row_types import Row
from .rows import all_rows
from .storages import computed

RESULTS = Path(__file__).resolve().parents[1] / "results"
SECTION = "models"
Runs = Sequence[Mapping[str, Any]]


def side_result(runs: Runs) -> dict[str, Any]:
    """One side's runs: the first time apart, the median of all later ones, the highest peak."""
    failed = next((run for run in runs if "error" in run), None)
    if failed is not None:
        kept = ("error", "message", "peak GiB", "free GiB", "pager", "refused", "peer")
        return {name: failed[name] for name in kept if name in failed}
    later = [s for run in runs for s in run["s"][1:]]
    firsts = [run["s"][0] for run in runs]
    result = {
        "s": statistics.median(later or firsts),
        "first s": statistics.median(firsts),
        "all s": [run["s"] for run in runs],
        "load s": statistics.median(run["load s"] for run in runs),
        "peak GiB": max(run["peak GiB"] for run in runs),
        "finite": all(run["finite"] for run in runs),
    }
    last = runs[-1]
    for name in (
        "torch's at the peak GiB",
        "peaks GiB",
        "free GiB",
        "RAM peak GiB",
        "RAM held GiB",
        "forwards a step",
        "computes in",
        "spread",
        "bus before GB/s",
        "calls while choosing",
        "served",
        "refused",
        "pager",
        "parts s",
        "steps s",
        "peer",
    ):
        if name in last:
            result[name] = last[name]
    return result


def row_result(
    row: Row, sides: Mapping[str, Runs], results: Mapping[str, Any], free: float, quick: bool
) -> dict[str, Any]:
    """sides: runs by `stock`, `ours`, `exact` and peers' names. results: the card's file, for the rates that bounds are made of."""
    found: dict[str, Any] = {"name": row.name, "group": row.group, "asked": row.asked, "asked s": row.seconds}
    found |= {"asked first": row.asked_first, "asked first s": row.first_seconds, "asked held GiB": row.held}
    found |= {"asked peak GiB": row.peak} if row.peak else {}
    found |= {"asked over peers": row.asked_peers} if row.asked_peers else {}
    found |= {"free GiB": free, "storage": row.storage, "steps": row.steps}
    found |= {"ram GiB": row.ram} if row.ram else {}
    found |= {"peers": [who for who, _ in row.peers]} if row.peers else {}
    if quick:
        found["quick"] = True
    for who, runs in sides.items():
        found[who] = side_result(runs)
        side = dict(row.sides).get(who)
        if side is not None:
            found[who]["side"] = {
                name: value for name, value in asdict(side).items() if value not in (None, (), "auto")
            }
    stock, ours = found.get("stock", {}), found.get("ours", {})
    if "s" in stock and "s" in ours:
        found["stock / ours"] = stock["s"] / ours["s"]
        found["stock first / ours first"] = stock["first s"] / ours["first s"]
    rates = None if quick else measured_rates(results)
    if rates is not None:
        set_bounds(found, row, rates)
    found["met"] = met(found)
    return found


def is_of(row: Row, found: Mapping[str, Any]) -> bool:
    """Whether it is the row as it is now that was measured: ours computed then as they do now. Of a file in 8 bits a measurement
    from before there was `auto` is another one."""
    side = found.get("ours", {}).get("side")
    if row.ours is None or side is None:
        return True
    then = side.get("precision", "auto")  # which is not written down
    return computed(then, row.storage) == computed(row.ours.precision, row.storage)


def set_bounds(found: dict[str, Any], row: Row, rates: Rates) -> None:
    """Note the bound of the row's work on this card, and the share of it that each side reached."""
    if not is_known(row):
        return
    found["bounds s"] = bound(row, rates)
    found["bounds first s"] = bound(row, rates, first=True)
    for side in (found.get(who, {}) for who, _ in row.sides):
        if "s" in side:
            side["share of bound"] = found["bounds s"]["bound"] / side["s"]


def refresh_bounds(path: Path) -> int:
    """Set the bounds of every row of a file anew, from the rates in that file: rows may have been measured before these, or in
    another file. Returns how many."""
    data = read(path)
    rates = measured_rates(data)
    if rates is None:
        raise ValueError(f"{path.name} has no rates yet: `bench rows` and `bench rows pager` measure them")
    known = {row.name: row for row in all_rows()}
    rows = [row for row in data.get(SECTION, {}).get("rows", []) if row["name"] in known and "quick" not in row]
    for found in rows:
        set_bounds(found, known[found["name"]], rates)
        found.update(rounded(found))
    write(path, data)
    return len(rows)


def met(found: Mapping[str, Any]) -> bool | None:
    """Whether what was asked holds. None if nothing was asked, or stock was not measured beside."""
    ours = found.get("ours", {})
    if not any(found.get(name) for name in ("asked", "asked s", "asked first", "asked over peers")):
        return None
    if "error" in ours:
        return False
    if not ours or (found.get("asked") and "stock / ours" not in found):
        return None
    checks = [ours["finite"], ours["peak GiB"] < found.get("asked peak GiB", LIMIT_GIB)]
    checks += [found["stock / ours"] >= found["asked"]] if found["asked"] else []
    checks += [found["stock first / ours first"] >= found["asked first"]] if found["asked first"] else []
    if least := found.get("asked over peers"):
        peers = [found[who]["s"] for who in found.get("peers", ()) if "s" in found.get(who, {})]
        checks += [s / ours["s"] >= least for s in peers]
    for what, most in (("s", "asked s"), ("first s", "asked first s"), ("RAM held GiB", "asked held GiB")):
        checks += [ours[what] <= found[most]] if found.get(most) else []
    return all(checks)


def distance(one: Path, other: Path) -> float:
    """The error of one sample of a result, relative to the other: root of the sums of squares."""
    left, right = (array("f", path.read_bytes()) for path in (one, other))
    if len(left) != len(right):
        raise ValueError(f"{one.name} has {len(left)} values and {other.name} has {len(right)}")
    error = math.fsum((a - b) ** 2 for a, b in zip(left, right, strict=True))
    whole = math.fsum(b * b for b in right)
    return math.sqrt(error / whole) if whole else math.inf


def card_file(card: str) -> Path:
    return RESULTS / f"{card.replace(' ', '-').lower()}.json"


def ask_card(what: str) -> str:
    """Of the first card; nothing where there is none. The process that starts the others does not touch it itself."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    told = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.splitlines()
    return told[0].strip() if told else ""


def card_results(other: Path | None = None) -> Path:
    """The file of the card that is there, or of the one that another file's rows were measured on."""
    if other is None:
        name = ask_card("name")
        if not name:
            raise SystemExit("no NVIDIA GPU on this machine: name the file of results by --results")
        return card_file(name)
    rows = read(other).get("models", {}).get("rows", [])
    card = next((row["environment"]["card"] for row in rows if "card" in row.get("environment", {})), None)
    if card is None:
        raise SystemExit(f"{other} does not tell its card: name the file to merge into by --results")
    return card_file(card)


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return data


def merge(path: Path, found: Mapping[str, Any]) -> None:
    """Put one row into the file, in place of the row of its name; everything else stays."""
    data = read(path)
    rows = {row["name"]: row for row in data.get(SECTION, {}).get("rows", [])}
    rows[found["name"]] = rounded(found)
    data[SECTION] = {**data.get(SECTION, {}), "rows": list(rows.values())}
    write(path, data)


def write(path: Path, data: Mapping[str, Any]) -> None:
    """As a whole or not at all: whoever interrupts the bench keeps the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def merge_file(into: Path, other: Path) -> int:
    """Take over another file's rows, models' by name and the other sections whole, and set all bounds anew. How many rows."""
    data, more = read(into), read(other)
    count = 0
    for section in more.keys() - {SECTION}:
        data[section] = more[section]
        count += len(more[section]["rows"])
    if data:
        write(into, data)
    for row in more.get(SECTION, {}).get("rows", []):
        merge(into, row)
        count += 1
    if measured_rates(read(into)) is not None:
        refresh_bounds(into)
    return count


def rounded(value: Any) -> Any:
    """Four digits are more than any of these figures has."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


HEAD = (
    f"{'row':44} {'stock s':>8} {'ours s':>8} {'ratio':>6} {'asked':>6} {'first s':>14} {'peak GiB':>11} {'bound':>6}"
)


def line(found: Mapping[str, Any]) -> str:
    """One row of the table: stock before ours."""
    stock, ours = found.get("stock", {}), found.get("ours", {})
    ratio = f"{found['stock / ours']:.2f}x" if "stock / ours" in found else "-"
    asked = f"{found['asked']}x" if found["asked"] else f"<{found['asked s']:g}s" if found["asked s"] else "-"
    firsts = "/".join(_seconds(side, "first s") for side in (stock, ours))
    peaks = "/".join(f"{side['peak GiB']:.2f}" if "peak GiB" in side else "-" for side in (stock, ours))
    share = f"{ours['share of bound']:.0%}" if "share of bound" in ours else "-"
    text = f"{found['name'][:44]:44} {_seconds(stock, 's'):>8} {_seconds(ours, 's'):>8} {ratio:>6} {asked:>6} "
    text += f"{firsts:>14} {peaks:>11} {share:>6}"
    for word, good in (("MISS", found["met"] is not False), ("NOT FINITE", ours.get("finite", True))):
        text += "" if good else f" {word}"
    peers = {who: found[who] for who in found.get("peers", ()) if who in found}
    sides = {"stock": stock, "ours": ours, **peers}
    errors = [f"{who}: {side['error']}" for who, side in sides.items() if side.get("error")]
    told = {who: f"{_seconds(side, 's')} s, first {_seconds(side, 'first s')} s" for who, side in peers.items()}
    errors += [f"{who}: {text}" for who, text in told.items() if "error" not in peers[who]]
    if found.get("accuracy"):
        errors.append("error " + ", ".join(f"{name} {value:.2e}" for name, value in found["accuracy"].items()))
    return text + "".join(f"\n    {one}" for one in errors)


def _seconds(side: Mapping[str, Any], name: str) -> str:
    if "error" in side:
        return "OOM" if side["error"] == "out of memory" else "failed"
    return f"{side[name]:.3g}" if name in side else "-"
