"""The examples that make pictures, as shipped, on stand-ins under the published names: small, but the whole graph; and what they
make is what stock's loaders in the same graph make."""

from __future__ import annotations

import copy
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from bed import opened, tiny
from bed.client import Client, Run, Workflow
from bed.depth import is_thorough
from bed.paths import ROOT
from bed.server import Server
from bed.templates import EXAMPLES
from bed.templates.clip import write_clip
from bed.templates.inputs import CLIP, PICTURE

SIDE = 64
FRAMES = 9  # of the clip that is changed live
NAMES = [example.name for example in EXAMPLES if example.is_picture and example.samples]
CAPTION = "caption_and_animate"
FILES = {
    file.name
    for example in EXAMPLES
    if example.is_picture or example.is_live or example.name == CAPTION
    for file in example.graph().files()
}
STOCK = {
    "FuseStreamDiffusionModelLoader": ("UNETLoader", {"unet_name": "model_name"}, {"weight_dtype": "default"}),
    "FuseStreamTextEncoderLoader": ("CLIPLoader", {"clip_name": "text_encoder_name", "type": "type"}, {}),
    "FuseStreamVAELoader": ("VAELoader", {"vae_name": "vae_name"}, {}),
}


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One in which stock takes smaller files, with one under every name that these examples have, and a picture."""
    base = tmp_path_factory.mktemp("comfyui")
    opened.install(base)
    tiny.write_published(base / "models", FILES)
    (base / "input").mkdir()
    Image.radial_gradient("L").convert("RGB").resize((2 * SIDE, SIDE)).save(base / "input" / PICTURE)
    write_clip(base / "input" / CLIP, side=128, frames=FRAMES)
    with Server(Path(sys.executable), Path(os.environ["COMFYUI_PATH"]), base) as server:
        yield server


def twin(name: str) -> Workflow:
    """At a size for two CPU cores."""
    workflow: Workflow = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
    tiny.shrink(workflow, width=SIDE, height=SIDE, steps=2)
    for node in workflow.values():
        if node["class_type"] == "PrimitiveInt":
            node["inputs"]["value"] = SIDE
        if node["class_type"] == "ImageScaleToTotalPixels":
            node["inputs"]["megapixels"] = 0.01
    return workflow


def with_stocks_loaders(workflow: Workflow) -> Workflow:
    out = copy.deepcopy(workflow)
    for node in out.values():
        if node["class_type"] in STOCK:
            class_type, names, values = STOCK[node["class_type"]]
            inputs = {theirs: node["inputs"][ours] for theirs, ours in names.items()}
            node.update(class_type=class_type, inputs={**inputs, **values})
    return out


def picture(server: Server, workflow: Workflow) -> tuple[Run, np.ndarray]:
    """Run the graph; 8-bit [height, width, 3]."""
    client = Client(server.url)
    run = client.run(workflow, timeout=240)
    assert not run.interrupted and run.error is None, run.error and run.error["exception_message"][:2000]
    (save,) = (name for name, node in workflow.items() if node["class_type"] == "SaveImage")
    with Image.open(io.BytesIO(client.fetch(run.outputs[save]["images"][0]))) as image:  # of several the first
        return run, np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_example_makes_the_picture_that_stocks_loaders_make(stocked: Server, name: str) -> None:
    workflow = twin(name)
    run, ours = picture(stocked, workflow)
    # A node that is not on the way to the picture would not have been executed.
    assert {*run.executed, *run.cached} == set(workflow)
    assert ours.std() > 5, "a picture, not one grey"
    _, stocks = picture(stocked, with_stocks_loaders(workflow))
    assert ours.shape == stocks.shape
    assert ours.shape == ((80, 144, 3) if name == "flux2_klein_edit" else (SIDE, SIDE, 3))
    assert np.abs(ours - stocks).mean() < 0.5  # of 255
    assert np.abs(ours - stocks).max() <= 8


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_the_graph_shows_in_the_picture(stocked: Server, name: str) -> None:
    """The words, and what is to be changed."""
    before = picture(stocked, twin(name))[1]
    workflow = twin(name)
    tiny.node_of(workflow, "CLIPTextEncode")["inputs"]["text"] = "a blue teapot"
    assert np.abs(picture(stocked, workflow)[1] - before).max() > 4
    if name == "flux2_klein_edit":
        Image.linear_gradient("L").convert("RGB").resize((2 * SIDE, SIDE)).save(stocked.base / "input" / "other.png")
        workflow = twin(name)
        tiny.node_of(workflow, "LoadImage")["inputs"]["image"] = "other.png"
        assert np.abs(picture(stocked, workflow)[1] - before).max() > 4


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("type_", ["auto", "the other"])
def test_the_wrong_type_of_the_text_encoder_is_told_with_the_right_one(stocked: Server, name: str, type_: str) -> None:
    workflow = twin(name)
    inputs = tiny.node_of(workflow, "FuseStreamTextEncoderLoader")["inputs"]
    right = inputs["type"]
    inputs["type"] = {"flux2": "lumina2", "lumina2": "flux2"}[right] if type_ == "the other" else type_
    run = Client(stocked.url).run(workflow, timeout=240)
    assert run.error is not None
    message = run.error["exception_message"]
    assert right in message and "qwen_3_4b.safetensors" in message
    failed = workflow[run.error["node_id"]]["class_type"]
    assert (failed == "FuseStreamTextEncoderLoader") == (type_ == "auto")


@pytest.mark.deep
def test_a_caption_becomes_a_video(stocked: Server) -> None:
    """The text that is written is of the picture, and what is encoded is that text."""
    Image.linear_gradient("L").convert("RGB").resize((SIDE, SIDE)).save(stocked.base / "input" / "across.png")
    client, texts, videos = Client(stocked.url), [], []
    for name in (PICTURE, "across.png") if is_thorough() else (PICTURE,):
        workflow = twin(CAPTION)
        tiny.shrink(workflow, width=SIDE, height=SIDE, length=5, steps=1)
        tiny.node_of(workflow, "LoadImage")["inputs"]["image"] = name
        written = next(key for key, node in workflow.items() if node["class_type"] == "TextGenerate")
        workflow[written]["inputs"]["max_length"] = 12
        workflow["shown"] = {"class_type": "PreviewAny", "inputs": {"source": [written, 0]}}
        run = client.run(workflow, timeout=240)
        assert run.error is None, run.error and run.error["exception_message"][:2000]
        assert {*run.executed, *run.cached} == set(workflow)
        texts.append(run.outputs["shown"]["text"][0])
        save = next(key for key, node in workflow.items() if node["class_type"] == "SaveVideo")
        videos.append(client.fetch(run.outputs[save]["images"][0]))
    assert texts[0] and videos[0]
    assert len(texts) == len(set(texts)) == len(set(videos))


@pytest.mark.deep
def test_the_live_example_makes_each_frame_of_its_clip(stocked: Server) -> None:
    """As stock's nodes make the first, before anything is blended in."""
    workflow = twin("live_video_sd_turbo")
    (live,) = (name for name, node in workflow.items() if node["class_type"] == "FuseStreamLiveVideo")
    (save,) = (name for name, node in workflow.items() if node["class_type"] == "SaveVideo")
    shown = {"class_type": "SaveImage", "inputs": {"images": [live, 0], "filename_prefix": "live"}}
    run, made = picture(stocked, {**workflow, "shown": shown})
    assert {*run.executed, *run.cached} == {*workflow, "shown"} and len(run.outputs["shown"]["images"]) == FRAMES
    with av.open(io.BytesIO(Client(stocked.url).fetch(run.outputs[save]["images"][0]))) as video:
        shapes = {(frame.height, frame.width) for frame in video.decode(video=0)}
        assert shapes == {(SIDE, SIDE)} and video.streams.video[0].frames == FRAMES
    _, stocks = picture(stocked, by_stocks_nodes(workflow))
    assert made.std() > 5 and np.abs(made - stocks).mean() < 0.5 and np.abs(made - stocks).max() <= 8


def by_stocks_nodes(workflow: Workflow) -> Workflow:
    """The first frame of the clip through VAE Encode, a sampler and VAE Decode."""
    out = copy.deepcopy(workflow)
    (live,) = (name for name, node in out.items() if node["class_type"] == "FuseStreamLiveVideo")
    (save,) = (name for name, node in out.items() if node["class_type"] == "SaveVideo")
    told = out[live]["inputs"]
    scaled = {"upscale_method": "area", "width": SIDE, "height": SIDE, "crop": "center"}
    sampled = {name: told[name] for name in ("model", "positive", "negative", "cfg")}
    more: Workflow = {
        "frames": {"class_type": "GetVideoComponents", "inputs": {"video": told["video"]}},
        "first": {"class_type": "ImageFromBatch", "inputs": {"image": ["frames", 0], "batch_index": 0, "length": 1}},
        "scaled": {"class_type": "ImageScale", "inputs": {"image": ["first", 0], **scaled}},
        "encoded": {"class_type": "VAEEncode", "inputs": {"pixels": ["scaled", 0], "vae": told["vae"]}},
        "euler": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": told["sampler"]}},
        "sigmas": {
            "class_type": "SDTurboScheduler",
            "inputs": {"model": told["model"], "steps": told["steps"], "denoise": told["strength"]},
        },
        "sampled": {
            "class_type": "SamplerCustom",
            "inputs": {
                **sampled,
                "add_noise": True,
                "noise_seed": told["seed"],
                "sampler": ["euler", 0],
                "sigmas": ["sigmas", 0],
                "latent_image": ["encoded", 0],
            },
        },
        "decoded": {"class_type": "VAEDecode", "inputs": {"samples": ["sampled", 0], "vae": told["vae"]}},
        "saved": {"class_type": "SaveImage", "inputs": {"images": ["decoded", 0], "filename_prefix": "stock"}},
    }
    del out[live], out[save]
    return {**out, **more}
