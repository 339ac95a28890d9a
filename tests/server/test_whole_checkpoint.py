"""A picture of one checkpoint in a running server: what stock's Load Checkpoint makes of it, and what is told before."""

from __future__ import annotations

import copy
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bed import opened, pack
from bed.client import Client, Rejected, Run, Workflow
from bed.server import Server

pack.load()

from fusestream.checkpoints import whole  # noqa: E402 - the line above makes it importable

LOADER = "FuseStreamCheckpointLoader"


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("comfyui")
    opened.install(base)
    for parts in (whole.PARTS, ("model", "clip")):
        whole.write("sd15", base / "models" / "checkpoints", parts=parts)
    with Server(Path(sys.executable), Path(os.environ["COMFYUI_PATH"]), base) as server:
        yield server


@pytest.fixture
def client(stocked: Server) -> Client:
    return Client(stocked.url)


def graph(name: str, **loader: Any) -> Workflow:
    prompts = {
        node: {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": text}}
        for node, text in (("2", "a (fox:1.2) in the snow"), ("3", "blurred"))
    }
    sampler = {"seed": 3, "steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    links = {"model": ["1", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0]}
    return {
        "1": {"class_type": LOADER, "inputs": {"ckpt_name": name, **loader}},
        **prompts,
        "4": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "5": {"class_type": "KSampler", "inputs": {**sampler, **links}},
        "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "whole"}},
    }


def picture(client: Client, run: Run) -> Any:
    (saved,) = run.outputs["7"]["images"]
    return np.asarray(Image.open(io.BytesIO(client.fetch(saved))).convert("RGB")).astype(int)


@pytest.mark.deep
def test_it_makes_what_stock_makes(client: Client) -> None:
    """To the last bit where kernels are off, streamed or not."""
    name = "sd15_whole_fp16.safetensors"
    stock = copy.deepcopy(graph(name))
    stock["1"]["class_type"] = "CheckpointLoaderSimple"
    wanted = client.run(stock)
    assert wanted.error is None
    theirs = picture(client, wanted)
    assert theirs.std() > 5, "a picture, not one grey"
    for budget in (-1, 0):
        run = client.run(graph(name, kernels="off", vram_budget=budget))
        assert run.error is None and np.array_equal(picture(client, run), theirs)
    run = client.run(graph(name))
    assert run.error is None and np.abs(picture(client, run) - theirs).mean() < 1


@pytest.mark.deep
def test_a_part_that_is_missing_is_told_before_anything_runs(client: Client) -> None:
    with pytest.raises(Rejected) as refused:
        client.run(graph("sd15_whole_no_vae_fp16.safetensors"))
    (error,) = refused.value.body["node_errors"]["1"]["errors"]
    assert "has no VAE inside: connect one from the FuseStream VAE Loader" in error["details"]
