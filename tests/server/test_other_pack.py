"""A pack of a few lines that computes over our modules, in the same ComfyUI as our own nodes."""

from __future__ import annotations

from bed.client import Client
from bed.server import PACK


def test_another_pack_computes_with_the_copy_that_comfyui_has_loaded(client: Client) -> None:
    prompt = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 32, "height": 16, "batch_size": 1, "color": 255}},
        "2": {"class_type": "OtherPacksNorm", "inputs": {"image": ["1", 0]}},
        "3": {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}},
        "4": {"class_type": "PreviewAny", "inputs": {"source": ["2", 1]}},
    }
    run = client.run(prompt)
    assert run.error is None, run.error
    [module] = run.outputs["4"]["text"]
    assert f"custom_nodes/{PACK}.kernels_cuda.modules" in module.replace("_x_", ".")
