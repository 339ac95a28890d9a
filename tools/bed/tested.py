"""What was tested: the results of the matrix as a file, and as the table in docs/comfyui-versions.md.

`matrix-results.json` is written by `dev.py matrix`. By hand a failure gets its `why` there, which later runs keep as
long as that test fails; `dev.py docs` then writes the table anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .paths import ROOT
from .rows import ROWS

RESULTS = Path(__file__).with_name("matrix-results.json")
PAGE = ROOT / "docs" / "comfyui-versions.md"
HEADING = "# ComfyUI's versions"
BLOCK = re.compile(r"(<!-- tested:begin -->\n).*?(<!-- tested:end -->)", re.DOTALL)
EMPTY = "<!-- tested:begin -->\n<!-- tested:end -->\n"
HEAD = ("ComfyUI", "Row", "Versions", "Python, on", "Day", "Passed", "Failed", "Skipped")
PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\\/][\w.+-]+)+[\\/]")
LONGEST = 160  # of what a failure said


@dataclass
class Entry:
    """A row on one ComfyUI: its versions, and by folder of tests how many passed, were skipped, failed."""

    row: str
    comfyui: str
    laid_over: int  # newer files over that version
    python: str
    platform: str
    day: str
    packages: dict[str, str]
    passed: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)  # by test: what it `said`, and `why`

    @property
    def key(self) -> tuple[str, str, bool]:
        return self.row, self.comfyui, bool(self.laid_over)

    def note(self, part: str, passed: int, skipped: int, failures: Mapping[str, str]) -> None:
        """The folder `part` was run."""
        why = {test: found["why"] for test, found in self.failures.items() if "why" in found}
        others = {test: found for test, found in self.failures.items() if not test.startswith(f"{part}/")}
        mine = {test: {"said": said, **_of(why, test)} for test, said in failures.items()}
        self.failures = dict(sorted({**others, **mine}.items()))
        self.passed[part], self.skipped[part] = passed, skipped

    def mend(self, tests: Iterable[str], failures: Mapping[str, str]) -> None:
        """These were run again: those that fail no longer have passed."""
        for test in tests:
            if test not in failures:
                del self.failures[test]
                self.passed["/".join(test.split("/")[:2])] += 1


def _of(why: Mapping[str, str], test: str) -> dict[str, str]:
    return {"why": why[test]} if test in why else {}


def entries() -> list[Entry]:
    """All that are kept."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return [Entry(**one) for one in found]


def entry_of(row: str, about: Mapping[str, Any]) -> Entry:
    """The row's, with the versions of now; its counts are kept, whose folder may not run this time."""
    new = Entry(row=row, **about)
    for old in entries():
        if old.key == new.key:
            new.passed, new.skipped, new.failures = old.passed, old.skipped, old.failures
    return new


def keep(entry: Entry) -> None:
    """Write the results with this one, and the page."""
    others = [one for one in entries() if one.key != entry.key]
    order = list(ROWS)
    kept = sorted([*others, entry], key=lambda one: (order.index(one.row), one.comfyui, one.laid_over))
    text = json.dumps([asdict(one) for one in kept], indent=1, ensure_ascii=False)
    RESULTS.write_text(f"{text}\n", encoding="utf-8")
    write_page()


def write_page() -> None:
    """Put the table into the page, which is made where there is none."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else f"{HEADING}\n\n{EMPTY}"
    if not BLOCK.search(text):
        text = f"{text.rstrip()}\n\n{EMPTY}"
    PAGE.write_text(BLOCK.sub(lambda found: f"{found[1]}{table(entries())}{found[2]}", text), encoding="utf-8")


def table(kept: Iterable[Entry]) -> str:
    """The results as a table, and below it what failed and why."""
    kept = list(kept)
    lines = [HEAD, ["---"] * len(HEAD), *(_line(one) for one in kept)]
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    failed = "".join(
        f"- `{test}` ({_where(one)}, {one.row}): {found.get('why') or found['said']}\n"
        for one in kept
        for test, found in one.failures.items()
    )
    return f"{rows}\n{f'What failed:{chr(10)}{chr(10)}{failed}{chr(10)}' if failed else ''}"


def _line(one: Entry) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in one.packages.items())
    return [
        _where(one), f"{one.row}: {ROWS[one.row].what}", versions, f"{one.python}, {one.platform}", one.day,
        *(str(count) for count in (sum(one.passed.values()), len(one.failures), sum(one.skipped.values()))),
    ]  # fmt: skip


def _where(one: Entry) -> str:
    return f"{one.comfyui} with {one.laid_over} newer files" if one.laid_over else one.comfyui


def in_one_line(said: str) -> str:
    """A failure's first line, of paths their last part alone."""
    first = next((line.strip() for line in said.splitlines() if line.strip()), "")
    return PATH.sub("", first)[:LONGEST].replace("|", "/")
