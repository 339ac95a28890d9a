"""Two trees or two settings, run in turns on this machine: their results, ready to be compared.

A version is a folder with a tree of this project, or settings of this tree as `precision=turbo,kernels=off`, each of
which is an option of the command. The turns are A, B, A, B, so that a clock that drifts is no difference. A figure is
the median over a version's turns.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .end_to_end.results import read

HERE = Path(__file__).resolve().parent
ENTRY = "__main__.py"
TURNS = 2
DEFAULT = ("models",)


@dataclass(frozen=True)
class Version:
    """A tree's bench, run with these options."""

    bench: Path
    options: tuple[str, ...] = ()


def version_of(text: str) -> Version | None:
    """The tree or the settings that a word names; None: it is neither."""
    tree = Path(text)
    if (tree / "bench" / ENTRY).is_file():
        return Version(tree.resolve() / "bench")
    settings = [part.partition("=") for part in text.split(",")]
    if all(name and sign and value for name, sign, value in settings):
        return Version(HERE, tuple(word for name, _, value in settings for word in (f"--{name}", value)))
    return None


def command_of(version: Version, command: Sequence[str], into: Path) -> list[str]:
    """The bench of a version, which writes into a file of its own."""
    part, *rest = command
    own = ["--side", "ours"] if part == "models" else []
    if part == "models" and version.options:
        own.append("--same-name")  # a row with other settings is the same row here
    return [sys.executable, str(version.bench), part, *rest, *own, *version.options, "--results", str(into)]


def measured(versions: Sequence[Version], command: Sequence[str], turns: int = TURNS) -> list[dict[str, Any]]:
    """The joined results of each version."""
    with tempfile.TemporaryDirectory(prefix="fusestream-compare-") as folder:
        files: list[list[Path]] = [[] for _ in versions]
        for turn in range(turns):
            for number, version in enumerate(versions):
                into = Path(folder) / f"{number}-{turn}.json"
                print(
                    f"\n{'AB'[number]}, turn {turn + 1} of {turns}: {version.bench.parent} {' '.join(version.options)}"
                )
                subprocess.run(command_of(version, command or DEFAULT, into), check=False)
                files[number].append(into)
        return [joined([read(path) for path in paths]) for paths in files]


def joined(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results of several turns as one: rows by their names, figures as medians."""
    found: dict[str, Any] = {}
    for section in dict.fromkeys(name for one in turns for name in one):
        rows: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
        for one in turns:
            for row in one.get(section, {}).get("rows", []):
                key = tuple(str(row.get(name)) for name in ("op", "label", "name"))
                rows.setdefault(key, []).append(row)
        found[section] = {"rows": [_median(same) for same in rows.values()]}
    return found


def _median(values: Sequence[Any], name: str = "") -> Any:
    """The median of numbers, within mappings too; repetitions are put one behind the other; else the first."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _median([one[key] for one in values if key in one], key) for key in first}
    if name == "all s":
        return [run for runs in values for run in runs]
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return statistics.median(values)
    return first
