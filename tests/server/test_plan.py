"""The Plan node in a real server: by itself before anything was sampled, and after; the sampling told to its loader meanwhile."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from PIL import Image

from bed import tiny
from bed.client import Client, Workflow
from bed.outcome import BUDGET, LOADER, name_of, streamed
from bed.server import Server


def with_plan(workflow: Workflow) -> Workflow:
    """Beside the sampler, for what it is about to compute."""
    sampler = workflow[name_of(workflow, "KSampler")]["inputs"]
    inputs = {"model": sampler["model"], "latent": sampler["latent_image"], "steps": 4, "guidance": sampler["cfg"]}
    return {**workflow, "plan": {"class_type": "FuseStreamPlan", "inputs": inputs}}


def alone(workflow: Workflow) -> Workflow:
    """The plan, and what it needs."""
    needed, asked = {}, ["plan"]
    while asked:
        name = asked.pop()
        needed[name] = workflow[name]
        asked += [value[0] for value in workflow[name]["inputs"].values() if isinstance(value, list)]
    return needed


@pytest.mark.deep
def test_before_and_after_a_run(server: Server, client: Client, workflow: Workflow) -> None:
    planned = with_plan(streamed(workflow, BUDGET + 0.0005))  # a budget of its own: nobody else has sampled with it
    tiny.node_of(planned, "KSampler")["inputs"].update(steps=4, seed=27)
    run = client.run(alone(planned))
    assert run.error is None, run.error
    assert name_of(planned, "KSampler") not in run.executed
    (text,) = run.outputs["plan"]["text"]
    assert "It fits: " in text and "64x64, 9 frames, 4 steps, two prompts a step" in text
    (picture,) = run.outputs["plan"]["images"]
    assert Image.open(io.BytesIO(client.fetch(picture))).width == 1120

    said: list[tuple[str, str]] = []
    run = client.run(planned, progress_text=lambda node, words: said.append((node, words)))
    assert run.error is None, run.error
    loader = name_of(planned, LOADER)
    assert {node for node, _ in said} == {loader}
    assert said[0][1] == "step 1 of 4" and said[-1][1].startswith("4 steps, ") and said[-1][1].endswith(" of sampling")

    run = client.run(alone(planned))
    assert run.error is None, run.error
    (text,) = run.outputs["plan"]["text"]
    assert "A step takes " in text and ": measured here." in text
    kept: Any = json.loads((server.base / "user" / "__fusestream" / "step-times.json").read_text())
    assert {one["card"] for one in kept["samplings"]} == {"CPU"}


def test_of_a_model_that_does_not_stream(client: Client, workflow: Workflow) -> None:
    run = client.run(alone(with_plan(streamed(workflow, 0.0))))
    assert run.error is None, run.error
    assert "ComfyUI's own memory management has this model's weights" in run.outputs["plan"]["text"][0]
