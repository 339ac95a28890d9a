"""Longer videos, of a model that learned them (`checkpoints/train`, `--size large`): their sizes, results and tables. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..end_to_end.results import read
from ..report.tables import markdown
from .table import Rows, decibels, flicker, missed, percent

LONG_SECTION = "fidelity long"


@dataclass(frozen=True)
class Size:
    """A video, and how many prompts are enough to tell ways to compute apart."""

    width: int
    height: int
    frames: int
    prompts: int

    @property
    def name(self) -> str:
        return f"{self.width}x{self.height}, {self.frames} frames"

    @property
    def latent(self) -> tuple[int, int, int]:
        return (self.frames - 1) // 4 + 1, self.height // 8, self.width // 8

    @property
    def tokens(self) -> int:
        frames, height, width = self.latent
        return frames * (height // 2) * (width // 2)


SIZES = (Size(256, 256, 33, prompts=12), Size(832, 480, 33, prompts=4))


def sizes(tokens: Sequence[int] | None) -> tuple[Size, ...]:
    """Those of so many tokens; all of none."""
    known = {size.tokens: size for size in SIZES}
    strange = set(tokens or ()) - known.keys()
    if strange:
        raise SystemExit(f"no video has {min(strange)} tokens; there are {', '.join(map(str, known))}")
    return tuple(size for size in SIZES if not tokens or size.tokens in tokens)


def beside(here: Mapping[str, Any], weights: str, file: Path) -> list[Mapping[str, Any]]:
    """This size's results among those of others that the file has of these weights."""
    before = read(file).get(LONG_SECTION, {})
    kept = before["sizes"] if before.get("weights") == weights else []
    every = {one["tokens"]: one for one in (*kept, here)}
    return [every[tokens] for tokens in sorted(every)]


def of_size(results: Mapping[str, Any], weights: str, size: Size) -> Mapping[str, Any]:
    """What the results have of a size and these weights."""
    section = results.get(LONG_SECTION, {})
    kept = section.get("sizes", []) if section.get("weights") == weights else []
    return next((one for one in kept if one["tokens"] == size.tokens), {})


def text(results: Mapping[str, Any]) -> str:
    """Markdown: a table of each size; nothing where none was measured."""
    measured = results.get(LONG_SECTION, {}).get("sizes", [])
    return "".join(f"\n{_head(one)}\n\n{table(one['rows'])}\n" for one in measured)


HEADS = (
    "Way to compute",
    "Error of a model call",
    "Latents, dB",
    "Frames after all steps, dB",
    "Changes from frame to frame, dB",
    "Seconds a video",
    "Videos as their prompts say",
)


def _head(one: Mapping[str, Any]) -> str:
    videos = one["prompts"] * one["seeds"]
    return (
        f"A larger model, briefly trained, {one['size']}, which is {one['tokens']} tokens; {videos} videos of {one['steps']} "
        "steps:"
    )


def table(rows: Rows) -> str:
    late = missed(rows)
    return markdown(HEADS, (_cells(row, row["name"] in late) for row in rows))


def _cells(row: Mapping[str, Any], is_missed: bool) -> list[str]:
    if "error" in row:
        return [row["name"], f"fails: {row['error']}", *[""] * (len(HEADS) - 2)]
    obeyed = f"{row['right']['colour and direction']:.0%}"
    if "call" not in row:
        return [f"{row['name']}, the reference", *["-"] * (len(HEADS) - 2), obeyed]
    call = ("**missed** " if is_missed else "") + percent(row["call"]["median"])
    took = row.get("sampling s")
    seconds = "-" if took is None else f"{took:.3g} s"
    return [row["name"], call, decibels(row["latents dB"]), decibels(row["frames dB"]), flicker(row), seconds, obeyed]
