"""A streamed model in a real server: what stock makes, under LoRAs, interrupts, /free, other models, and a refusal."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bed import outcome, tiny
from bed.client import Client, Workflow
from bed.outcome import LOADER, made, name_of, with_stocks_loader
from bed.server import Server
from fusestream import checkpoints
from hostile import sweep


@pytest.fixture
def streamed(workflow: Workflow) -> Workflow:
    tiny.node_of(workflow, "KSampler")["inputs"]["seed"] = 11
    return outcome.streamed(workflow)


def test_it_makes_what_stock_makes(client: Client, streamed: Workflow) -> None:
    assert torch.equal(made(client, streamed), made(client, with_stocks_loader(streamed)))


def test_loras_between_prompts(server: Server, client: Client, files: list[Path], streamed: Workflow) -> None:
    """Two in a row, other strengths, one, none: each time what stock makes."""
    folder = files[0].parents[1] / "loras"
    loras = [checkpoints.write(kind, folder).name for kind in ("lora_ab", "lora_diff")]
    server.get("/object_info")
    loader = name_of(streamed, LOADER)
    plain = made(client, streamed)
    seen = []
    for strengths in ((1.0, 1.0), (0.3, 1.0), (0.3,), ()):
        workflow = copy.deepcopy(streamed)
        last = loader
        for number, (lora, strength) in enumerate(zip(loras, strengths, strict=False)):
            inputs = {"model": [last, 0], "lora_name": lora, "strength_model": strength}
            last = f"lora{number}"
            workflow[last] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
        for name, node in workflow.items():
            if not name.startswith("lora") and node["inputs"].get("model") == [loader, 0]:
                node["inputs"]["model"] = [last, 0]
        ours = made(client, workflow)
        assert torch.equal(ours, made(client, with_stocks_loader(workflow))), strengths
        seen.append(ours)
    assert not any(torch.equal(latents, plain) for latents in seen[:-1]) and torch.equal(seen[-1], plain)


def test_a_pair_of_models_in_one_graph_under_one_budget(
    server: Server, client: Client, files: list[Path], streamed: Workflow
) -> None:
    """As Wan 2.2's: one samples the first steps, another one goes on."""
    second = checkpoints.write("wan_t2v", files[0].parent, seed=1).name
    server.get("/object_info")
    sampler = name_of(streamed, "KSampler")
    streamed["low"] = copy.deepcopy(tiny.node_of(streamed, LOADER))
    streamed["low"]["inputs"]["model_name"] = second
    streamed["more"] = copy.deepcopy(streamed[sampler])
    streamed["more"]["inputs"].update(model=["low", 0], latent_image=[sampler, 0], denoise=0.6)
    streamed["save"]["inputs"]["samples"] = ["more", 0]
    stock = made(client, with_stocks_loader(streamed))
    for seed in (11, 12, 11):
        for name in (sampler, "more"):
            streamed[name]["inputs"]["seed"] = seed
        ours = made(client, streamed)
        assert torch.equal(ours, stock) == (seed == 11)


def test_an_interrupt_and_a_run_after_it(client: Client, streamed: Workflow) -> None:
    sampler = tiny.node_of(streamed, "KSampler")["inputs"]
    sampler["seed"] = 21
    wanted = made(client, with_stocks_loader(streamed))
    steps = sampler["steps"]
    sampler["steps"] = 500
    other, asked = Client(client.url), []

    def interrupt_after_two_steps(kind: str, data: dict[str, Any]) -> None:
        if kind == "progress" and data["max"] == 500 and data["value"] >= 2 and not asked:  # the sampler's steps
            asked.append(1)
            threading.Thread(target=other.post, args=("/interrupt",)).start()

    assert client.run(streamed, interrupt_after_two_steps).interrupted
    sampler["steps"] = steps
    assert torch.equal(made(client, streamed), wanted)


@pytest.mark.deep
def test_free_and_a_run_after_it(client: Client, streamed: Workflow) -> None:
    wanted = made(client, streamed)
    for seed in (31, 32, 11):
        assert client.post("/free", {"unload_models": True}) == 200
        tiny.node_of(streamed, "KSampler")["inputs"]["seed"] = seed
        found = made(client, streamed)
    assert torch.equal(found, wanted)


def saved(server: Server, client: Client, workflow: Workflow, loader: str, name: str) -> dict[str, torch.Tensor]:
    """What Save Model writes of this loader's model."""
    prefix = f"saved of {name}"  # other tests leave pictures there
    save = {"class_type": "ModelSave", "inputs": {"model": [loader, 0], "filename_prefix": prefix}}
    outcome.done(client, {**workflow, "model": save})
    (path,) = (server.base / "output").glob(f"{prefix}*")
    return load_file(path)


def test_what_is_saved_is_what_stock_saves(server: Server, client: Client, streamed: Workflow) -> None:
    loader = name_of(streamed, LOADER)
    ours = saved(server, client, streamed, loader, "ours")
    stock = saved(server, client, with_stocks_loader(streamed), loader, "stock")
    assert ours.keys() == stock.keys() and all(torch.equal(ours[key], stock[key]) for key in stock)


def test_training_is_refused_and_the_server_goes_on(server: Server, client: Client, streamed: Workflow) -> None:
    info: Any = server.get("/object_info/TrainLoraNode")
    sampler = tiny.node_of(streamed, "KSampler")["inputs"]
    links = {"LATENT": sampler["latent_image"], "CONDITIONING": sampler["positive"]}
    workflow = copy.deepcopy(streamed)
    model = [name_of(streamed, LOADER), 0]
    sweep.add(workflow, "TrainLoraNode", info["TrainLoraNode"], links, [model])
    workflow["losses"] = {"class_type": "PreviewAny", "inputs": {"source": [sweep.TRIED, 1]}}
    error = client.run(workflow).error
    assert error is not None and error["exception_type"] == "fusestream.NotWhileStreaming"
    assert "Training needs all of a model's weights" in error["exception_message"]
    assert "Set vram_budget to 0" in error["exception_message"]
    wanted = made(client, with_stocks_loader(streamed))
    assert torch.equal(made(client, outcome.sampled_anew(streamed, 1)), wanted)


def test_a_budget_too_small_is_explained(client: Client, streamed: Workflow) -> None:
    tiny.node_of(streamed, LOADER)["inputs"]["vram_budget"] = 0.001
    run = client.run(streamed)
    assert run.error is not None and "Raise vram_budget" in run.error["exception_message"]
    tiny.node_of(streamed, LOADER)["inputs"]["vram_budget"] = -1
    assert client.run(streamed).error is None
