"""The example workflow over HTTP and websocket: it runs, tells how far it is, leaves a video, and reuses what it can."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bed import tiny
from bed.client import Client, Rejected, Workflow
from bed.outcome import frames_of


def classes(workflow: Workflow, nodes: Any) -> set[str]:
    return {workflow[node]["class_type"] for node in nodes}


def test_makes_a_video_and_tells_the_progress(client: Client, workflow: Workflow) -> None:
    tiny.node_of(workflow, "KSampler")["inputs"]["seed"] = 4  # the server may know the rest from other tests
    run = client.run(workflow)
    assert run.error is None and not run.interrupted
    assert classes(workflow, run.executed) | classes(workflow, run.cached) == classes(workflow, workflow)
    assert {"KSampler", "VAEDecode", "CreateVideo", "SaveVideo"} <= classes(workflow, run.executed)
    sampler = next(node for node in workflow if workflow[node]["class_type"] == "KSampler")
    assert (sampler, 3, 3) in run.progress
    video = frames_of(client, run)
    assert video.shape == (9, 64, 64, 3)
    assert video.std() > 5, "a picture, not one grey"
    assert np.abs(np.diff(video.astype(int), axis=0)).mean() > 1, "frames that differ"


@pytest.mark.deep
def test_loading_text_and_frames_move_their_nodes_bars(client: Client, workflow: Workflow) -> None:
    """Each to its end, and never back; the sampler's first pass in parts of its first step."""
    tiny.node_of(workflow, "FuseStreamDiffusionModelLoader")["inputs"]["vram_budget"] = 0.008
    tiny.node_of(workflow, "FuseStreamTextEncoderLoader")["inputs"]["vram_budget"] = -1
    assert client.post("/free", {"unload_models": True, "free_memory": True}) == 200
    for attempt in range(5):  # the server frees between prompts, when its worker comes by
        tiny.node_of(workflow, "KSampler")["inputs"]["seed"] = 500 + attempt
        tiny.node_of(workflow, "CLIPTextEncode")["inputs"]["text"] = f"a heron, {attempt}"
        run = client.run(workflow)
        assert run.error is None
        if set(tiny.LOADERS) <= classes(workflow, run.executed):
            break
    else:
        pytest.fail("/free did not make the loaders run again")
    shares: dict[str, list[float]] = {}
    for node, value, most in run.progress:
        shares.setdefault(workflow[node]["class_type"], []).append(value / most)
    assert {*tiny.LOADERS, "CLIPTextEncode", "KSampler", "VAEDecode"} <= shares.keys()
    assert all(found[-1] == 1 for found in shares.values())
    for name in (*tiny.LOADERS, "KSampler", "VAEDecode"):
        assert shares[name] == sorted(shares[name]), name
    assert 0 <= shares["KSampler"][0] < 1 / 3, "before the first step is over"


def test_a_second_prompt_reuses_what_did_not_change(client: Client, workflow: Workflow) -> None:
    first = client.run(workflow)
    tiny.node_of(workflow, "KSampler")["inputs"]["seed"] += 1
    second = client.run(workflow)
    assert second.error is None
    assert classes(workflow, second.executed) == {"KSampler", "VAEDecode", "CreateVideo", "SaveVideo"}
    assert {*tiny.LOADERS, "CLIPTextEncode"} <= classes(workflow, second.cached)
    assert not np.array_equal(frames_of(client, first), frames_of(client, second))


def test_ours_makes_what_stock_makes(client: Client, workflow: Workflow) -> None:
    """The stock diffusion model and VAE loaders in place of ours: the same frames, to the last bit where kernels are off."""
    near = frames_of(client, client.run(workflow))
    tiny.node_of(workflow, "FuseStreamVAELoader")["inputs"]["kernels"] = "off"
    ours = frames_of(client, client.run(workflow))
    model, vae = (tiny.node_of(workflow, name) for name in ("FuseStreamDiffusionModelLoader", "FuseStreamVAELoader"))
    model.update(
        class_type="UNETLoader", inputs={"unet_name": model["inputs"]["model_name"], "weight_dtype": "default"}
    )
    vae["class_type"] = "VAELoader"
    del vae["inputs"]["kernels"]
    stock = client.run(workflow)
    assert stock.error is None and {"UNETLoader", "VAELoader"} <= classes(workflow, stock.executed)
    assert np.array_equal(ours, frames_of(client, stock))
    assert np.abs(near.astype(int) - ours.astype(int)).mean() < 0.1  # of 255: rounded another way, then compressed


def test_an_interrupt_stops_the_run_and_the_next_one_works(client: Client, workflow: Workflow) -> None:
    name = next(name for name in workflow if workflow[name]["class_type"] == "KSampler")
    sampler = workflow[name]
    sampler["inputs"].update(sampler_name="euler", steps=500, seed=7)
    other = Client(client.url)
    asked = []

    def interrupt_after_two_steps(kind: str, data: dict[str, Any]) -> None:
        if kind == "progress" and (data["node"], data["max"]) == (name, 500) and data["value"] >= 2 and not asked:
            asked.append(1)
            threading.Thread(target=other.post, args=("/interrupt",)).start()

    run = client.run(workflow, interrupt_after_two_steps)
    assert run.interrupted and run.error is None
    assert 2 <= max(value for node, value, most in run.progress if (node, most) == (name, 500)) < 450
    sampler["inputs"].update(steps=2)
    assert client.run(workflow).error is None


@pytest.mark.deep
def test_free_unloads_and_the_next_run_loads_again(client: Client, workflow: Workflow) -> None:
    client.run(workflow)
    assert client.post("/free", {"unload_models": True, "free_memory": True}) == 200
    for attempt in range(5):  # the server frees between prompts, when its worker comes by
        tiny.node_of(workflow, "KSampler")["inputs"]["seed"] = 100 + attempt
        run = client.run(workflow)
        if set(tiny.LOADERS) <= classes(workflow, run.executed):
            break
    else:
        pytest.fail("/free did not make the loaders run again")
    assert run.error is None


@pytest.mark.parametrize("class_type", tiny.LOADERS)
def test_a_name_that_is_not_there_is_refused_with_the_list(client: Client, workflow: Workflow, class_type: str) -> None:
    widget = tiny.LOADERS[class_type][0]
    tiny.node_of(workflow, class_type)["inputs"][widget] = "absent.safetensors"
    with pytest.raises(Rejected) as refused:
        client.run(workflow)
    (node,) = refused.value.body["node_errors"].values()
    (error,) = node["errors"]
    assert "absent.safetensors" in error["details"] and widget in error["details"]


def test_the_doctor_reports_by_itself(client: Client) -> None:
    """Every time anew, from inside a running server."""
    for _ in range(2):
        run = client.run({"1": {"class_type": "FuseStreamDoctor", "inputs": {"measure": False}}})
        assert run.error is None and run.executed == ["1"]
        (text,) = run.outputs["1"]["text"]
        assert text.startswith("FuseStream doctor") and "ComfyUI's memory\n  state" in text
        assert str(Path.home()) not in text
