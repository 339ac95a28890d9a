"""Measure everything, in parts that each fit into a call of nine minutes and merge into one result.

    python bench all --list                  the parts, their rows, and what each should take on an H200
    python bench all --free 8                every part in turn; about 57 minutes on an H200
    python bench all --free 8 --part 2/6     one of them; stock and ours of a row are always of one call
    python bench all --part left             rows for which the parts so far had no time
    python bench all --missing               only rows of whole models that the file does not have yet
    python bench all --stale                 those too that were measured with other sources than these
    python bench all --stale --promised      of these those that are promised something
    python bench all --merge OTHER.json      rows measured elsewhere, on a card of the same name
    python bench all --real DIR              a folder's own checkpoints; into bench/results/real
    python bench all --quick                 every group on tiny checkpoints and the CPU: that it runs, not how fast

A row that would not fit into what is left of a part's `--minutes`, or of the call's `--within`, is not begun: the next part takes
it. What was measured is in
the card's file at once, so a part that is interrupted keeps what it has.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from . import sources
from .end_to_end.machine import card_results
from .end_to_end.parts import Part, parts_of, row_seconds
from .end_to_end.results import HEAD, is_of, line, merge_file, note_left, read, rows_left
from .end_to_end.rows import TINY, Row, all_rows, quick
from .end_to_end.runner import Bench, add_options, results_file

HERE = Path(__file__).resolve().parent
OTHERS = (
    Part("kernels", own_s=130.0),
    Part("pager", own_s=190.0),
)
OTHER_OPTIONS = {"kernels": ("--compile", "readme"), "pager": ()}


def planned(is_quick: bool, *, promised: bool = False) -> list[Part]:
    """All parts. Without a card each row is tried once at its tiny size, and what only a card can do is left out. promised: with
    the rows of whole models alone of which something is asked, cut anew."""
    if is_quick:
        kinds: dict[Any, Row] = {}  # rows that differ in a number alone try the same
        for row in all_rows():
            sides = [(side.comfy, side.attention, side.backend, side.ram_budget is None) for _, side in row.sides]
            kinds.setdefault((row.group, TINY[row.model], row.work, row.storage, row.kind, *sides), quick(row))
        return [Part("models", tuple({row.name: row for row in kinds.values()}.values()))]
    return [*parts_of([row for row in all_rows() if row.is_promised or not promised]), *OTHERS]


def chosen(parts: Sequence[Part], asked: Sequence[str]) -> list[Part]:
    """The parts that `--part` names, `3` or `3/6`; all where it names none."""
    if not asked:
        return list(parts)
    found = []
    for text in (text for text in asked if text != "left"):
        number, _, of = text.partition("/")
        if not number.isdigit() or not 1 <= int(number) <= len(parts):
            raise ValueError(f"there is no part {text!r}: they are 1 to {len(parts)}, or `left`")
        if of and of != str(len(parts)):
            raise ValueError(f"there are {len(parts)} parts, not {of}: see --list")
        found.append(parts[int(number) - 1])
    return found


def with_rows(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Parts with these rows alone."""
    left = (replace(part, rows=tuple(row for row in part.rows if row.name in names)) for part in parts)
    return [part for part in left if part.rows]


def without_measured(parts: Sequence[Part], into: Path, *, is_stale_too: bool = False) -> list[Part]:
    """The same parts, under the same numbers, less the rows, and benches of their own, that the file has. is_stale_too: but for
    stale ones."""
    states = states_of(parts, into)
    wanted = set(State) - {State.CURRENT} if is_stale_too else {State.MISSING}

    def without(part: Part) -> Part:
        if part.kind in states and states[part.kind] not in wanted:
            return replace(part, own_s=0.0)
        return replace(part, rows=tuple(row for row in part.rows if states[row.name] in wanted))

    return [without(part) for part in parts]


class State(Enum):
    """Of a row. CURRENT: measured with these sources."""

    CURRENT = ""
    STALE = "measured with other sources"
    UNKNOWN = "measured before sources were noted"
    MISSING = "not measured"


def states_of(parts: Sequence[Part], into: Path) -> dict[str, State]:
    """Of every row of whole models, and of the benches of their own by kind: as their worst row."""
    data = read(into)
    rows = {row.name: row for part in parts for row in part.rows}
    found_rows = data.get("models", {}).get("rows", [])
    measured = {
        one["name"]: one.get("environment", {})
        for one in found_rows
        if one["name"] in rows and is_of(rows[one["name"]], one)
    }
    known: dict[tuple[str, ...], str] = {}

    def state(environment: Mapping[str, Any] | None, now: str) -> State:
        if environment is None:
            return State.MISSING
        if "sources" not in environment:
            return State.UNKNOWN
        return State.CURRENT if environment.get("sources") == now else State.STALE

    found = {}
    for row in rows.values():
        key = (row.work, *sorted({model for model, _ in row.files}))
        if key not in known:
            known[key] = sources.of_models(key[1:], row.work)
        found[row.name] = state(measured.get(row.name), known[key])
    own = {
        "kernels": (sources.KERNELS, [row.get("environment", {}) for row in data.get("kernels", {}).get("rows", [])]),
        "pager": (sources.PAGER, [data["pager"].get("environment", {})] if "pager" in data else []),
    }
    for kind, (folders, environments) in own.items():
        now = sources.of_folders(folders)
        found[kind] = max((state(one, now) for one in environments or [None]), key=list(State).index)
        if data.get(kind, {}).get("left"):
            found[kind] = State.MISSING
    return found


def listed(parts: Sequence[Part], states: Mapping[str, State]) -> str:
    """What each part holds and takes on an H200, and which rows are not there or stale, where states are known."""
    lines = []
    for number, part in enumerate(parts, 1):
        own = states.get(part.kind, State.CURRENT).value
        title = f"{part.title} ({own})" if own else part.title
        lines.append(f"part {number}/{len(parts)}, about {part.seconds:.0f} s: {title}")
        for row in part.rows:
            said = states.get(row.name, State.CURRENT).value
            lines.append(f"    {row_seconds(row):4.0f} s  {row.name}" + (f"  ({said})" if said else ""))
    minutes = sum(part.seconds for part in parts) / 60
    lines.append(f"together about {minutes:.0f} minutes of an H200")
    told = Counter(states[row.name] for part in parts for row in part.rows if row.name in states)
    lines += [f"rows {state.value}: {told[state]} of {told.total()}" for state in State if state.value and told[state]]
    return "\n".join(lines)


def listed_file(options: argparse.Namespace) -> Path | None:
    """Whose rows a list tells of; None where neither a card nor the options say it."""
    return results_file(options) if options.results or options.quick or shutil.which("nvidia-smi") else None


class All:
    """One call: parts one after another."""

    def __init__(self, options: argparse.Namespace, into: Path) -> None:
        self.options = options
        self.into = into
        self.begun = time.perf_counter()
        self.failed: list[str] = []

    def run(self, parts: Sequence[Part], bench: Bench) -> None:
        try:
            for part in parts:
                start = time.perf_counter()
                if part.kind != "models" and not part.own_s:
                    continue  # nothing of it is left to be measured
                if part.own_s > self.left_s():
                    print(f"no time for {part.title}: about {part.own_s:.0f} s")
                elif part.kind != "models":
                    self.other(part)
                else:
                    self.models(bench, part)
                expected = "" if self.options.quick else f", about {part.seconds:.0f} s expected"
                print(f"{part.title}: took {time.perf_counter() - start:.0f} s{expected}\n", flush=True)
            if len(parts) > 1 or self.options.part == ["left"]:
                self.leftovers(bench)
        finally:
            bench.close()
            bench.files.drop(())
            print("time: " + ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in bench.spent.items()))

    def left_s(self) -> float:
        """Seconds of the whole call."""
        within: float = self.options.within
        return within * 60 - (time.perf_counter() - self.begun) if within else math.inf

    def models(self, bench: Bench, part: Part) -> None:
        """A part's rows, after those that an earlier one had no time for."""
        earlier = [] if self.options.quick else self.left()
        rows = list({row.name: row for row in (*earlier, *part.rows)}.values())
        if not rows:
            return
        if earlier:
            print(f"left by an earlier part: {', '.join(row.name for row in earlier)}")
        self.measure(bench, rows)

    def leftovers(self, bench: Bench) -> None:
        if rows := self.left():
            self.measure(bench, rows)

    def left(self) -> list[Row]:
        """Rows that the parts so far had no time for."""
        known = {row.name: row for row in all_rows()}
        return [known[name] for name in rows_left(self.into) if name in known]

    def measure(self, bench: Bench, rows: Sequence[Row]) -> None:
        rows = bench.files.served_by_own(rows) if self.options.real else rows
        part = Part("models", tuple(rows))
        most = min(self.options.minutes * 60 or math.inf, self.left_s())
        seconds = None if self.options.quick or math.isinf(most) else max(0.0, most)
        of = f", at most {seconds:.0f} here" if seconds else ""
        about = "" if self.options.quick else f", about {part.seconds:.0f} s on an H200{of}"
        bench.say(f"{part.title}: {len(rows)} rows{about}")
        try:
            bench.measure(rows, seconds)
        finally:  # what an interruption took is left too
            done = {one["name"] for one in bench.found}
            note_left(self.into, [row.name for row in rows], [row.name for row in rows if row.name not in done])
        for row in bench.left:
            is_long = 0 < self.options.minutes * 60 < row_seconds(row)
            more = ", more than a part has: use --minutes" if is_long else ""
            print(f"no time for {row.name}: about {row_seconds(row):.0f} s{more}; the next part takes it")

    def other(self, part: Part) -> None:
        """A bench of its own, which writes into the same file."""
        command = [
            sys.executable,
            str(HERE),
            part.kind,
            *OTHER_OPTIONS[part.kind],
            "--results",
            str(self.into),
        ]
        if part.kind == "pager":
            command += ["--folder", str(self.options.disk)] if self.options.disk else []
        print(f"{part.title}: about {part.seconds:.0f} s on an H200", flush=True)
        process = subprocess.Popen(command)
        try:
            code = process.wait(self.options.minutes * 60 or None)
        except subprocess.TimeoutExpired:
            print(f"{part.kind}: ran past {self.options.minutes:g} minutes and was ended; it keeps what it wrote")
            code = None
        finally:
            process.terminate()
            process.wait()
        if code not in (0, 1):  # 1: a promise was missed, which is a result
            self.failed.append(part.kind)


def command_line() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="dev.py bench all"
    )
    add_options(cli)
    cli.add_argument(
        "--part", action="append", default=[], help="only this one, as 3 or 3/6, or `left`; may be repeated"
    )
    cli.add_argument("--minutes", type=float, default=8.8, help="the most a part may take; 0: no limit, for slow cards")
    cli.add_argument(
        "--disk", type=Path, metavar="DIR", help="for the pager's file of 28 GB, instead of the system's folder"
    )
    cli.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing: take over these files' rows"
    )
    cli.add_argument("--only", action="append", metavar="ROW", help="of whole models only this row; may be repeated")
    cli.add_argument("--missing", action="store_true", help="leave out rows of whole models that the file has")
    cli.add_argument(
        "--stale", action="store_true", help="as --missing, but measure those of other sources than these again"
    )
    cli.add_argument(
        "--promised",
        action="store_true",
        help="of whole models only rows of which something is asked, in parts of their own",
    )
    cli.add_argument("--within", type=float, default=0.0, metavar="MINUTES", help="the most the whole call may take")
    cli.add_argument("--list", action="store_true", help="only name the parts and their rows")
    return cli


def main(arguments: list[str] | None = None) -> int:
    cli = command_line()
    options = cli.parse_args(arguments)
    options.side, options.repeats, options.accuracy, options.shared = "both", 1, False, True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.quick and options.real:
        cli.error("--quick tries tiny checkpoints of its own: not together with --real")
    parts = planned(options.quick, promised=options.promised)
    if options.only:
        parts = with_rows(parts, options.only)
        if not parts:
            cli.error("no row of whole models is called so; --list shows them")
    if options.missing or options.stale:
        parts = without_measured(parts, results_file(options), is_stale_too=options.stale)
    if options.list:
        into = listed_file(options)
        print(listed(parts, {} if into is None else states_of(parts, into)))
        return 0
    try:
        now = chosen(parts, options.part)
    except ValueError as error:
        cli.error(str(error))
    if options.merge:
        for path in options.merge:
            into = options.results or card_results(path)
            print(f"{merge_file(into, path)} rows of {path} are in {into} now")
        return 0
    if not options.quick and shutil.which("nvidia-smi") is None:
        print("no NVIDIA GPU on this machine; --quick tries the bench on the CPU")
        return 1
    bench = Bench(options)
    options.results = results_file(options)
    everything = All(options, options.results)
    print(
        f"{len(now)} parts, about {sum(part.seconds for part in now):.0f} s on an H200; into {everything.into}",
        flush=True,
    )
    try:
        everything.run(now, bench)
    finally:
        print("\ntiny checkpoints on the CPU: these figures mean nothing" if options.quick else "")
        print("\n".join([HEAD, *map(line, bench.found)]))
        left = rows_left(everything.into)
        print(
            f"{len(bench.found)} rows in {time.perf_counter() - everything.begun:.0f} s, {len(left)} left", flush=True
        )
    broken = [one["name"] for one in bench.found if "error" in one.get("ours", {})]
    if broken or everything.failed:
        print("failed: " + "; ".join([*broken, *everything.failed]))
    return int(bool(broken or everything.failed))
