"""Measure what a second card gains: 14B 480x832x81 with guidance, by stock's *MultiGPU CFG Split*, on one card and on two.

    python bench two                one machine with two cards; two minutes of H200s; writes bench/results/<gpu>.json
    python bench two --only ours    without stock beside
    python bench two --quick        a tiny model on the CPU under two names: that it runs, not how fast

All but --free GiB of each card are taken by a plain allocation. Each turn has a process of its own; what is found is in the file at
once, so a call that is cut off keeps the turns it had. Promised: ours is 1.8 times as fast on two cards, each stays within its
budget, and the result is as near to that of one card as ours on one is to stock's.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import sources
from .end_to_end.bounds import LIMIT_GIB
from .end_to_end.process import Process
from .end_to_end.results import card_file, distance, read, rounded, side_result, write
from .end_to_end.rows import Row, Side, quick, sampling
from .end_to_end.runner import Bench, Turn, add_options, results_file

SECTION = "two"
STEPS = 3
ROW = sampling("wan14", 480, 832, 81, STEPS)
ASKED = 1.8
SIDES = {"ours": "FuseStream", "stock": "ComfyUI"}
# What says most comes first: a machine with two cards may go at any moment.
TURNS = (("ours", 1), ("ours", 2), ("stock", 2), ("stock", 1))
COUNTS = {1: "one", 2: "two"}
HEAD = (
    "One card",
    "Two cards",
    "Faster",
    "Promised",
    "First, one / two",
    "Peak, one / of each of two",
    "Error beside one card",
)
NOT_YET = "Not measured yet: no machine with two cards was at hand.\n"


def turns(row: Row, only: str | None) -> list[Turn]:
    return [Turn(row, who, Side(cards=cards), cards) for who, cards in TURNS if only in (None, who)]


def sample_of(bench: Bench, who: str, cards: int) -> Path:
    """Where some values of a turn's result are put."""
    return bench.folder / f"sample-{who}-{COUNTS[cards]}.f32"


def job_of(bench: Bench, turn: Turn) -> dict[str, Any]:
    return bench.job(turn) | {"sample_to": str(sample_of(bench, turn.who, turn.number))}


def runs(bench: Bench, row: Row, all_turns: Sequence[Turn]) -> Iterator[tuple[Turn, dict[str, Any]]]:
    """Each turn and what it found, one after another; as many processes as may wait start beside each other."""
    for at in range(0, len(all_turns), bench.ahead):
        batch = all_turns[at : at + bench.ahead]
        processes: list[Process] = [
            bench.start(job_of(bench, turn), f"two {turn.who} {COUNTS[turn.number]}") for turn in batch
        ]
        paths = bench.files.of(row)  # meanwhile
        bench.end_writer()
        for turn, process in zip(batch, processes, strict=True):
            process.wait_ready(bench.options.limit)
            run = bench.finish(process, {"job": job_of(bench, turn), "paths": paths})
            bench.tell(turn._replace(who=f"{turn.who} on {COUNTS[turn.number]}"), run)
            yield turn, run


def found_in(
    sides: Mapping[str, Mapping[str, Any]], samples: Mapping[tuple[str, str], Path], asked: float | None = ASKED
) -> list[dict[str, Any]]:
    """A row for each side of which there is anything. sides: by who, by count. samples: by both, of turns that ended well. asked:
    of ours, how many times as fast two are to be."""

    def apart(one: tuple[str, str], other: tuple[str, str]) -> float | None:
        return distance(samples[one], samples[other]) if {one, other} <= samples.keys() else None

    beside = apart(("ours", "one"), ("stock", "one"))
    rows = []
    for who, label in SIDES.items():
        if who not in sides:
            continue
        row: dict[str, Any] = {"label": label, "asked": asked if who == "ours" else None, **sides[who]}
        times = [row.get(count, {}).get("s") for count in COUNTS.values()]
        row["faster"] = times[0] / times[1] if None not in times else None
        row["error"] = apart((who, "two"), (who, "one"))
        row["beside stock"] = beside if who == "ours" else None
        row["met"] = met(row)
        rows.append(row)
    return rows


def met(row: Mapping[str, Any]) -> bool | None:
    """Whether what was promised holds; None where nothing was, or a turn is missing."""
    if row["asked"] is None:
        return None
    if any("error" in row.get(count, {}) for count in COUNTS.values()):
        return False
    if row["faster"] is None or row["error"] is None:
        return None
    two = row["two"]
    nearest = row["error"] <= (math.inf if row["beside stock"] is None else row["beside stock"])
    return bool(row["faster"] >= row["asked"] and max(two["peaks GiB"]) < LIMIT_GIB and two["finite"] and nearest)


def measured(bench: Bench, row: Row, only: str | None = None) -> list[dict[str, Any]]:
    """All turns; in the card's file after each."""
    sides: dict[str, dict[str, Any]] = {}
    samples: dict[tuple[str, str], Path] = {}
    rows: list[dict[str, Any]] = []
    for turn, run in runs(bench, row, turns(row, only)):
        count = COUNTS[turn.number]
        sides.setdefault(turn.who, {})[count] = side_result([run])
        if "error" not in run:
            samples[turn.who, count] = sample_of(bench, turn.who, turn.number)
        rows = found_in(sides, samples, None if bench.options.quick else ASKED)
        if "environment" in run:
            here = {**run["environment"], "sources": sources.of_models([row.model], row.work)}
            keep(bench.options, here, row, bench.free(row), rows)
    return rows


def keep(
    options: argparse.Namespace,
    environment: Mapping[str, Any],
    row: Row,
    free: float,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """In the card's file, in place of what was there."""
    into = results_file(options, lambda: card_file(environment["card"]))
    section = {"environment": environment, "name": row.name, "free GiB": free, "steps": row.steps, "rows": rows}
    write(into, read(into) | {SECTION: rounded(section)})


def cells(row: Mapping[str, Any]) -> list[str]:
    """What the table tells of a side."""
    one, two = (row.get(count, {}) for count in COUNTS.values())

    def seconds(side: Mapping[str, Any], name: str) -> str:
        return f"{side[name]:.3g} s" if name in side else str(side.get("error", "-"))

    missed = "**missed** " if row["met"] is False else ""
    peaks = ", ".join(f"{gib:.2f}" for gib in two.get("peaks GiB", ())) or "-"
    return [
        row["label"],
        seconds(one, "s"),
        missed + seconds(two, "s"),
        "-" if row["faster"] is None else f"{row['faster']:.2f}x",
        "-" if row["asked"] is None else f"{row['asked']:g}x",
        f"{seconds(one, 'first s')} / {seconds(two, 'first s')}",
        f"{one['peak GiB']:.2f} / {peaks} GiB" if "peak GiB" in one else f"- / {peaks} GiB",
        "-" if row["error"] is None else f"{row['error']:.2g}",
    ]


def table(results: Mapping[str, Any]) -> str:
    """Markdown: a step on one card and on two."""
    section = results[SECTION]
    lines = [f"| {section['name']} | {' | '.join(HEAD)} |", f"| {' | '.join(['---'] * (1 + len(HEAD)))} |"]
    lines += [f"| {' | '.join(cells(row))} |" for row in section["rows"]]
    beside = next((row["beside stock"] for row in section["rows"] if row["beside stock"] is not None), None)
    if beside is not None:
        lines += ["", f"On one card FuseStream's result is {beside:.2g} from ComfyUI's."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="dev.py bench two"
    )
    add_options(cli)
    cli.add_argument("--only", choices=SIDES, help="measure this side alone")
    cli.add_argument("--steps", type=int, default=STEPS, help="of the sampler; the first is apart")
    options = cli.parse_args(arguments)
    options.side, options.repeats, options.accuracy, options.shared = "both", 1, False, False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.real:
        cli.error("random weights alone: --real is for `bench models` and `bench all`")
    if not options.quick and shutil.which("nvidia-smi") is None:
        print("no NVIDIA GPU on this machine; --quick tries the bench on the CPU")
        return 1
    row = quick(ROW) if options.quick else replace(ROW, steps=options.steps)
    bench = Bench(options)
    try:
        rows = measured(bench, row, options.only)
    finally:
        bench.close()
        bench.files.drop(())
    print(table({SECTION: {"name": row.name, "rows": rows}}))
    return int(any("error" in found.get(count, {}) for found in rows for count in COUNTS.values()))
