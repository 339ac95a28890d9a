"""The style example as shipped, in a real ComfyUI."""

from __future__ import annotations

import io
import json

import numpy as np
from PIL import Image

from bed.client import Client
from bed.paths import ROOT
from bed.server import Server
from bed.templates.inputs import PICTURE


def test_the_example_gives_a_picture_another_look(server: Server, client: Client) -> None:
    picture = Image.radial_gradient("L").convert("RGB").resize((72, 40))
    picture.save(server.base / "input" / PICTURE)
    workflow = json.loads((ROOT / "workflows" / "api" / "style_transfer.json").read_text(encoding="utf-8"))
    run = client.run(workflow)
    assert run.error is None, run.error
    [saved] = (node for node, content in workflow.items() if content["class_type"] == "SaveImage")
    with Image.open(io.BytesIO(client.fetch(run.outputs[saved]["images"][0]))) as made:
        assert made.size == (72, 40)
        assert np.abs(np.asarray(made, np.float32) - np.asarray(picture, np.float32)).mean() > 10
