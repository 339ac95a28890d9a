"""FuseStream Fuse between stock's nodes, in a real ComfyUI: what goes in is what comes out."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from safetensors.torch import save_file
from spandrel.architectures.ESRGAN import ESRGAN

from bed.client import Client
from bed.server import Server


def test_stocks_node_takes_the_copy_as_it_takes_the_model(server: Server, client: Client) -> None:
    folder = server.base / "models" / "upscale_models"
    folder.mkdir(exist_ok=True)
    weights = ESRGAN(num_blocks=1, num_filters=8, scale=4).state_dict()
    weights["model.10.weight"] *= 20  # beyond one grey
    weights["model.10.bias"] += 0.5
    save_file(weights, folder / "tiny.safetensors")
    Image.radial_gradient("L").convert("RGB").resize((24, 20)).save(server.base / "input" / "small.png")
    workflow = {
        "1": {"class_type": "UpscaleModelLoader", "inputs": {"model_name": "tiny.safetensors"}},
        "2": {"class_type": "LoadImage", "inputs": {"image": "small.png"}},
        "3": {
            "class_type": "FuseStreamFuse",
            "inputs": {"upscale_model": ["1", 0], "kernels": "auto", "precision": "precise"},
        },
        "4": {"class_type": "ImageUpscaleWithModel", "inputs": {"upscale_model": ["3", 0], "image": ["2", 0]}},
        "5": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "fused"}},
        "6": {"class_type": "ImageUpscaleWithModel", "inputs": {"upscale_model": ["1", 0], "image": ["2", 0]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "stock"}},
    }
    run = client.run(workflow)
    assert run.error is None, run.error
    made, stock = (picture(client, run.outputs[node]["images"][0]) for node in ("5", "7"))
    assert made.shape == (80, 96, 3) and stock.std() > 1
    assert np.abs(made - stock).max() <= 1
    assert "FusedConvNormAct2d" in str(run.outputs["3"])


def picture(client: Client, told: dict[str, str]) -> np.ndarray:
    with Image.open(io.BytesIO(client.fetch(told))) as made:
        return np.asarray(made, np.int32)
