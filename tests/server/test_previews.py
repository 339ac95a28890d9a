"""A video's preview over the websocket: all of its frames, where and when a user wants them."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from bed import tiny
from bed.client import Client, Workflow
from bed.server import Server

LATENT_FRAMES = 3


@pytest.fixture
def workflow(workflow: Workflow) -> Workflow:
    """As everywhere, and new to the server."""
    tiny.node_of(workflow, "KSampler")["inputs"]["seed"] = uuid.uuid4().int % 2**32
    return workflow


@pytest.fixture
def switched_off(server: Server) -> Iterator[None]:
    path = server.base / "user" / "default" / "comfy.settings.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"FuseStream.Preview.Moving": False}), encoding="utf-8")
    yield
    path.unlink()


def previews(client: Client, workflow: Workflow, method: str) -> list[Any]:
    """Of the sampler, as a page gets them."""
    found: list[Any] = []

    def take(told: dict[str, Any], picture: bytes) -> None:
        assert workflow[told["node_id"]]["class_type"] == "KSampler"
        found.append(Image.open(io.BytesIO(picture)))

    run = client.run(workflow, preview=take, preview_method=method)
    assert run.error is None
    return found


@pytest.mark.deep("latent2rgb")
@pytest.mark.parametrize("method", ["latent2rgb", "default"])
def test_it_is_all_latent_frames_also_where_nobody_chose(client: Client, workflow: Workflow, method: str) -> None:
    found = previews(client, workflow, method)
    assert found and {(one.format, one.n_frames) for one in found} == {("WEBP", LATENT_FRAMES)}


@pytest.mark.deep
def test_there_is_none_where_comfyui_has_none(client: Client, workflow: Workflow) -> None:
    assert previews(client, workflow, "none") == []


@pytest.mark.usefixtures("switched_off")
def test_the_setting_brings_back_comfyuis_own(client: Client, workflow: Workflow) -> None:
    steps = tiny.node_of(workflow, "KSampler")["inputs"]["steps"]
    assert [one.format for one in previews(client, workflow, "latent2rgb")] == ["JPEG"] * steps


def test_other_loaders_models_keep_comfyuis_own(client: Client, workflow: Workflow) -> None:
    model = tiny.node_of(workflow, "FuseStreamDiffusionModelLoader")
    inputs = {"unet_name": model["inputs"]["model_name"], "weight_dtype": "default"}
    model.update(class_type="UNETLoader", inputs=inputs)
    assert {one.format for one in previews(client, workflow, "latent2rgb")} == {"JPEG"}
    tiny.node_of(workflow, "KSampler")["inputs"]["seed"] += 1
    assert previews(client, workflow, "default") == []
