"""Processes that are killed while they write: the file is what it was or what it was to be, and the next one writes on."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bed.depth import is_thorough
from fusestream.kernels_cuda.ledger import LEDGER
from fusestream.kernels_cuda.tune.winners import Winner, WinnersFile
from fusestream.memory.written import UNFINISHED, WeightWriter
from hostile import writers

SEED = 1820
KILLS = {"winners": 40 if is_thorough() else 6, "model": 12 if is_thorough() else 3}
LONGEST = 0.2  # seconds until it comes


def kill(what: str, path: Path, chance: random.Random) -> None:
    """Start the program, and end it at some moment after its first file, in a way that nobody can catch. The first time it is gone
    when the second file is written, and has not its name yet."""
    halfway = ["halfway"] if not path.exists() else []
    command = [sys.executable, str(Path(writers.__file__)), what, str(path), *halfway]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        if halfway:
            assert process.wait(60) == 1
            return
        time.sleep(chance.random() * LONGEST)
        assert process.poll() is None
        process.kill()


def test_the_winners_file_survives_its_writers(tmp_path: Path) -> None:
    path, chance = tmp_path / "winners.json", random.Random(SEED)
    LEDGER.clear()
    for number in range(KILLS["winners"]):
        kill("winners", path, chance)
        assert "op|0" in json.loads(path.read_text())["winners"]
        left = {one.name for one in tmp_path.iterdir()} - {path.name, f"{path.name}.lock"}
        assert left == {f"{path.name}.partial"} if number == 0 else left <= {f"{path.name}.partial"}
        file = WinnersFile(path)
        file.put("next", Winner("cuda", {"cuda": float(number)}))  # waits for nobody, and clears away what is left
        assert WinnersFile(path).get("next") == Winner("cuda", {"cuda": float(number)})
        assert not list(tmp_path.glob("*.partial"))
    assert not LEDGER.messages


@pytest.mark.deep
def test_a_weight_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path, chance = tmp_path / "model.safetensors", random.Random(SEED)
    for turn in range(KILLS["model"]):
        kill("model", path, chance)
        with safe_open(path, "pt") as file:
            number = float(file.metadata()["number"])
            for name in writers.NAMES:
                assert torch.equal(file.get_tensor(name), torch.full((writers.ELEMENTS,), number))
        left = {one.name for one in tmp_path.iterdir()} - {path.name}
        assert left == {path.name + UNFINISHED} if turn == 0 else left <= {path.name + UNFINISHED}
    with WeightWriter(path, {"a": (torch.float32, (1,))}) as writer:
        writer.write("a", torch.ones(1))
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
