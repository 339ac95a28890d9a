"""Kernels, Report and Compare in a real server: two branches of one streamed model, each with its report."""

from __future__ import annotations

import copy
import io
import json
import re
from typing import Any

import pytest
from PIL import Image

from bed import tiny
from bed.client import Client, Workflow
from bed.outcome import LOADER, name_of
from bed.server import Server


@pytest.fixture
def two_branches(workflow: Workflow) -> Workflow:
    """A: as loaded. B: kernels off. Both up to the latents, with a report behind each sampler."""
    tiny.node_of(workflow, LOADER)["inputs"]["vram_budget"] = 0.008
    for class_type in ("VAEDecode", "CreateVideo", "SaveVideo", "FuseStreamVAELoader"):
        del workflow[name_of(workflow, class_type)]
    sampler = name_of(workflow, "KSampler")
    model = workflow[sampler]["inputs"]["model"]
    workflow[sampler]["inputs"].update(seed=81, steps=2)
    workflow["off"] = {"class_type": "FuseStreamKernels", "inputs": {"model": model, "kernels": "off"}}
    workflow["sampler_b"] = copy.deepcopy(workflow[sampler])
    workflow["sampler_b"]["inputs"]["model"] = ["off", 0]
    files = {"write_json": True, "write_trace": True, "filename_prefix": "reports/run"}
    for name, source, of in (("a", sampler, model), ("b", "sampler_b", ["off", 0])):
        workflow[name] = {"class_type": "FuseStreamReport", "inputs": {"after": [source, 0], "model": of, **files}}
    workflow["both"] = {"class_type": "FuseStreamCompare", "inputs": {"first": ["a", 1], "second": ["b", 1]}}
    workflow["save_a"] = {"class_type": "SaveLatent", "inputs": {"samples": ["a", 0], "filename_prefix": "report_a"}}
    workflow["save_b"] = {"class_type": "SaveLatent", "inputs": {"samples": ["b", 0], "filename_prefix": "report_b"}}
    return workflow


def test_reports_of_two_branches(server: Server, client: Client, two_branches: Workflow) -> None:
    run = client.run(two_branches)
    assert run.error is None, run.error
    texts = {name: run.outputs[name]["text"][0] for name in ("a", "b", "both")}
    assert "kernels auto" in texts["a"] and "kernels off" in texts["b"] and "B / A" in texts["both"]
    for text in (texts["a"], texts["b"]):
        assert re.match(
            r".*\n64x64, 9 frames: 2 steps sampled in .* a step.*\n(.*\n)?The nodes .* took .*KSampler ", text
        ), text
    assert "a pass through 12 parts: " in texts["a"] and "Could not be found out" not in texts["a"] + texts["b"]
    for name in texts:
        (picture,) = run.outputs[name]["images"]
        shown = Image.open(io.BytesIO(client.fetch(picture)))
        assert shown.width == (2240 if name == "both" else 1120) and shown.height > 600
    latents = [client.fetch(run.outputs[f"save_{name}"]["latents"][0]) for name in "ab"]
    assert latents[0][-4096:] == latents[1][-4096:], "on the CPU the kernels' references do not come into it"
    folder = server.base / "output" / "reports"
    for name in "ab":
        told: Any = texts[name].split("written: ")
        found = json.loads((folder.parent / told[1].strip()).read_text())
        assert found["streams"] and len(found["layers"]) == 12
    assert client.run(two_branches).executed == [], "nothing changed, so nothing runs again"


def test_a_report_without_a_stream_or_a_model(client: Client, two_branches: Workflow) -> None:
    tiny.node_of(two_branches, LOADER)["inputs"]["vram_budget"] = 0.0
    del two_branches["b"]["inputs"]["model"]
    run = client.run(two_branches)
    assert run.error is None, run.error
    assert "Set vram_budget" in run.outputs["a"]["text"][0] and "No trace was written" in run.outputs["a"]["text"][0]
    assert "No model is connected" in run.outputs["b"]["text"][0]
    assert "No passes to compare" in run.outputs["both"]["text"][0]
