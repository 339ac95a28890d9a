"""ComfyUI's own templates with our loaders, as shipped, on stand-ins under the published names: the whole graph, but small, makes
what ComfyUI's template makes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from bed import opened, tiny
from bed.client import Client, Workflow
from bed.server import Server
from bed.templates.from_stock import SWAPPED, Swapped
from bed.templates.from_stock.loaders import LOADERS
from bed.templates.from_stock.prompt import prompt

SIDE = 64
# By template and node what makes it small: 5 frames and 2 steps, or 1 where the node scales pictures to a megapixel.
SMALL: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "minimax_h3_t2v": {"105:9": {"steps": 2}, "105:111": {"value": 0.2}},
    "minimax_h3_i2v": {"105:9": {"steps": 2}, "105:111": {"value": 0.2}},
    "qwen_image_2512": {"238:232": {"width": SIDE, "height": SIDE}, "238:224": {"value": 2}},
    "qwen_image_edit_2511_int8": {"170:166": {"value": 1}},
    "ltx2.3_t2v": {
        "267:257": {"value": 2 * SIDE},
        "267:258": {"value": 2 * SIDE},
        "267:260": {"value": 8},
        "267:225": {"value": 1},
        "267:330": {"value": False},  # its prompt is written anew with a thousand tokens of advice: minutes here
    },
    "ltx2.3_i2v": {
        "320:312": {"value": 2 * SIDE},
        "320:299": {"value": 2 * SIDE},
        "320:300": {"value": 8},
        "320:301": {"value": 1},
    },
    "krea2_turbo_int8": {"30:3": {"steps": 2}, "30:16": {"max_length": 4}},
    "z_image_turbo_int8": {"57:13": {"width": SIDE, "height": SIDE}, "57:3": {"steps": 2}},
    "wan2.2_t2v_14B_swapped": {
        "128:74": {"width": SIDE, "height": SIDE},
        "128:126": {"value": 0.25},
        "128:114": {"value": 2},
        "128:115": {"value": 1},
    },
    "wan2.2_i2v_14B_swapped": {
        "129:98": {"width": SIDE, "height": SIDE},
        "129:161": {"value": 0.25},
        "129:128": {"value": 2},
        "129:127": {"value": 1},
    },
}
OURS = {swap.ours for swap in LOADERS.values()}
each_template = pytest.mark.parametrize("one", SWAPPED, ids=lambda one: one.name)


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One in which stock takes smaller files, with one under every name that the templates have, and their pictures."""
    base = tmp_path_factory.mktemp("comfyui")
    opened.install(base)
    (base / "input").mkdir()
    for one in SWAPPED:
        tiny.write_stand_ins(base / "models", one.shipped())
        for name in pictures(one.shipped()):
            Image.radial_gradient("L").convert("RGB").resize((SIDE, SIDE)).save(base / "input" / name)
    with Server(Path(sys.executable), Path(os.environ["COMFYUI_PATH"]), base) as server:
        yield server


def pictures(workflow: dict[str, Any]) -> list[str]:
    return [node["widgets_values"][0] for node in workflow["nodes"] if node["type"] == "LoadImage"]


def small(one: Swapped, workflow: dict[str, Any], server: Server) -> Workflow:
    """As the front end queues it, but small."""
    sent: Workflow = prompt(workflow, server.get("/object_info"))  # type: ignore[arg-type]
    for node, values in SMALL[one.name].items():
        assert values.keys() <= sent[node]["inputs"].keys()
        sent[node]["inputs"].update(values)
    sizes = {node for node, content in sent.items() if content["class_type"] == "ResolutionSelector"}
    for node in sizes:
        del sent[node]
    for content in sent.values():
        inputs = content["inputs"]
        inputs.update({name: SIDE for name, value in inputs.items() if isinstance(value, list) and value[0] in sizes})
        if content["class_type"] == "FluxKontextImageScale":  # to a megapixel, whatever it is given
            scaled = {"upscale_method": "area", "width": SIDE, "height": SIDE, "crop": "center"}
            content.update(class_type="ImageScale", inputs={**inputs, **scaled})
    return sent


def made(server: Server, sent: Workflow) -> tuple[set[str], list[np.ndarray]]:
    """The nodes that ran, and what was made: pictures, 8-bit [height, width, 3], and the sound of a video.

    The frames of a video are saved as pictures beside it: its codec makes more of a difference than there is.
    """
    client = Client(server.url)
    (saved,) = (name for name, node in sent.items() if node["class_type"].startswith("Save"))
    frames = [node["inputs"]["images"] for node in sent.values() if node["class_type"] == "CreateVideo"]
    beside: Workflow = {}
    for one in frames:
        beside["frames"] = {"class_type": "SaveImage", "inputs": {"images": one, "filename_prefix": "frames"}}
    run = client.run({**sent, **beside}, timeout=240)
    assert not run.interrupted and run.error is None, run.error and run.error["exception_message"][:2000]
    out = []
    for told in run.outputs["frames" if frames else saved]["images"]:
        with Image.open(io.BytesIO(client.fetch(told))) as image:
            out.append(np.asarray(image.convert("RGB")).astype(int))
    if frames:
        with av.open(io.BytesIO(client.fetch(run.outputs[saved]["images"][0]))) as container:
            if container.streams.audio:
                out.append(np.concatenate([one.to_ndarray() for one in container.decode(audio=0)], axis=-1))
    return {*run.executed, *run.cached}, out


@pytest.mark.deep
@each_template
def test_it_makes_what_stocks_template_makes(stocked: Server, one: Swapped) -> None:
    """To the bit where kernels are off, and nearly so with the references of ours."""
    sent = small(one, one.shipped(), stocked)
    ran, ours = made(stocked, sent)
    loaders = {name for name, node in sent.items() if node["class_type"] in OURS}
    info: Any = stocked.get("/object_info")
    assert not [node for node in sent.values() if info[node["class_type"]].get("api_node")]
    assert loaders <= ran and ours[0].std() > 5
    side = 2 * SIDE if one.name.startswith("ltx") else SIDE  # whose latents are doubled
    assert ours[0].shape == (side, side, 3)
    if not one.is_of_these_templates():
        pytest.skip("other templates are installed than it was made of")
    _, stocks = made(stocked, small(one, one.template(), stocked))
    for name in loaders:
        sent[name]["inputs"]["kernels"] = "off"
    _, off = made(stocked, sent)
    assert len(ours) == len(off) == len(stocks)
    for mine, theirs in zip(off, stocks, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert np.abs(ours[0] - stocks[0]).mean() < 0.5  # of 255
