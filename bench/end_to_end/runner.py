"""Runs rows of whole models: starts their processes, makes the files of weights, merges the results.

Standard library only: the card is left to the processes.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from .. import sources
from . import gguf_pack
from .bounds import measured_rates
from .files import Files
from .process import Process
from .ram import RamBallast
from .results import SECTION, ask_card, card_file, card_results, distance, merge, read, row_result
from .row_types import Model, Row, Side, by_file

EXACT = Side(comfy=("--fp32-unet", "--fp32-vae", "--fp32-text-enc"), ballast=False)
QUICK_RESULTS = Path(tempfile.gettempdir()) / "fusestream-bench-quick.json"
EVERY = 10_000  # turns share a few processes on the CPU
AHEAD = 20
LARGE_CARD_MIB = 40_000  # where so many waiting processes' contexts do not matter
TURN_S, UNKNOWN_S = 4.0, 60.0  # a turn's start and end; a turn that was never measured
UNKNOWN_WHOLE_S = 120.0  # one from a prompt to its end


def add_options(cli: argparse.ArgumentParser) -> None:
    """Options of every run of whole models."""
    cli.add_argument("--free", type=float, default=8.0, help="GiB of the card left free")
    cli.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "fusestream-bench", help="for weights"
    )
    cli.add_argument("--keep", action="store_true", help="leave the weights for another call")
    cli.add_argument(
        "--ahead", type=int, help="processes that start at once and work in turn; by default 20 on a large card, or 1"
    )
    cli.add_argument("--limit", type=float, default=300.0, help="seconds of one process")
    cli.add_argument("--tail", type=int, default=12, help="lines to show of a process that failed")
    cli.add_argument("--results", type=Path, help="the file to merge into; bench/results/<gpu>.json by default")
    cli.add_argument("--quick", action="store_true", help="tiny checkpoints on the CPU; no figure of it is kept")


def results_file(options: argparse.Namespace, of_card: Callable[[], Path] = card_results) -> Path:
    """The file that figures go to: the one that the options name, or the card's."""
    if options.results or options.quick:
        return Path(options.results or QUICK_RESULTS)
    return of_card()


def expected_seconds(row: Row, results: Mapping[str, Any]) -> float:
    """How long a row takes: as long as when it was measured before, by the card's results."""
    rows = results.get(SECTION, {}).get("rows", [])
    found: Mapping[str, Any] = next((one for one in rows if one["name"] == row.name), {})

    def turn(side: Mapping[str, Any]) -> float:
        if "all s" not in side:
            return UNKNOWN_WHOLE_S if row.is_whole else UNKNOWN_S
        return TURN_S + float(side["load s"]) + sum(map(sum, side["all s"]))

    return sum(turn(found.get(who, {})) for who, _ in row.sides)


def processes_ahead(is_quick: bool) -> int:
    """How many may start at once: each takes the better part of a core for its start, and a context on the card while it waits."""
    cores = os.cpu_count() or 1
    if is_quick:
        return min(4, cores)
    told = ask_card("memory.total")
    return max(1, min(AHEAD, cores + cores // 4)) if told.isdigit() and int(told) >= LARGE_CARD_MIB else 1


class Turn(NamedTuple):
    """One side's work, once."""

    row: Row
    who: str
    side: Side
    number: int


def batches(turns: Iterable[Turn], most: int) -> Iterator[list[Turn]]:
    """Turns that start together, for which all files are written: so many, and large files beside no other row's."""
    batch: list[Turn] = []
    for turn in turns:
        parts = batch and turn.row.files != batch[-1].row.files and (turn.row.is_alone or batch[-1].row.is_alone)
        if parts or len(batch) == most:
            yield batch
            batch = []
        batch.append(turn)
    if batch:
        yield batch


class Bench:
    """One call: the options, the processes, the files of weights, the time spent."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begun = time.perf_counter()
        self.spent: dict[str, float] = {}
        self.folder: Path = options.folder
        self.ahead: int = EVERY if options.quick else options.ahead or processes_ahead(options.quick)
        self.files = Files(self.folder, self.make_weights, self.say, keep=options.keep, anew=options.quick)
        self.left: list[Row] = []  # rows there was no time for
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.started: list[Process] = []
        self.sessions: dict[str, Process] = {}
        self.writer: Process | None = None  # of files of weights
        self.found: list[dict[str, Any]] = []
        self.ballast = RamBallast()

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

    def process_of(self, turn: Turn) -> Process:
        """A process of its own for each turn. Tries on the CPU share one for each side."""
        job = self.job(turn)
        if not self.options.quick:
            return self.start(job, f"{turn.row.name} {turn.who} {turn.number}")
        if turn.who not in self.sessions:
            self.sessions[turn.who] = self.start({**job, "task": "session"}, f"session {turn.who}")
        return self.sessions[turn.who]

    def finish(self, process: Process, word: dict[str, Any]) -> dict[str, Any]:
        """The result of a process. A failure is shown with its last lines."""
        stays = process in (*self.sessions.values(), self.writer)
        result = process.go(word, self.options.limit, stay=stays)
        if not stays:
            self.started.remove(process)
        if "error" in result and result["error"] != "out of memory":
            print("\n".join(f"    | {line[:200]}" for line in process.last_lines(self.options.tail)), flush=True)
        return result

    def close(self) -> None:
        for process in self.started:
            process.end()

    # -------------------------------------------------------------------------------------------------- rows in their turn

    def measure(self, rows: Sequence[Row], seconds: float | None = None) -> list[dict[str, Any]]:
        """Measure these rows, file by file. Each is in the card's file, and in `found`, once it is done.

        seconds   how long this may take. A row that would not fit is not begun, and is in `left`.
        """
        self.left = []
        rows = self.without_lacking(rows)
        begun, before = time.perf_counter(), len(self.found)
        turns = [turn for row in sorted(rows, key=by_file) for turn in self.turns(row)]
        runs: dict[str, dict[str, list[dict[str, Any]]]] = {row.name: {} for row in rows}
        known = {} if seconds is None else read(results_file(self.options))

        def fits(row: Row) -> bool:
            return seconds is None or time.perf_counter() - begun + expected_seconds(row, known) <= seconds

        at = 0
        for batch in batches(turns, self.ahead):
            at += len(batch)
            if not any(runs[turn.row.name] or fits(turn.row) for turn in batch):
                self.leave(turn.row for turn in batch)
                continue
            processes = [self.process_of(turn) for turn in batch]
            for row in dict.fromkeys(turn.row for turn in batch):
                self.files.of(row)  # meanwhile
            self.end_writer()
            with self.spending("start"):
                for process in processes:
                    process.wait_ready(self.options.limit)
            for turn, process in zip(batch, processes, strict=True):
                row = turn.row
                if row in self.left or not (runs[row.name] or fits(row)):
                    self.leave([row])
                    self.drop(process)
                    continue
                with self.spending("ballast"):
                    self.ballast.leave(None if self.options.quick else row.ram)
                with self.spending(turn.who):
                    run = self.finish(process, {"job": self.job(turn), "paths": self.files.of(row)})
                runs[row.name].setdefault(turn.who, []).append(run)
                self.tell(turn, run)
                if turn is [other for other in turns if other.row is row][-1]:
                    self.found.append(self.result(row, runs[row.name]))
            self.files.drop(turn.row for turn in turns[at:])
        return self.found[before:]

    def without_lacking(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Less those that stand beside a node pack which nobody named."""
        lacking = [row for row in rows if row.needs_pack and gguf_pack.folder() is None]
        if lacking:
            self.say(
                f"{len(lacking)} rows stand beside {gguf_pack.WHERE} and are left: {gguf_pack.VARIABLE} names no copy of it"
            )
            self.leave(lacking)
        return [row for row in rows if row not in lacking]

    def leave(self, rows: Iterable[Row]) -> None:
        self.left += [row for row in dict.fromkeys(rows) if row not in self.left]

    def drop(self, process: Process) -> None:
        process.end()
        self.started.remove(process)

    def turns(self, row: Row) -> list[Turn]:
        sides = [pair for pair in row.sides if self.options.side in (pair[0], "both")]
        turns = [Turn(row, who, side, n) for n in range(self.options.repeats) for who, side in sides]
        return turns + ([Turn(row, "exact", EXACT, 0)] if self.options.accuracy and sides else [])

    def job(self, turn: Turn) -> dict[str, Any]:
        sides = ("stock", "ours", "peers")
        plain = {name: value for name, value in asdict(turn.row).items() if name not in sides}
        job = {"task": "work", "who": turn.who, "row": plain, "side": asdict(turn.side), "free": self.free(turn.row)}
        return {**job, "sample_to": str(self.sample_of(turn.who)), "quick": self.options.quick}

    def free(self, row: Row) -> float:
        """GiB of the card that the row leaves free."""
        found: float = self.options.free if row.free is None else row.free
        return found

    def tell(self, turn: Turn, run: dict[str, Any]) -> None:
        times = ", ".join(f"{s:.3g}" for s in run.get("s", [])) or run.get("error", "nothing")
        more = (
            f"; loaded in {run['load s']:.1f} s, peak {run['peak GiB']:.2f} GiB, {run['took s']:.0f} s"
            if "load s" in run
            else ""
        )
        self.say(f"{turn.row.name}: {turn.who} {times}{more}")

    def make_weights(self, model: Model, storage: str) -> str:
        """Write a model's file. Its path. The process that does it is ended before anything is measured: it holds the card too."""
        job = {"task": "weights", "model": model, "storage": storage, "folder": str(self.folder)}
        with self.spending("weights"):
            self.writer = self.writer or next(iter(self.sessions.values()), None) or self.start(job, "weights")
            made = self.finish(self.writer, {"job": {**job, "quick": self.options.quick}})
        if "error" in made:
            raise SystemExit(f"the weights of {model} in {storage} could not be written: {made['error']}")
        rate = made["bytes"] / max(made["seconds"], 1e-9) / 1e9
        self.say(f"weights {model} {storage}: {made['bytes'] / 1e9:.2f} GB in {made['seconds']:.1f} s, {rate:.1f} GB/s")
        return str(made["path"])

    def end_writer(self) -> None:
        if self.writer in self.started and self.writer not in self.sessions.values():
            self.drop(self.writer)
        self.writer = None

    def result(self, row: Row, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """The result of a row's runs, merged into the card's file."""
        exact = [run for run in runs.pop("exact", []) if "error" not in run]
        samples = {who: self.sample_of(who) for who, found in runs.items() if "error" not in found[-1]}
        accuracy = {who: distance(one, self.sample_of("exact")) for who, one in samples.items() if exact}
        if "stock" in samples:
            others = (who for who in samples if who != "stock")
            accuracy |= {f"{who} against stock": distance(samples[who], samples["stock"]) for who in others}
        environment: dict[str, str] = next(
            (run["environment"] for found in runs.values() for run in found if "environment" in run), {}
        )
        of_card = card_file(environment.get("card", "CPU"))
        into = results_file(self.options, lambda: of_card)
        rates = next((data for path in (into, of_card) if measured_rates(data := read(path))), {})
        found = row_result(row, runs, rates, self.free(row), self.options.quick)
        here = {**environment, "sources": sources.of_models((model for model, _ in row.files), row.work)}
        found |= {"accuracy": accuracy, "environment": here}
        if len(runs) == len(row.sides) or self.options.results:
            merge(into, found)  # half a row is shown, and does not replace a whole one
        return found

    def sample_of(self, who: str) -> Path:
        return self.folder / f"sample-{who}.f32"
