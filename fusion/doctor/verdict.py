"""The doctor's verdict on all findings, what to do about them, and the report that begins with
both.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from ..base.format import counted
from .findings import ADVICE, LONGEST, STOPS, Finding, redacted, without_folders

TITLE = "FuseStream doctor"
TO_DO, DETAILS = "What to do", "Details"  # the page folds what comes below the second


class Colour(Enum):
    """RED: something keeps FuseStream from working here. AMBER: something costs speed, or some
    models. GREEN: neither."""

    GREEN = "green"
    AMBER = "amber"
    RED = "red"


class Verdict(NamedTuple):
    """A colour, and why it is that one in a sentence."""

    colour: Colour
    sentence: str


def verdict(findings: Sequence[Finding]) -> Verdict:
    """The verdict on these findings."""
    stopping, advising = list(marked(findings, STOPS)), list(marked(findings, ADVICE))
    if stopping:
        others = f" ({counted(len(stopping) - 1, 'more thing')} below)" if len(stopping) > 1 else ""
        return Verdict(
            Colour.RED, f"FuseStream cannot work here: {stopping[0].partition(': ')[2].rstrip('.')}{others}."
        )
    if advising:
        what = "1 thing costs" if len(advising) == 1 else f"{len(advising)} things cost"
        return Verdict(Colour.AMBER, f"FuseStream works here, but {what} speed, or may fail with some models.")
    return Verdict(Colour.GREEN, "FuseStream works here, and there is nothing to do.")


def marked(findings: Iterable[Finding], mark: str) -> Iterator[str]:
    """The first line of each answer that begins with this mark, below its title."""
    for finding in findings:
        for line in finding.lines:
            if line.startswith(mark):
                yield f"{finding.title}: {shortened(line.removeprefix(mark)).splitlines()[0]}"


def as_text(findings: Sequence[Finding]) -> str:
    """The report: the verdict, what to do, and then each answer. Plain text to paste, without user
    names."""
    colour, sentence = verdict(findings)
    to_do = [*marked(findings, STOPS), *marked(findings, ADVICE)] or ["nothing"]
    parts = [f"{TITLE}: {colour.value}", sentence, f"\n{TO_DO}", *(f"  {one}" for one in to_do), f"\n{DETAILS}"]
    for finding in findings:
        parts.append(f"\n{finding.title}")
        parts += [f"  {part}" for line in finding.lines for part in shortened(line).splitlines()]
    return redacted(without_folders("\n".join(parts))) + "\n"


def shortened(line: str) -> str:
    """The line, cut where it is longer than a reader would read."""
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."
