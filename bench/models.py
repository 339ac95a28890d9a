"""Measure whole models against stock ComfyUI: seconds per step, first step, load time, peak of the card, accuracy.

    python bench models --free 8                     every row that is promised something; about 9 minutes on an H200
    python bench models --free 8 --only "14B 480"    the rows whose name has this; merged into the same file
    python bench models --group budget               other rows: growth, budget, default, pictures, ... or all
    python bench models --accuracy --only "1.3B"     also an fp32 run of stock, and both sides' error against it
    python bench models --real DIR                   a folder's own checkpoints instead of random weights
    python bench models --quick                      tiny checkpoints on the CPU: that it runs, not how fast

Stock and ours take turns, each in a process of its own, on random weights of the real shapes; `--free` leaves so many GiB
of the card free, so that a large card acts as a small one. `dev.py bench models` sets COMFYUI_PATH.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .end_to_end.parts import by_file
from .end_to_end.results import HEAD, line, refresh_bounds
from .end_to_end.rows import SIZES, Row, all_rows, quick, unpromised
from .end_to_end.runner import Bench, add_options


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """Rows by group and name, with the sizes that the command line gives instead of theirs; each file's rows together."""
    rows = [row for row in all_rows() if "all" in options.group or row.group in options.group]
    rows = [row for row in rows if not options.only or any(word in row.name for word in options.only)]
    changes: dict[str, Any] = {}
    if options.size:
        changes["height"], changes["width"] = (int(side) for side in options.size.split("x"))
    changes |= {name: getattr(options, name) for name in ("frames", "steps") if getattr(options, name)}
    rows = [replace(row, **changes) if row.work not in SIZES else row for row in rows]
    if changes.keys() & {"height", "width", "frames"}:  # what is asked is asked of the row as it was
        rows = [replace(unpromised(row), group="own size") for row in rows]
        rows = list({row.name: row for row in rows}.values())
    given = {"vram_budget": options.budget, "precision": options.precision, "kernels": options.kernels}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        note = ", ".join(f"{name} {value}" for name, value in given.items())
        rows = [
            replace(row, ours=replace(row.ours, **given), note=", ".join(n for n in (row.note, note) if n))
            for row in rows
            if row.ours is not None
        ]
    if options.quick:
        rows = list({row.name: row for row in map(quick, rows)}.values())
    return sorted(rows, key=by_file)  # sorting keeps the order within one file's rows


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add_options(cli)
    cli.add_argument("--only", action="append", help="rows whose name contains this; may be repeated")
    cli.add_argument("--group", action="append", help="rows of this group; `table` by default, `all` for all")
    cli.add_argument("--side", choices=["stock", "ours", "both"], default="both", help="one is only shown, not kept")
    cli.add_argument("--repeats", type=int, default=1, help="how often stock and ours take turns")
    cli.add_argument("--accuracy", action="store_true", help="also run stock in fp32, and compare with it")
    cli.add_argument("--size", help="HEIGHTxWIDTH instead of the rows' own")
    cli.add_argument("--frames", type=int, help="instead of the rows' own")
    cli.add_argument("--steps", type=int, help="instead of the rows' own")
    cli.add_argument("--budget", type=float, help="GiB for our weights, -1 for what is free, 0 for stock's memory")
    cli.add_argument("--precision", choices=["auto", "precise", "fast", "turbo"])
    cli.add_argument("--kernels", choices=["auto", "on", "off"])
    cli.add_argument(
        "--bounds", type=Path, metavar="FILE", help="measure nothing: set the bounds in these results anew"
    )
    cli.add_argument("--list", action="store_true", help="only name the rows")
    options = cli.parse_args(arguments)
    options.shared = False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.quick and options.real:
        cli.error("--quick tries tiny checkpoints of its own: not together with --real")
    if options.bounds:
        print(f"{refresh_bounds(options.bounds)} rows have their bounds anew")
        return 0
    options.group = options.group or ["table"]
    rows = chosen_rows(options)
    if not rows:
        cli.error("no row has such a name; --list --group all shows them")
    if options.list:
        print("\n".join(f"{row.group:10} {row.name}" for row in rows))
        return 0
    if not options.quick and shutil.which("nvidia-smi") is None:
        print("no NVIDIA GPU on this machine; --quick tries the bench on the CPU")
        return 1
    bench = Bench(options)
    try:
        bench.measure(bench.files.served_by_own(rows) if options.real else rows)
    finally:
        bench.close()
        print("\ntime: " + ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in bench.spent.items()))
    print("tiny checkpoints on the CPU: these figures mean nothing" if options.quick else "")
    print(HEAD)
    for one in bench.found:
        print(line(one))
    return int(any("error" in one.get("ours", {}) for one in bench.found))
