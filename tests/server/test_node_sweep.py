"""Every node of ComfyUI's that takes a MODEL and gives one, after our loader and after stock's: the same bits."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bed import outcome, tiny
from bed.client import Client, Workflow
from bed.depth import is_thorough
from bed.server import Server
from fusestream import checkpoints
from hostile import sweep

SEED = 18
SHARE = 8  # one in so many, where it is not thorough
# What is made for other models, and fails on Wan's, stock's own as well.
FAIL_ON_WAN = {
    "FluxKVCache", "FreeU", "FreeU_V2", "HyperTile", "RenormCFG", "TomePatchModel", "TripoSplatSamplingPreview",
}  # fmt: skip
Outcome = Any  # latents, or an error's type and words


@pytest.fixture(scope="module")
def nodes(server: Server, files: list[Path]) -> dict[str, Any]:
    """Those that take a MODEL and give one."""
    checkpoints.write("lora_ab", files[0].parents[1] / "loras")
    listed: Any = server.get("/object_info")
    return sweep.found(listed)


@pytest.fixture(scope="module")
def second(server: Server, files: list[Path]) -> str:
    """Another model, for nodes that take two."""
    name = checkpoints.write("wan_t2v", files[0].parent, seed=1).name
    server.get("/object_info")
    return name


@pytest.fixture
def short(workflow: Workflow) -> Workflow:
    """Two steps of two frames, on a streamed model."""
    tiny.shrink(workflow, width=64, height=64, length=5, steps=2)
    tiny.node_of(workflow, "KSampler")["inputs"].update(seed=1801, sampler_name="euler")
    return outcome.streamed(workflow)


def tried(short: Workflow, name: str, info: Any, second: str) -> Workflow:
    """The example with this node behind the loader, and a second model for nodes that take two."""
    workflow = copy.deepcopy(short)
    loader = outcome.name_of(workflow, outcome.LOADER)
    negative = tiny.node_of(workflow, "KSampler")["inputs"]["negative"]
    links = {"CLIP": [outcome.name_of(workflow, "FuseStreamTextEncoderLoader"), 0], "CONDITIONING": negative}
    sweep.insert(workflow, name, info, links, [[loader, 0], ["second", 0]])
    workflow["second"] = copy.deepcopy(workflow[loader])  # runs only if it is connected
    workflow["second"]["inputs"]["model_name"] = second
    return workflow


def lacks(short: Workflow, name: str, info: Any, second: str) -> bool:
    """Whether it asks for what nothing here gives."""
    try:
        tried(short, name, info, second)
    except sweep.Lacking:
        return True
    return False


def tell(client: Client, workflow: Workflow) -> Outcome:
    """The latents, or what kind of error it was and what it said."""
    run = client.run(workflow)
    assert not run.interrupted
    if run.error is not None:
        return run.error["exception_type"], run.error["exception_message"]
    return outcome.latents_of(client, run)


def same(ours: Outcome, stock: Outcome) -> bool:
    if isinstance(ours, tuple) or isinstance(stock, tuple):
        return ours == stock
    return torch.equal(ours, stock)


def names_to_try(nodes: dict[str, Any]) -> list[str]:
    able = [name for name in nodes if name not in sweep.NOT_TRIED]
    if is_thorough():
        return able
    touching = [name for name in able if sweep.touches_weights(name, nodes[name])]
    others = [name for name in able if name not in touching]
    return sorted([*touching, *random.Random(SEED).sample(others, len(others) // SHARE)])


def test_what_is_not_tried_has_a_reason(nodes: dict[str, Any], second: str, short: Workflow) -> None:
    """Nothing is left out in silence, and nothing that is not there."""
    lacking = {name for name in nodes if lacks(short, name, nodes[name], second)}
    assert len(nodes) >= 90 and lacking <= sweep.NOT_TRIED.keys() <= nodes.keys()


@pytest.mark.deep
def test_a_node_does_to_a_streamed_model_what_it_does_to_stocks(
    client: Client, nodes: dict[str, Any], second: str, short: Workflow
) -> None:
    """None of them is refused: what needs all weights takes a MODEL and gives something else."""
    plain = outcome.made(client, short)
    wrong: dict[str, tuple[Outcome, Outcome]] = {}
    changing, failing = [], set()
    names = names_to_try(nodes)
    for name in names:
        workflow = tried(short, name, nodes[name], second)
        ours, stock = (tell(client, one) for one in (workflow, outcome.with_stocks_loader(workflow)))
        if not same(ours, stock):
            wrong[name] = ours, stock
        if isinstance(ours, tuple):
            failing.add(name)
        elif not torch.equal(ours, plain):
            changing.append(name)
    assert not wrong, "with our loader, with stock's"
    assert failing <= FAIL_ON_WAN
    assert len(changing) > len(names) / 4, "they are where they do something"
    assert torch.equal(outcome.made(client, outcome.sampled_anew(short, 1)), plain)
