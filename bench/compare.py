"""Compare two trees, two settings, or two files of results of one card.

    python bench compare BEFORE.json AFTER.json
    python bench compare ../before . models --only "1.3B 480x480x17"
    python bench compare precision=precise precision=turbo models --only "14B 480x832x81"

Trees and settings are run in turns on this machine, with the command that follows (`models`); files are compared as
they are. The exit code is 1 where something of ours is slower or takes more memory by more than the noise, fails now, is
not finite, or is farther from stock's result. Noise is how far stock's own figures moved, since stock did not change,
and for whole models how far their own repetitions lie apart. Of the pager's promises, those that are missed now are told.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import side_by_side
from .end_to_end.storages import computed

LEAST_NOISE = 0.02
SMALLEST_US = 0.3  # kernels: what a launch varies by
MORE_MEMORY_GIB = 0.1
DRIFT = 0.9  # of stock's rows that moved by no more than the noise
MORE_ERROR = 0.1  # of one model call on the same weights: in which order sums were added
FARTHER = 0.5  # errors against stock: of one latent, which chance has a part in


@dataclass(frozen=True)
class Change:
    """One figure in both files; less is better."""

    what: str
    before: float
    after: float
    noise: float

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.before else 1.0

    @property
    def verdict(self) -> str:
        if self.ratio > 1 + self.noise:
            return "WORSE"
        return "better" if self.ratio < 1 - self.noise else ""


def changes(before: Mapping[str, Any], after: Mapping[str, Any], *, any_settings: bool = False) -> list[Change]:
    """Every figure in both. any_settings: rows of one name are compared whatever precision they were computed in."""
    found = [*models(before, after, any_settings), *pager(before, after), *fidelity(before, after)]
    return [*found, *kernels(before, after, "kernels"), *kernels(before, after, "kernels sm_75")]


def noise_of(drift: list[float]) -> float:
    """The most that nearly all of stock's figures moved by. drift: how far each did."""
    return max(LEAST_NOISE, sorted(drift)[int(DRIFT * len(drift))] if drift else 0.0)


def pairs(
    before: Mapping[str, Any], after: Mapping[str, Any], section: str, *key: str
) -> Iterator[tuple[str, Any, Any]]:
    """Rows of the same name in both."""
    old = {tuple(row.get(k) for k in key): row for row in before.get(section, {}).get("rows", [])}
    for row in after.get(section, {}).get("rows", []):
        name = tuple(row.get(k) for k in key)
        if name in old:
            yield " ".join(str(part) for part in name), old[name], row


def models(before: Mapping[str, Any], after: Mapping[str, Any], any_settings: bool) -> Iterator[Change]:
    found = [pair for pair in pairs(before, after, "models", "name") if any_settings or is_same_work(*pair[1:])]
    stocks = [(old.get("stock", {}), new.get("stock", {})) for _, old, new in found]
    moved = noise_of([abs(new["s"] / old["s"] - 1) for old, new in stocks if "s" in old and "s" in new])
    for name, old, new in found:
        one, two = old.get("ours", {}), new.get("ours", {})
        if "error" in two and "s" in one:
            yield broken(f"{name}: fails now: {two['error']}")
        if "s" in one and "s" in two:
            noise = max(moved, spread(one), spread(two))
            yield Change(f"{name}, s", one["s"], two["s"], noise)
            yield Change(f"{name}, first s", one["first s"], two["first s"], max(0.1, noise))  # reading files varies
            yield Change(
                f"{name}, peak GiB", one["peak GiB"], two["peak GiB"], MORE_MEMORY_GIB / max(one["peak GiB"], 0.1)
            )
            if one.get("finite", True) and not two.get("finite", True):
                yield broken(f"{name}: its result is not finite now")
        errors = [row.get("accuracy", {}).get("ours against stock", 0.0) for row in (old, new)]
        if all(errors):
            yield Change(f"{name}, error against stock", errors[0], errors[1], FARTHER)


def is_same_work(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether ours computed alike in both. A file in 8 bits is multiplied so by default since there is `auto`."""
    sides = [row.get("ours", {}).get("side", {}).get("precision", "auto") for row in (old, new)]
    return len({computed(precision, new.get("storage", "fp16")) for precision in sides}) == 1


def broken(what: str) -> Change:
    return Change(what, 1.0, float("inf"), 0.0)


def pager(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Promises that were kept and are not now, or the other way round."""
    for name, old, new in pairs(before, after, "pager", "label"):
        bounds = [row.get("bound") for row in (old, new)]
        if "error" in new and "found" in old:
            yield broken(f"pager: {name}: fails now: {new['error']}")
        elif None not in bounds and "found" in old and "found" in new:
            kept = [row["found"] <= row["bound"] for row in (old, new)]
            noise = 0.0 if kept[0] != kept[1] else float("inf")
            yield Change(f"pager: {name}, promised {new['bound']:g} {new['unit']}", old["found"], new["found"], noise)


def fidelity(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """How far our ways to compute are from stock in FP32, where both files are of the same weights."""
    weights = [part.get("fidelity", {}).get("weights") for part in (before, after)]
    for name, old, new in pairs(before, after, "fidelity", "name"):
        if weights[0] == weights[1] and old.get("ours") and "call" in old:
            if "error" in new:
                yield broken(f"fidelity: {name}: fails now: {new['error']}")
            else:
                errors = (old["call"]["median"], new["call"]["median"])
                yield Change(f"fidelity: {name}, error of a model call", *errors, MORE_ERROR)


def is_faster(theirs: float, ours: float) -> bool:
    """Whether another's time is less than ours of the same run, by more than noise."""
    return theirs < (1 - LEAST_NOISE) * ours


def spread(side: Mapping[str, Any]) -> float:
    """How far the repetitions lie apart, over their median."""
    later = [s for run in side.get("all s", []) for s in run[1:]]
    return (max(later) - min(later)) / statistics.median(later) if len(later) > 1 else LEAST_NOISE


def kernels(before: Mapping[str, Any], after: Mapping[str, Any], section: str) -> Iterator[Change]:
    found = list(pairs(before, after, section, "op", "label"))
    drift = [
        abs(new["stock us"] / old["stock us"] - 1) for _, old, new in found if old.get("stock us") and "stock us" in new
    ]
    noise = noise_of(drift)
    for name, old, new in found:
        if "refused" in new and "ours us" in old:
            yield broken(f"{section}: {name}: refuses now: {new['refused']}")
        for column in ("ours us", "auto us"):
            if column in old and column in new:
                own = max(noise, SMALLEST_US / old[column])
                yield Change(f"{section}: {name}, {column}", old[column], new[column], own)


def cards(results: Mapping[str, Any]) -> set[str]:
    """The cards that rows say they were measured on."""
    rows = [row for section in results.values() for row in section.get("rows", [])]
    return {row["environment"]["card"] for row in rows if "card" in row.get("environment", {})}


def names(results: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """The identity of each row."""
    return {
        (section, *(str(row[key]) for key in ("op", "label", "name") if key in row))
        for section, part in results.items()
        for row in part.get("rows", [])
    }


def measured(options: argparse.Namespace, cli: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """The results that are compared: two files as they are, or two versions in turns."""
    both = (options.before, options.after)
    if all(word.endswith(".json") for word in both):
        if options.command:
            cli.error("files of results are compared as they are, without a command")
        return [json.loads(Path(word).read_text(encoding="utf-8")) for word in both]
    versions = [version for word in both if (version := side_by_side.version_of(word)) is not None]
    if len(versions) < len(both):
        cli.error("give two files of results, or two of: a folder with a tree of this project, settings as NAME=VALUE")
    return side_by_side.measured(versions, options.command, options.turns)


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="dev.py bench compare"
    )
    cli.add_argument("before")
    cli.add_argument("after")
    cli.add_argument("command", nargs=argparse.REMAINDER, help="of trees and settings: `models ...` or `rows ...`")
    cli.add_argument("--all", action="store_true", help="before the two: also what did not move")
    cli.add_argument("--turns", type=int, default=side_by_side.TURNS, help="before the two: how often each is run")
    options = cli.parse_args(arguments)
    before, after = measured(options, cli)
    if cards(before) and cards(after) and not cards(before) & cards(after):
        print(f"these are of two cards: {', '.join(sorted(cards(before)))} and {', '.join(sorted(cards(after)))}")
        return 1
    found = changes(before, after, any_settings=not options.before.endswith(".json"))
    if not found:
        print("the two results have no row in common")
        return 1
    for change in sorted(found, key=lambda one: -one.ratio):
        if change.verdict or options.all:
            print(
                f"{change.verdict:6} {change.ratio:6.3f}x  {change.before:10.4g} -> {change.after:10.4g}  "
                f"(noise {change.noise:.1%})  {change.what}"
            )
    worse = sum(change.verdict == "WORSE" for change in found)
    better = sum(change.verdict == "better" for change in found)
    print(f"{len(found)} figures in both: {worse} worse, {better} better, the others within the noise")
    gone, more = len(names(before) - names(after)), len(names(after) - names(before))
    if gone or more:
        print(f"not compared: {gone} rows are in the first alone, {more} in the second")
    return int(worse > 0)
