"""The note on every example: what it makes, which file goes where, what an 8 GB card should expect."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass

from .files import File
from .prediction import Joint, Model, seconds_a_step
from .said import LANGUAGES, translated

UNKNOWN = "Frames a second were not measured yet on any card."
EDGES, SIDES = 14, 44  # pixels of a note's node above and below its text, and beside it
WORDS = 60  # the most of a note, beside its list of files


@dataclass(frozen=True)
class Work:
    """What the example asks of its model: the size of the video or picture, the steps, the prompts of a step, and pictures beside
    the one that is made."""

    model: Model | Joint
    width: int
    height: int
    length: int
    steps: int
    prompts: int = 2
    fps: int = 16
    references: int = 0


def note(title: str, about: str, files: list[File], work: Work | None, advice: str) -> str:
    """The note's Markdown. work: None where nothing is predicted.

    Without `code` and without a table: nodes that the front end draws as elements give these two colours of their own, whatever
    the note's, and names of files in blue on brown cannot be read.
    """
    return "\n".join(
        [
            f"# {title}",
            "",
            about,
            "",
            "Put these files into ComfyUI's *models* folder:",
            "",
            *(f"- **[{file.name}]({file.url})** ({file.gigabytes:g} GB) into *{file.folder}*" for file in files),
            "",
            "Press **R** after putting them there, then **Run**.",
            "",
            f"**On an 8 GB card.** {UNKNOWN if work is None else expectation(work)} {advice}".rstrip(),
            "",
        ]
    )


def room(text: str, width: int) -> int:
    """How high a node of this width is that has all of a note to read, in either way in which the front end draws nodes; in the
    language that takes most of it."""
    return max(_high(said, width) for said in (text, *(translated(text, language) for language in LANGUAGES)))


def _high(text: str, width: int) -> int:
    return EDGES + sum(_block(line, width - SIDES) for line in text.split("\n") if line)


def _block(line: str, width: int) -> int:
    """One line of Markdown, as it wraps: a heading, an entry of a list, a paragraph. An address takes no room."""
    shown = re.sub(r"\]\([^)]*\)|[*\[#]", "", line).strip()
    letter, row, around = (
        (9, 24, 6) if line.startswith("#") else (5.5, 20, 4) if line.startswith("- ") else (5.5, 17, 10)
    )
    wide = sum(letter * (2 if unicodedata.east_asian_width(each) in "WF" else 1) for each in shown)
    return math.ceil(wide / width) * row + around


def words(text: str) -> int:
    """How many a note has, without its list of files and without signs of Markdown."""
    prose = [line for line in text.split("\n") if not line.startswith("- ")]
    return sum(bool(re.search(r"\w", word)) for line in prose for word in line.split())


def plain(title: str, about: str, advice: str) -> str:
    """The Markdown of an example that needs no file and samples nothing."""
    return "\n".join([f"# {title}", "", about, "", f"**On an 8 GB card.** Not measured yet. {advice}", ""])


def expectation(work: Work) -> str:
    """What to expect, with its status: a card of 8 GB has not been measured."""
    each = seconds_a_step(work.model, work.width, work.height, work.length, work.prompts, work.references)
    return f"Predicted, not measured, sampling alone, RTX 2060 Super: {_minutes(each * work.steps)}."


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
