"""What a workflow makes: latents, which are compared to the last bit, and frames. Decoding on a busy CPU is not that exact, stock's
neither.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import av
import numpy as np
import torch
from safetensors.torch import load

from . import tiny
from .client import Client, Run, Workflow

LOADER = "FuseStreamDiffusionModelLoader"
BUDGET = 0.008  # GiB: two of the tiny model's four blocks
DECODING = ("VAEDecode", "CreateVideo", "SaveVideo")


def name_of(workflow: Workflow, class_type: str) -> str:
    """The first node of this type."""
    return next(name for name, node in workflow.items() if node["class_type"] == class_type)


def streamed(workflow: Workflow, budget: float = BUDGET) -> Workflow:
    """The example workflow up to its latents; the diffusion model streams."""
    workflow = latents_only(workflow)
    tiny.node_of(workflow, LOADER)["inputs"]["vram_budget"] = budget
    return workflow


def latents_only(workflow: Workflow) -> Workflow:
    """The example workflow up to its latents, which it saves."""
    workflow = with_latents(copy.deepcopy(workflow))
    for class_type in DECODING:
        del workflow[name_of(workflow, class_type)]
    return workflow


def with_latents(workflow: Workflow) -> Workflow:
    """Which it saves."""
    samples = {"samples": [name_of(workflow, "KSampler"), 0], "filename_prefix": "latents"}
    return {**workflow, "save": {"class_type": "SaveLatent", "inputs": samples}}


def sampled_anew(workflow: Workflow, number: int) -> Workflow:
    """The same again, for a server that would hand out what it has: the latents that it begins with are zeros, whatever they are
    multiplied by."""
    workflow = copy.deepcopy(workflow)
    sampler = tiny.node_of(workflow, "KSampler")["inputs"]
    inputs = {"samples": sampler["latent_image"], "multiplier": 1 + number / 100}
    workflow["zeros"] = {"class_type": "LatentMultiply", "inputs": inputs}
    sampler["latent_image"] = ["zeros", 0]
    return workflow


def with_stocks_loader(workflow: Workflow) -> Workflow:
    """The same workflow with stock's diffusion model loaders."""
    workflow = copy.deepcopy(workflow)
    for node in workflow.values():
        if node["class_type"] == LOADER:
            name = node["inputs"]["model_name"]
            node.update(class_type="UNETLoader", inputs={"unet_name": name, "weight_dtype": "default"})
    return workflow


def made(client: Client, workflow: Workflow) -> torch.Tensor:
    """The latents that it saves."""
    return latents_of(client, done(client, workflow))


def done(client: Client, workflow: Workflow) -> Run:
    """A run that must go well."""
    run = client.run(workflow)
    assert run.error is None and not run.interrupted, run.error
    return run


def latents_of(client: Client, run: Run) -> torch.Tensor:
    """The latents that a run saved."""
    (files,) = (output["latents"] for output in run.outputs.values() if "latents" in output)
    return load(client.fetch(files[0]))["latent_tensor"]


def frames_of(client: Client, run: Run) -> np.ndarray[Any, Any]:
    """The saved video's frames, [frames, height, width, 3] uint8."""
    (files,) = (output["images"] for output in run.outputs.values() if output.get("animated") == [True])
    with av.open(io.BytesIO(client.fetch(files[0]))) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
