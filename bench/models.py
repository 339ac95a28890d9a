"""Measure whole models against stock ComfyUI: seconds per step, first use, load time, memory, accuracy.

    python bench models --free 8                     every row that is promised something; about 9 minutes on an H200
    python bench models --only "14B 480"             the rows whose name has this; merged into the same file
    python bench models --group budget               other rows: growth, budget, pictures, ..., or `all`
    python bench models --group all --list           the rows, and which of them were not measured with these sources
    python bench models --group all --stale --within 9   what is missing or stale, as much as nine minutes hold
    python bench models --accuracy --only "1.3B"     also stock in fp32, and both sides' error against it
    python bench models --merge OTHER.json           rows that were measured elsewhere, on a card of the same name
    python bench models --quick                      tiny checkpoints on the CPU: that it runs, not how fast
    python bench models fidelity                     how near each way to compute is to FP32, on trained weights

Stock and ours take turns, each in a process of its own, on random weights of the published shapes. `--free` leaves so
many GiB of the card free, so that a large card acts as a small one. Each row is in the card's file once it is done, and
a run that is cut off keeps its rows: call it again with `--missing` or `--stale`.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from . import sources
from .end_to_end.results import HEAD, SECTION, card_results, is_of, line, merge_file, read, refresh_bounds
from .end_to_end.row_types import SIZES, TINY, Row, by_file, unpromised
from .end_to_end.rows import ASKED_FOR, all_rows, quick
from .end_to_end.runner import Bench, add_options, results_file


class State(Enum):
    """How a row of the results stands to the sources as they are now."""

    CURRENT = ""
    STALE = "measured with other sources"
    UNKNOWN = "measured before sources were noted"
    MISSING = "not measured"


def states_of(rows: Iterable[Row], results: Mapping[str, Any]) -> dict[str, State]:
    """The state of every row, by name."""
    measured = {one["name"]: one for one in results.get(SECTION, {}).get("rows", [])}
    hashes: dict[tuple[str, ...], str] = {}

    def state(row: Row) -> State:
        one = measured.get(row.name)
        if one is None or not is_of(row, one):
            return State.MISSING
        key = (row.work, *sorted({model for model, _ in row.files}))
        if key not in hashes:
            hashes[key] = sources.of_models(key[1:], row.work)
        noted = one.get("environment", {}).get("sources")
        if noted is None:
            return State.UNKNOWN
        return State.CURRENT if noted == hashes[key] else State.STALE

    return {row.name: state(row) for row in rows}


def listed(rows: Sequence[Row], states: Mapping[str, State]) -> str:
    """A line for each row, with its state where that is known, and how many there are of each state."""
    lines = []
    for row in rows:
        state = states.get(row.name, State.CURRENT).value
        lines.append(f"{row.group:10} {row.name}" + (f"  ({state})" if state else ""))
    told = Counter(states[row.name] for row in rows if row.name in states)
    return "\n".join([*lines, *(f"rows {state.value}: {told[state]} of {len(rows)}" for state in told if state.value)])


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """The rows that the options choose, with the sizes and settings that they give; rows of one file together."""
    every = [row for row in all_rows() if row.group in options.group or "all" in options.group]
    rows = [row for row in every if row.group in options.group or row.group not in ASKED_FOR]
    rows = quick_rows(rows) if options.quick else rows
    rows = [row for row in rows if not options.only or any(word in row.name for word in options.only)]
    rows = [row for row in rows if row.is_promised or not options.promised]
    if options.missing or options.stale:
        states = states_of(rows, read(results_file(options)))
        wanted = set(State) - {State.CURRENT} if options.stale else {State.MISSING}
        rows = [row for row in rows if states[row.name] in wanted]
    changes: dict[str, Any] = {}
    if options.size:
        changes["height"], changes["width"] = (int(side) for side in options.size.split("x"))
    changes |= {name: getattr(options, name) for name in ("frames", "steps") if getattr(options, name)}
    rows = [replace(row, **changes) if row.work not in SIZES else row for row in rows]
    if changes.keys() & {"height", "width", "frames"}:  # a promise belongs to the row's own size
        rows = [replace(unpromised(row), group="own size") for row in rows]
        rows = list({row.name: row for row in rows}.values())
    given = {"vram_budget": options.budget, "precision": options.precision, "kernels": options.kernels}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        note = "" if options.same_name else ", ".join(f"{name} {value}" for name, value in given.items())
        rows = [
            replace(row, ours=replace(row.ours, **given), note=", ".join(n for n in (row.note, note) if n))
            for row in rows
            if row.ours is not None
        ]
    return sorted(rows, key=by_file)  # a stable order within each file's rows


def quick_rows(rows: Iterable[Row]) -> list[Row]:
    """Rows at a size for the CPU, one of those that differ in a number alone."""
    kinds: dict[Any, Row] = {}
    for row in rows:
        sides = [
            (side.comfy, side.attention, side.backend, side.cards, side.ram_budget is None) for _, side in row.sides
        ]
        kinds.setdefault((row.group, TINY[row.model], row.work, row.storage, row.kind, *sides), quick(row))
    return list({row.name: row for row in kinds.values()}.values())


def command_line() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="dev.py bench models"
    )
    add_options(cli)
    add = cli.add_argument
    add("--only", action="append", metavar="TEXT", help="rows whose name contains this; may be repeated")
    add("--group", action="append", help="rows of this group; `table` by default, `all` for all")
    add("--promised", action="store_true", help="only rows of which something is asked")
    add("--missing", action="store_true", help="leave out rows that the file has")
    add("--stale", action="store_true", help="as --missing, but measure rows of other sources again")
    add("--within", type=float, metavar="MINUTES", help="the most that the call may take")
    add("--side", choices=["stock", "ours", "both"], default="both", help="one is only shown, not kept")
    add("--repeats", type=int, default=1, help="how often stock and ours take turns")
    add("--accuracy", action="store_true", help="also run stock in fp32, and compare with it")
    add("--size", help="HEIGHTxWIDTH instead of the rows' own")
    add("--frames", type=int, help="instead of the rows' own")
    add("--steps", type=int, help="instead of the rows' own")
    add("--budget", type=float, help="GiB for our weights, -1 for what is free, 0 for stock's memory")
    add("--precision", choices=["auto", "precise", "fast", "turbo"])
    add("--kernels", choices=["auto", "on", "off"])
    add("--same-name", action="store_true", help="these settings are no part of a row's name: for `compare`")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing: take over these files' rows")
    add("--bounds", type=Path, metavar="FILE", help="measure nothing: set the bounds in these results anew")
    add("--list", action="store_true", help="only name the rows")
    return cli


def main(arguments: list[str] | None = None) -> int:
    cli = command_line()
    options = cli.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.bounds:
        print(f"{refresh_bounds(options.bounds)} rows have their bounds anew")
        return 0
    for path in options.merge or ():
        into = options.results or card_results(path)
        print(f"{merge_file(into, path)} rows of {path} are in {into} now")
    if options.merge:
        return 0
    options.group = options.group or ["table"]
    rows = chosen_rows(options)
    if not rows:
        cli.error("no such row is left to be measured; --list --group all shows all of them")
    on_card = shutil.which("nvidia-smi") is not None
    if options.list:
        is_known = options.results or options.quick or on_card
        print(listed(rows, states_of(rows, read(results_file(options))) if is_known else {}))
        return 0
    if not options.quick and not on_card:
        print("no NVIDIA GPU on this machine; --quick tries the bench on the CPU")
        return 1
    bench = Bench(options)
    try:
        bench.measure(rows, options.within and options.within * 60)
    finally:
        bench.close()
        bench.files.drop(())
        print("\ntime: " + ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in bench.spent.items()))
    print("tiny checkpoints on the CPU: these figures mean nothing" if options.quick else "")
    print("\n".join([HEAD, *map(line, bench.found), *(f"not begun: {row.name}" for row in bench.left)]))
    return int(any("error" in one.get("ours", {}) for one in bench.found))
