"""Runs that are interrupted at random moments, and `/free` in the middle of them: what comes after is what always came, and nothing
is left behind."""

from __future__ import annotations

import copy
import json
import random
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bed import outcome, tiny
from bed.client import Client, Listener, Workflow
from bed.depth import is_thorough
from bed.outcome import LOADER
from bed.server import Server
from fusestream import checkpoints
from hostile.footprint import Footprint

SEED = 1818
INTERRUPTS = 40 if is_thorough() else 6
FREES = 64 if is_thorough() else 6
FREE = {"unload_models": True, "free_memory": True}
MANY = 500  # steps: whatever comes, comes while it samples, or before
FRAMES = 81  # which take long to decode
# Where an interrupt is sent from: the node that begins, and how many of its own steps it may have done.
PHASES = {
    LOADER: 1,
    "KSampler": 4,
    "CLIPTextEncode": 2,
    "VAEDecode": 3,
    "FuseStreamTextEncoderLoader": 1,
    "FuseStreamVAELoader": 1,
}
AFTER_SAMPLING = ("VAEDecode", "FuseStreamVAELoader")


@pytest.fixture
def example(workflow: Workflow) -> Workflow:
    """A streamed model; latents, frames, and the ledger of the stream."""
    tiny.shrink(workflow, width=64, height=64, length=5, steps=2)
    for loader in (LOADER, "FuseStreamTextEncoderLoader"):
        tiny.node_of(workflow, loader)["inputs"]["vram_budget"] = outcome.BUDGET
    tiny.node_of(workflow, "KSampler")["inputs"]["seed"] = SEED
    workflow = outcome.with_latents(workflow)
    report = {"after": [outcome.name_of(workflow, "KSampler"), 0], "write_json": True, "filename_prefix": "hostile"}
    model = [outcome.name_of(workflow, LOADER), 0]
    workflow["report"] = {"class_type": "FuseStreamReport", "inputs": {**report, "model": model}}
    return workflow


def other(example: Workflow, chance: random.Random, phase: str) -> Workflow:
    """What is to be interrupted: the node of this type does something else than before, so it runs, and all that takes long."""
    workflow = copy.deepcopy(example)
    decodes = phase in AFTER_SAMPLING
    tiny.shrink(workflow, width=64, height=64, length=FRAMES if decodes else 5, steps=2 if decodes else MANY)
    tiny.node_of(workflow, "KSampler")["inputs"]["seed"] = chance.getrandbits(32)
    if phase == "CLIPTextEncode":
        tiny.node_of(workflow, phase)["inputs"]["text"] = f"a heron, {chance.random()}"
    if phase in tiny.LOADERS:
        tiny.node_of(workflow, phase)["inputs"]["precision"] = "fast"
    return workflow


def at_moment(client: Client, workflow: Workflow, chance: random.Random, phase: str, path: str, body: Any) -> Listener:
    """POST once, when a node of this type has begun, or has gone on for a while: chance says how far, and how long after that."""
    steps, delay = chance.randint(0, PHASES[phase]), chance.random() * 0.05
    seen = 0
    is_sent = False

    def post() -> None:
        time.sleep(delay)
        client.post(path, body)

    def listen(kind: str, data: dict[str, Any]) -> None:
        nonlocal seen, is_sent
        node = data.get("node")
        if kind not in ("executing", "progress") or node is None or workflow[node]["class_type"] != phase or is_sent:
            return
        if seen >= steps:
            is_sent = True
            threading.Thread(target=post).start()
        seen += 1

    return listen


class Watch:
    """Runs the undisturbed example again and again: it must make what it made, and take what it took."""

    def __init__(self, server: Server, client: Client, example: Workflow) -> None:
        self.server, self.client, self.example = server, client, example
        self.count = 0
        self.latents, self.frames, self.memory = self._run()

    def _run(self) -> tuple[torch.Tensor, Any, dict[str, Any]]:
        self.count += 1
        workflow = outcome.sampled_anew(self.example, self.count)
        run = outcome.done(self.client, workflow)
        assert {"KSampler", "VAEDecode"} <= {workflow[node]["class_type"] for node in run.executed}
        told = run.outputs["report"]["text"][0].split("written: ")[1].strip()
        written: Any = json.loads((self.server.base / "output" / told).read_text(encoding="utf-8"))
        (memory,) = (one for one in written["memories"] if one["name"] == "VRAM for blocks")
        return outcome.latents_of(self.client, run), outcome.frames_of(self.client, run), memory

    def again(self, what: str) -> None:
        latents, frames, memory = self._run()
        assert torch.equal(latents, self.latents), what
        assert np.abs(frames.astype(int) - self.frames.astype(int)).mean() < 0.1, what
        assert memory["used"] == self.memory["used"] and memory["peak"] <= memory["limit"], what


class Growth:
    """Of the server, from the first time on that it is looked at."""

    def __init__(self, server: Server, models: Path) -> None:
        assert server.process is not None
        self.process, self.models = server.process.pid, models
        self.before: Footprint | None = None

    def look(self) -> Footprint:
        now = Footprint.of(self.process, self.models)
        self.before = self.before or now
        assert not self.before.grown(now)
        return now


@pytest.fixture
def growth(server: Server, files: list[Path]) -> Growth:
    return Growth(server, files[0].parents[1])


@pytest.fixture
def watch(server: Server, client: Client, example: Workflow) -> Watch:
    return Watch(server, client, example)


def test_after_an_interrupt_everything_is_as_it_was(
    client: Client, example: Workflow, watch: Watch, growth: Growth
) -> None:
    chance = random.Random(SEED)
    where = []
    for number, phase in zip(range(INTERRUPTS), cycle(PHASES)):
        workflow = other(example, chance, phase)
        run = client.run(workflow, at_moment(client, workflow, chance, phase, "/interrupt", {}))
        assert run.interrupted and run.error is None, f"{number}: asked for in {phase}: {run.error}"
        where.append(run.interrupted_in)
        watch.again(f"{number}: interrupted in {run.interrupted_in}, asked for in {phase}")
        growth.look()
    assert {"KSampler", "VAEDecode"} <= set(where)


@pytest.mark.deep
def test_memory_freed_in_the_middle_changes_nothing(
    server: Server, client: Client, files: list[Path], workflow: Workflow, growth: Growth
) -> None:
    """Two models and two budgets take turns; every prompt is made to lose its memory while it samples."""
    second = checkpoints.write("wan_t2v", files[0].parent, seed=1)
    server.get("/object_info")
    chance = random.Random(SEED)
    tiny.shrink(workflow, width=64, height=64, length=5, steps=6)
    sampler = tiny.node_of(workflow, "KSampler")["inputs"]
    sampler["negative"] = sampler["positive"]  # encoded anew each time: once does
    wanted: dict[str, torch.Tensor] = {}
    for number in range(FREES):
        model, budget = chance.choice([files[0].name, second.name]), chance.choice([outcome.BUDGET, 1.0])
        turn = outcome.streamed(workflow, budget)
        tiny.node_of(turn, LOADER)["inputs"]["model_name"] = model
        if model not in wanted:
            wanted[model] = outcome.made(client, outcome.with_stocks_loader(turn))
        turn = outcome.sampled_anew(turn, number)
        run = client.run(turn, at_moment(client, turn, chance, "KSampler", "/free", FREE))
        assert run.error is None and not run.interrupted
        assert "KSampler" in {turn[node]["class_type"] for node in run.executed}
        assert torch.equal(outcome.latents_of(client, run), wanted[model]), f"{number}: {model}, {budget} GiB"
        growth.look()
    assert len(wanted) == 2
    assert client.post("/free", FREE) == 200
    until = time.monotonic() + 30
    while growth.look().models:
        assert time.monotonic() < until, "everything was to be let go"
        time.sleep(0.1)
