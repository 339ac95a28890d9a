"""ComfyUI's own switches for memory, each in a process that was started with it: what a streamed Wan 1.3B holds of 5 GiB, and that
its latents stay what they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

FREE = 5.25  # GiB: the whole model, of 2.6, and what ComfyUI keeps for a step, 2.2, fit
RESERVED = 2.5
SWITCHES = {
    "none": (),
    "lowvram": ("--lowvram",),
    "novram": ("--novram",),
    "reserve": ("--reserve-vram", str(RESERVED)),
}
LIBRARIES = 0.35  # GiB that the driver loads in a first step, beside what is reckoned with
SAME = 0.02  # of kernels that were chosen anew, in halves
SECONDS = 120.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What each process found, by its switch; with where its latents are."""
    from fusestream.bench.end_to_end import weights
    from fusestream.bench.end_to_end.process import Process
    from fusestream.bench.end_to_end.row_types import Side, sampling

    folder = tmp_path_factory.mktemp("switches")
    row = {
        name: value
        for name, value in asdict(sampling("wan13", 480, 480, 17, 2)).items()
        if name not in ("stock", "ours")
    }
    job = {"task": "work", "who": "ours", "row": row, "free": FREE, "quick": False}
    processes = {
        name: Process(
            {**job, "side": asdict(Side(comfy=comfy)), "sample_to": str(folder / f"{name}.f32")}, folder / f"{name}.log"
        )
        for name, comfy in SWITCHES.items()
    }
    try:
        path = str(weights.write("wan13", folder, "fp16", "cuda")["path"])
        torch.cuda.empty_cache()
        told = {}
        for name, process in processes.items():
            process.wait_ready(SECONDS)
            told[name] = process.go({"paths": {"wan13": path}}, SECONDS) | {"sample": folder / f"{name}.f32"}
            assert "error" not in told[name], (told[name], process.last_lines(20))
        yield told
    finally:
        for process in processes.values():
            process.end()
        shutil.rmtree(folder)


def blocks(found: dict[str, Any]) -> float:
    """GiB of the card that the blocks' weights took at most."""
    peak: float = found["pager"]["peak GiB"]["VRAM"]
    return peak


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_latents_are_the_same(found: dict[str, dict[str, Any]], switch: str) -> None:
    from fusestream.bench.end_to_end.results import distance

    assert found[switch]["finite"]
    assert distance(found[switch]["sample"], found["none"]["sample"]) < SAME


def test_without_a_switch_all_of_it_stays(found: dict[str, dict[str, Any]]) -> None:
    assert blocks(found["none"]) > 2.3 and found["none"]["peak GiB"] > FREE - RESERVED + LIBRARIES


def test_lowvram_changes_nothing(found: dict[str, dict[str, Any]]) -> None:
    assert blocks(found["lowvram"]) == pytest.approx(blocks(found["none"]), abs=0.05)


def test_novram_leaves_the_narrowest_window(found: dict[str, dict[str, Any]]) -> None:
    assert blocks(found["novram"]) < 0.25


def test_what_is_reserved_is_left(found: dict[str, dict[str, Any]]) -> None:
    assert found["reserve"]["peak GiB"] < FREE - RESERVED + LIBRARIES
    assert 0.25 < blocks(found["reserve"]) < FREE - RESERVED, "and the rest is used"
