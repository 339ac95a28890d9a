"""What the RAM of a machine holds of a workflow's files, and what the disk brings again."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from fusestream.fusion.estimate import ram as ram_file
from fusestream.fusion.estimate import words
from fusestream.fusion.estimate.fit import Fit, Verdict
from fusestream.fusion.estimate.ram import RamFit, ram_fit
from fusestream.memory.host.ram import Ram

GIB = 1 << 30
# 20 GiB in 40 blocks of 8 bits, of which 5 GiB stay on the card beside a window of 1 GiB.
FIT = Fit(
    verdict=Verdict.STREAMS, free=8 * GIB, others=0, rest=0, sizes=(GIB,) * 40, stored=0.5, parts=False, held=11 * GIB,
    window=GIB, stays=10, passes=30, activations=GIB, least=GIB, forwards=1, reserve=GIB,
)  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with so many GiB, of which so many are free, and so many registered by our models."""

    def has(total: float, free: float, registered: float = 0.0) -> None:
        monkeypatch.setattr(ram_file, "measure_ram", lambda: Ram(int(total * GIB), int(free * GIB)))
        most = int((free + registered - total / 4) * GIB)
        monkeypatch.setattr(ram_file, "pinnable", lambda: (most, int(registered * GIB)))

    return has


@pytest.mark.parametrize("registered", [0.0, 6.0])
def test_16_gb_for_a_model_of_20(machine: Any, registered: float) -> None:
    """15 GiB of it pass; 13 find room, of which 9 can be registered. The rest the cache drops before it comes again."""
    machine(16, 13 - registered, registered)
    found = ram_fit(FIT, 20 * GIB, [12 * GIB, GIB])
    assert (found.room, found.pinned, found.passing, found.files) == (13 * GIB, 9 * GIB, 15 * GIB, 33 * GIB)
    assert (found.read_each_step, found.read_each_prompt) == (6 * GIB, 24 * GIB)
    told = words.ram(found)
    assert "6.00 GiB come from the disk each time" in told and "a new prompt reads about 24.00 GiB" in told


def test_32_gb_for_the_same(machine: Any) -> None:
    """The model stays between two steps, not everything between two prompts."""
    machine(32, 28)
    found = ram_fit(FIT, 20 * GIB, [12 * GIB, GIB])
    assert (found.read_each_step, found.read_each_prompt) == (0, 13 * GIB)
    assert "each time" not in words.ram(found)


def test_a_step_of_two_forwards_reads_twice(machine: Any) -> None:
    machine(16, 13)
    found = ram_fit(replace(FIT, forwards=2), 20 * GIB, [12 * GIB, GIB])
    assert (found.read_each_step, found.read_each_prompt) == (12 * GIB, 24 * GIB)
    assert "30.00 GiB of the model pass in each step, of which 12.00 GiB" in words.ram(found)


def test_64_gb_keep_all(machine: Any) -> None:
    machine(64, 60)
    found = ram_fit(FIT, 20 * GIB, [12 * GIB, GIB])
    assert (found.read_each_step, found.read_each_prompt) == (0, 0)
    assert words.ram(found) == "room for 60.00 GiB, files of 33.00 GiB, all of which stay"


def test_a_model_that_stays_on_the_card_passes_nothing(machine: Any) -> None:
    machine(8, 5)
    whole = replace(FIT, verdict=Verdict.WHOLE, held=40 * GIB, window=0)
    assert ram_fit(whole, 20 * GIB).passing == ram_fit(whole, 20 * GIB).read_each_step == 0


def test_more_room_never_reads_more() -> None:
    drawn = random.Random(7)
    for _ in range(200):
        passing, model, pinned, room = (drawn.randrange(0, 40) for _ in range(4))
        rooms = [RamFit(one, min(pinned, one), passing, model, (5,)) for one in range(room, room + 30)]
        for less, more in itertools.pairwise(rooms):
            assert more.read_each_step <= less.read_each_step <= less.passing
            assert more.read_each_prompt <= less.read_each_prompt <= less.files
