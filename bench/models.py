"""Measure whole models against stock ComfyUI: seconds per step, first step, load time, peak of the card, accuracy.

    python bench/models.py --free 8                     every row that is promised something; about 9 minutes on an H200
    python bench/models.py --free 8 --only "14B 480"    the rows whose name has this; merged into the same file
    python bench/models.py --group budget               other rows: growth, budget, backend, switches, stock, storage, all
    python bench/models.py --accuracy --only "1.3B"     also an fp32 run of stock, and both sides' error against it
    python bench/models.py --quick                      tiny checkpoints on the CPU: that it runs, not how fast

Stock and ours take turns, each in a process of its own, on random weights of the real shapes; `--free` leaves so many GiB
of the card free, so that a large card acts as a small one. `dev.py bench models` sets COMFYUI_PATH.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # started as a plain script: the pack under its alias, without running its entry point
    _package = types.ModuleType("fusestream")
    _package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["fusestream"] = _package
    __package__ = "fusestream.bench"
    importlib.import_module(__package__)

from .end_to_end.process import Process
from .end_to_end.results import HEAD, card_file, distance, line, merge, read, refresh_bounds, row_result
from .end_to_end.rows import Row, Side, all_rows, quick

EXACT = Side(comfy=("--fp32-unet", "--fp32-vae", "--fp32-text-enc"), ballast=False)
QUICK_RESULTS = Path(tempfile.gettempdir()) / "fusestream-bench-quick.json"


class Turn(NamedTuple):
    """One side's work, once."""

    row: Row
    who: str
    side: Side
    number: int


class Bench:
    """One call: the options, the files of weights, the time spent."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begun = time.perf_counter()
        self.spent: dict[str, float] = {}
        self.folder: Path = options.folder
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.started: list[Process] = []

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begun:6.1f} s] {text}", flush=True)

    @contextmanager
    def spending(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - start

    def start(self, job: dict[str, Any], name: str) -> Process:
        log = self.logs / f"{re.sub(r'[^A-Za-z0-9.]+', '_', name)}.log"
        self.started.append(Process({**job, "quick": self.options.quick}, log))
        return self.started[-1]

    def finish(self, process: Process, word: dict[str, Any]) -> dict[str, Any]:
        """What it found. A failure is shown, with what it said last."""
        result = process.go(word, self.options.limit)
        self.started.remove(process)
        if "error" in result and result["error"] != "out of memory":
            print("\n".join(f"    | {line[:200]}" for line in process.last_lines(self.options.tail)), flush=True)
        return result

    def close(self) -> None:
        for process in self.started:
            process.end()

    # ------------------------------------------------------------------------------------------------- rows of a file

    def measure(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """All rows that use one file of weights: their results, already in the card's file."""
        turns = [turn for row in rows for turn in self.turns(row)]
        runs: dict[str, dict[str, list[dict[str, Any]]]] = {row.name: {} for row in rows}
        found: list[dict[str, Any]] = []
        paths: dict[str, str] = {}
        for at in range(0, len(turns), self.options.ahead):
            batch = turns[at : at + self.options.ahead]
            processes = [self.start(self.job(turn), f"{turn.row.name} {turn.who} {turn.number}") for turn in batch]
            for model in sorted({model for turn in batch for model in turn.row.files} - paths.keys()):
                paths[model] = self.weights(model, rows[0].storage)  # meanwhile
            with self.spending("start"):
                for process in processes:
                    process.wait_ready(self.options.limit)
            for turn, process in zip(batch, processes, strict=True):
                with self.spending(turn.who):
                    run = self.finish(process, {"paths": {model: paths[model] for model in turn.row.files}})
                runs[turn.row.name].setdefault(turn.who, []).append(run)
                self.tell(turn, run)
                if turn is [other for other in turns if other.row is turn.row][-1]:
                    found.append(self.result(turn.row, runs[turn.row.name]))
        for path in paths.values() if not self.options.keep else ():
            Path(path).unlink()  # disks are small
        return found

    def turns(self, row: Row) -> list[Turn]:
        sides = [(who, side) for who, side in (("stock", row.stock), ("ours", row.ours)) if side is not None]
        sides = [pair for pair in sides if self.options.side in (pair[0], "both")]
        turns = [Turn(row, who, side, n) for n in range(self.options.repeats) for who, side in sides]
        return turns + ([Turn(row, "exact", EXACT, 0)] if self.options.accuracy and sides else [])

    def job(self, turn: Turn) -> dict[str, Any]:
        plain = {name: value for name, value in asdict(turn.row).items() if name not in ("stock", "ours")}
        job = {"task": "work", "who": turn.who, "row": plain, "side": asdict(turn.side), "free": self.options.free}
        return {**job, "sample_to": str(self.sample_of(turn.who))}

    def tell(self, turn: Turn, run: dict[str, Any]) -> None:
        times = ", ".join(f"{s:.3g}" for s in run.get("s", [])) or run.get("error", "nothing")
        more = (
            f"; loaded in {run['load s']:.1f} s, peak {run['peak GiB']:.2f} GiB, {run['took s']:.0f} s"
            if "load s" in run
            else ""
        )
        self.say(f"{turn.row.name}: {turn.who} {times}{more}")

    def weights(self, model: str, storage: str) -> str:
        """The model's file, made at its first use."""
        key = f"{model}_{storage}"
        kept = self.folder / f"{key}.safetensors"
        if kept.exists() and not self.options.quick:
            return str(kept)  # from a call with --keep
        with self.spending("weights"):
            job = {"task": "weights", "model": model, "storage": storage, "folder": str(self.folder)}
            made = self.finish(self.start(job, f"weights {key}"), {})
        if "error" in made:
            raise SystemExit(f"the weights of {key} could not be written: {made['error']}")
        rate = made["bytes"] / max(made["seconds"], 1e-9) / 1e9
        self.say(f"weights {key}: {made['bytes'] / 1e9:.2f} GB in {made['seconds']:.1f} s, {rate:.1f} GB/s")
        return str(made["path"])

    def result(self, row: Row, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """What a row's runs come to; merged into the card's file."""
        exact = [run for run in runs.pop("exact", []) if "error" not in run]
        samples = {who: self.sample_of(who) for who, found in runs.items() if "error" not in found[-1]}
        accuracy = {who: distance(one, self.sample_of("exact")) for who, one in samples.items() if exact}
        if {"stock", "ours"} <= samples.keys():
            accuracy["ours against stock"] = distance(samples["ours"], samples["stock"])
        environment: dict[str, str] = next(
            (run["environment"] for found in runs.values() for run in found if "environment" in run), {}
        )
        into = self.results_path(environment.get("card", "CPU"))
        found = row_result(row, runs, read(into), self.options.free, self.options.quick)
        found |= {"accuracy": accuracy, "environment": environment}
        if len(runs) == sum(side is not None for side in (row.stock, row.ours)) or self.options.results:
            merge(into, found)  # half a row is shown, and does not replace a whole one
        return found

    def sample_of(self, who: str) -> Path:
        return self.folder / f"sample-{who}.f32"

    def results_path(self, card: str) -> Path:
        chosen: Path | None = self.options.results
        return chosen or (QUICK_RESULTS if self.options.quick else card_file(card))


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """Rows by group and name, with the sizes that the command line gives instead of theirs; each file's rows together."""
    rows = [row for row in all_rows() if "all" in options.group or row.group in options.group]
    rows = [row for row in rows if not options.only or any(word in row.name for word in options.only)]
    changes: dict[str, Any] = {}
    if options.size:
        changes["height"], changes["width"] = (int(side) for side in options.size.split("x"))
    changes |= {name: getattr(options, name) for name in ("frames", "steps") if getattr(options, name)}
    rows = [replace(row, **changes) if row.work != "text" else row for row in rows]
    if changes.keys() & {"height", "width", "frames"}:  # what is asked is asked of the row as it was
        rows = [replace(row, asked=None, asked_first=None, seconds=None, group="own size") for row in rows]
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
    return sorted(rows, key=lambda row: (row.model, row.storage))  # sorting keeps the order within one file's rows


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    cli.add_argument("--free", type=float, default=8.0, help="GiB of the card left free")
    cli.add_argument("--only", action="append", help="rows whose name contains this; may be repeated")
    cli.add_argument("--group", action="append", help="rows of this group; `table` by default, `all` for all")
    cli.add_argument("--side", choices=["stock", "ours", "both"], default="both", help="one is only shown, not kept")
    cli.add_argument("--repeats", type=int, default=1, help="how often stock and ours take turns")
    cli.add_argument("--accuracy", action="store_true", help="also run stock in fp32, and compare with it")
    cli.add_argument("--size", help="HEIGHTxWIDTH instead of the rows' own")
    cli.add_argument("--frames", type=int, help="instead of the rows' own")
    cli.add_argument("--steps", type=int, help="instead of the rows' own")
    cli.add_argument("--budget", type=float, help="GiB for our weights, -1 for what is free, 0 for stock's memory")
    cli.add_argument("--precision", choices=["precise", "fast"])
    cli.add_argument("--kernels", choices=["auto", "on", "off"])
    cli.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "fusestream-bench", help="for weights"
    )
    cli.add_argument("--keep", action="store_true", help="leave the weights for another call")
    cli.add_argument(
        "--ahead", type=int, default=1, help="processes that start at once and work in turn: 6 on a large card"
    )
    cli.add_argument("--limit", type=float, default=300.0, help="seconds of one process")
    cli.add_argument("--tail", type=int, default=12, help="lines to show of a process that failed")
    cli.add_argument("--results", type=Path, help="the file to merge into; bench/results/<gpu>.json by default")
    cli.add_argument("--quick", action="store_true", help="tiny checkpoints on the CPU; no figure of it is kept")
    cli.add_argument(
        "--bounds", type=Path, metavar="FILE", help="measure nothing: set the bounds in these results anew"
    )
    cli.add_argument("--list", action="store_true", help="only name the rows")
    options = cli.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
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
    found: list[dict[str, Any]] = []
    try:
        for _, group in groupby(rows, lambda row: (row.model, row.storage)):
            found += bench.measure(list(group))
    finally:
        bench.close()
        print("\ntime: " + ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in bench.spent.items()))
    print("tiny checkpoints on the CPU: these figures mean nothing" if options.quick else "")
    print(HEAD)
    for one in found:
        print(line(one))
    return int(any("error" in one.get("ours", {}) for one in found))


if __name__ == "__main__":
    sys.exit(main())
