"""Mixed prompts with trouble in between, in one server: `bed/soak.py`, a part of it where nobody asks for all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bed import soak
from bed.depth import is_thorough
from bed.server import Server

TURNS = soak.ROUND if is_thorough() else soak.ROUND[: soak.FEW]
ROUNDS = 5 if is_thorough() else 3


@pytest.mark.deep
def test_what_a_server_holds_is_flat(tmp_path: Path) -> None:
    soak.prepare(tmp_path)
    with Server(Path(sys.executable), Path(os.environ["COMFYUI_PATH"]), tmp_path) as server:
        *_, story = soak.soak(server, TURNS, ROUNDS)
    print(soak.table(story.figures()), story.told, sep="\n")
    assert not story.faults
    assert not story.grown(), [round(held["RSS"]) for held in story.held]
    assert len(story.held) == ROUNDS * len(TURNS)
    assert story.told.keys() == {"done", "interrupted", "failed", "refused before the queue"}


def story_of(rounds: int, **grows: float) -> soak.Story:
    """Of ten prompts a round; each holds so much more than the one before."""
    names = ("VRAM", "pinned", "RSS", "threads")
    held = [
        {name: 100.0 + number % 10 + grows.get(name, 0.0) * number for name in names} for number in range(10 * rounds)
    ]
    return soak.Story(10, held)


@pytest.mark.parametrize(("name", "each"), [("VRAM", 1.2), ("pinned", 1.2), ("RSS", 7.0), ("threads", 0.25)])
def test_what_grows_is_told(name: str, each: float) -> None:
    assert not story_of(5).grown()
    story = story_of(5, **{name: each})
    assert {line.split(", ")[1].partition(":")[0] for line in story.grown()} == {name}
    figures = story.figures()
    assert figures[name]["per 100 prompts"] == pytest.approx(100 * each, abs=0.11)
    assert all(row["per 100 prompts"] == 0 for other, row in figures.items() if other != name)
    assert f"{100 * each:+16.1f}" in soak.table(figures)


def test_the_first_rounds_may_take_what_they_need() -> None:
    story = story_of(3)
    for number in range(10):
        story.held[number]["VRAM"] = 5.0
    assert not story.grown() and story.figures()["VRAM"]["per 100 prompts"] == 0
