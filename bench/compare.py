"""What moved between two results of one card: python bench/compare.py BEFORE.json AFTER.json

Fails where something of ours is slower, or takes more memory, by more than the noise: for whole models what their own repetitions
measured, for the others what stock's own rows of both files moved by, since nothing of stock's has changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_NOISE = 0.02
SMALLEST_US = 0.3  # kernels: what a launch varies by
MORE_MEMORY_GIB = 0.1


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


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    return [*models(before, after), *kernels(before, after, "kernels"), *kernels(before, after, "kernels sm_75")]


def pairs(
    before: Mapping[str, Any], after: Mapping[str, Any], section: str, *key: str
) -> Iterator[tuple[str, Any, Any]]:
    """Rows of the same name in both."""
    old = {tuple(row.get(k) for k in key): row for row in before.get(section, {}).get("rows", [])}
    for row in after.get(section, {}).get("rows", []):
        name = tuple(row.get(k) for k in key)
        if name in old:
            yield " ".join(str(part) for part in name), old[name], row


def models(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for name, old, new in pairs(before, after, "models", "name"):
        one, two = old.get("ours", {}), new.get("ours", {})
        if "error" in two and "s" in one:
            yield Change(f"{name}: fails now: {two['error']}", 1.0, float("inf"), 0.0)
        if "s" in one and "s" in two:
            noise = max(LEAST_NOISE, spread(one), spread(two))
            yield Change(f"{name}, s", one["s"], two["s"], noise)
            yield Change(f"{name}, first s", one["first s"], two["first s"], max(0.1, noise))  # reading files varies
            yield Change(
                f"{name}, peak GiB", one["peak GiB"], two["peak GiB"], MORE_MEMORY_GIB / max(one["peak GiB"], 0.1)
            )


def spread(side: Mapping[str, Any]) -> float:
    """How far the repetitions lie apart, over their median."""
    later = [s for run in side.get("all s", []) for s in run[1:]]
    return (max(later) - min(later)) / statistics.median(later) if len(later) > 1 else LEAST_NOISE


def kernels(before: Mapping[str, Any], after: Mapping[str, Any], section: str) -> Iterator[Change]:
    found = list(pairs(before, after, section, "op", "label"))
    drift = [
        abs(new["stock us"] / old["stock us"] - 1) for _, old, new in found if old.get("stock us") and "stock us" in new
    ]
    noise = max(LEAST_NOISE, sorted(drift)[int(0.9 * len(drift))] if drift else 0.0)
    for name, old, new in found:
        if "refused" in new and "ours us" in old:
            yield Change(f"{section}: {name}: refuses now: {new['refused']}", 1.0, float("inf"), 0.0)
        for column in ("ours us", "auto us"):
            if column in old and column in new:
                own = max(noise, SMALLEST_US / old[column])
                yield Change(f"{section}: {name}, {column}", old[column], new[column], own)


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    cli.add_argument("before", type=Path)
    cli.add_argument("after", type=Path)
    cli.add_argument("--all", action="store_true", help="also what did not move")
    options = cli.parse_args(arguments)
    found = changes(*(json.loads(path.read_text(encoding="utf-8")) for path in (options.before, options.after)))
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
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
