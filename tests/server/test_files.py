"""Files that cannot be right are refused before the queue, and a file that changed is loaded again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from bed import tiny
from bed.client import Client, Rejected, Workflow
from bed.outcome import BUDGET, latents_only, made, name_of
from bed.server import Server
from fusestream import checkpoints

MODEL, TEXT, VAE = tiny.LOADERS


def refused(server: Server, client: Client, workflow: Workflow) -> tuple[str, str]:
    """The class of the one node that refuses its inputs, and what it says; nothing was queued."""
    with pytest.raises(Rejected) as caught:
        client.run(workflow)
    (node,) = caught.value.body["node_errors"].values()
    (error,) = node["errors"]
    queue: Any = server.get("/queue")
    assert not queue["queue_running"] and not queue["queue_pending"]
    return node["class_type"], error["details"]


def write_page(path: Path, _source: Path) -> None:
    path.write_text("<html>404 Not Found</html>")


def cut(path: Path, source: Path) -> None:
    path.write_bytes(source.read_bytes()[:-1000])


def copied(path: Path, source: Path) -> None:
    shutil.copy(source, path)


def write_gguf(path: Path, _source: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(60))


BAD: list[tuple[str, str, Callable[[Path, Path], Any], str]] = [
    (MODEL, MODEL, write_page, "is a web page, not a model"),
    (MODEL, MODEL, write_gguf, "is a GGUF file"),
    (TEXT, TEXT, cut, "is cut short"),
    (VAE, VAE, cut, "is cut short"),
    (MODEL, VAE, copied, "is a Wan VAE: move it to models/vae, and choose it in the FuseStream VAE Loader"),
    (TEXT, MODEL, copied, "choose it in the FuseStream Diffusion Model Loader"),
    (VAE, TEXT, copied, "choose it in the FuseStream Text Encoder Loader"),
]


@pytest.mark.parametrize(("loader", "source", "make", "message"), BAD)
def test_a_bad_file_is_refused_before_the_queue(
    server: Server,
    client: Client,
    workflow: Workflow,
    files: list[Path],
    loader: str,
    source: str,
    make: Callable[[Path, Path], Any],
    message: str,
) -> None:
    of = dict(zip(tiny.LOADERS, files, strict=True))
    bad = of[loader].with_name(f"bad_{loader}_{source}_{getattr(make, '__name__', '')}.safetensors")
    make(bad, of[source])
    server.get("/object_info")  # as the browser's R key: the server lists its folders again
    widget = tiny.LOADERS[loader][0]
    tiny.node_of(workflow, loader)["inputs"][widget] = bad.name
    class_type, details = refused(server, client, workflow)
    bad.unlink()
    assert class_type == loader and details.startswith(f"{widget} - ")
    assert bad.name in details and message in details


def test_a_file_that_is_mended_is_looked_at_again(
    server: Server, client: Client, workflow: Workflow, files: list[Path]
) -> None:
    model = files[0].with_name("mended.safetensors")
    cut(model, files[0])
    server.get("/object_info")
    workflow = latents_only(workflow)
    tiny.node_of(workflow, MODEL)["inputs"]["model_name"] = model.name
    assert "is cut short" in refused(server, client, workflow)[1]
    shutil.copy(files[0], model)
    assert client.run(workflow).error is None
    model.unlink()


def test_a_name_that_another_node_gives_is_not_looked_at_before(
    client: Client, workflow: Workflow, files: list[Path]
) -> None:
    workflow = latents_only(workflow)
    either = {"switch": True, "on_false": "absent.safetensors", "on_true": files[0].name}
    workflow["name"] = {"class_type": "ComfySwitchNode", "inputs": either}
    tiny.node_of(workflow, MODEL)["inputs"]["model_name"] = ["name", 0]
    tiny.node_of(workflow, "KSampler")["inputs"]["seed"] = 61
    run = client.run(workflow)
    assert run.error is None and name_of(workflow, MODEL) in {*run.executed, *run.cached}


def test_such_a_file_is_named_when_it_is_loaded_and_the_server_goes_on(
    server: Server, client: Client, workflow: Workflow, files: list[Path]
) -> None:
    bad = files[2].with_name("cut.safetensors")
    cut(bad, files[2])
    workflow["name"] = {
        "class_type": "ComfySwitchNode",
        "inputs": {"switch": True, "on_false": "", "on_true": bad.name},
    }
    vae = tiny.node_of(workflow, VAE)["inputs"]
    before, vae["vae_name"] = vae["vae_name"], ["name", 0]
    run = client.run(workflow)
    bad.unlink()
    assert run.error is not None and run.error["node_type"] == VAE
    assert "cut.safetensors: is cut short" in run.error["exception_message"]
    vae["vae_name"] = before
    assert client.run(workflow).error is None


# -------------------------------------------------------------------------------------------------------- the wrong VAE


@pytest.fixture(scope="module")
def other_vae(server: Server, files: list[Path]) -> Iterator[str]:
    """Wan 2.2's VAE."""
    path = checkpoints.write("wan22_vae", files[2].parent)
    server.get("/object_info")
    yield path.name
    path.unlink()


@pytest.mark.parametrize("stock", [False, True])
def test_the_wrong_vae_is_refused_before_sampling(
    server: Server, client: Client, workflow: Workflow, files: list[Path], other_vae: str, stock: bool
) -> None:
    """Also right after a run with the right one, whose model is in ComfyUI's cache. It is said at the VAE's loader, if that is
    ours, else at the model's."""
    assert client.run(workflow).error is None
    vae = tiny.node_of(workflow, VAE)
    vae["inputs"]["vae_name"] = other_vae
    if stock:
        vae.update(class_type="VAELoader", inputs={"vae_name": other_vae})
    class_type, details = refused(server, client, workflow)
    assert class_type == (MODEL if stock else VAE)
    assert files[0].name in details and other_vae in details and "Choose wan_2.1_vae.safetensors" in details


def test_the_wrong_vae_of_another_model_is_told_apart(
    server: Server, client: Client, workflow: Workflow, files: list[Path], other_vae: str
) -> None:
    """5B with Wan 2.1's VAE."""
    path = checkpoints.write("wan22_5b", files[0].parent)
    server.get("/object_info")
    tiny.node_of(workflow, MODEL)["inputs"]["model_name"] = path.name
    class_type, details = refused(server, client, workflow)
    assert class_type == VAE and path.name in details and files[2].name in details
    assert "Choose wan2.2_vae.safetensors" in details
    path.unlink()


def test_a_vae_that_is_loaded_for_something_else_is_fine(client: Client, workflow: Workflow, other_vae: str) -> None:
    workflow["other"] = {"class_type": VAE, "inputs": {"vae_name": other_vae}}
    workflow["unused"] = {
        "class_type": "VAEDecode",
        "inputs": {"samples": [name_of(workflow, "KSampler"), 0], "vae": ["other", 0]},
    }
    assert client.run(workflow).error is None


# ------------------------------------------------------------------------------------------------- images that go nowhere


def test_an_image_for_a_model_of_text_is_told_to_the_page(
    server: Server, client: Client, workflow: Workflow, files: list[Path]
) -> None:
    Image.radial_gradient("L").convert("RGB").save(server.base / "input" / "grey.png")
    workflow["image"] = {"class_type": "LoadImage", "inputs": {"image": "grey.png"}}
    sampler = tiny.node_of(workflow, "KSampler")["inputs"]
    size = {"width": 64, "height": 64, "length": 9, "batch_size": 1}
    links = {"positive": sampler["positive"], "negative": sampler["negative"], "vae": [name_of(workflow, VAE), 0]}
    workflow["begin"] = {"class_type": "WanImageToVideo", "inputs": {**size, **links, "start_image": ["image", 0]}}
    sampler.update(positive=["begin", 0], negative=["begin", 1], latent_image=["begin", 2], seed=71)
    told: list[dict[str, Any]] = []
    run = client.run(
        latents_only(workflow), lambda kind, data: told.append(data) if kind == "fusestream.notice" else None
    )
    assert run.error is None
    (notice,) = told
    assert notice["sentence"].startswith(f"{files[0].name} does not use the image")


def test_a_lora_for_another_model_is_told_to_the_page_and_at_its_node(
    server: Server, client: Client, workflow: Workflow, files: list[Path]
) -> None:
    folder = files[0].parents[1] / "loras"
    folder.mkdir(exist_ok=True)
    layer = "lora_unet_double_blocks_0_img_attn_proj"  # Flux'
    save_file(
        {f"{layer}.lora_{way}.weight": torch.ones(4, 4) for way in ("up", "down")}, folder / "of_flux.safetensors"
    )
    server.get("/object_info")
    sampler = tiny.node_of(workflow, "KSampler")["inputs"]
    inputs = {"model": sampler["model"], "lora_name": "of_flux.safetensors", "strength_model": 1.0}
    workflow["lora"] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
    sampler.update(model=["lora", 0], seed=72)
    told: list[dict[str, Any]] = []
    said: list[tuple[str, str]] = []
    run = client.run(
        latents_only(workflow),
        lambda kind, data: told.append(data) if kind == "fusestream.notice" else None,
        progress_text=lambda node, words: said.append((node, words)),
    )
    assert run.error is None
    [notice] = told
    assert notice["node"] == "lora"
    assert f"none of its 1 layer is in this model (the first is {layer})" in notice["sentence"]
    assert ("lora", "LoRA: 0 of 1 layer fit") in said


# ------------------------------------------------------------------------------------------------- a file that changed


@pytest.mark.deep("FuseStreamTextEncoderLoader", "FuseStreamVAELoader")
@pytest.mark.parametrize("loader", tiny.LOADERS)
def test_a_touched_file_is_loaded_again_and_an_untouched_one_is_not(
    client: Client, workflow: Workflow, files: list[Path], loader: str
) -> None:
    of = dict(zip(tiny.LOADERS, files, strict=True))
    for streamed in (MODEL, TEXT):
        tiny.node_of(workflow, streamed)["inputs"]["vram_budget"] = BUDGET if streamed == MODEL else -1
    sampler = tiny.node_of(workflow, "KSampler")["inputs"]
    sampler["seed"] = 81
    assert client.run(workflow).error is None
    sampler["seed"] = 82
    run = client.run(workflow)
    assert run.error is None and not {name_of(workflow, one) for one in tiny.LOADERS} & set(run.executed)

    now = of[loader].stat().st_mtime
    os.utime(of[loader], (now + 10, now + 10))
    sampler["seed"] = 83
    run = client.run(workflow)
    assert run.error is None and not run.interrupted
    assert {name_of(workflow, one) for one in tiny.LOADERS} & set(run.executed) == {name_of(workflow, loader)}


@pytest.mark.deep
def test_a_touched_model_makes_what_it_made(client: Client, workflow: Workflow, files: list[Path]) -> None:
    """Streamed, to the last bit; and another file in its place makes something else."""
    streamed = latents_only(workflow)
    mine = files[0].with_name("mine.safetensors")
    shutil.copy(files[0], mine)
    tiny.node_of(streamed, MODEL)["inputs"].update(vram_budget=BUDGET, model_name=mine.name)
    tiny.node_of(streamed, "KSampler")["inputs"]["seed"] = 91

    client.run(workflow)  # lists the folders again
    first = made(client, streamed)
    os.utime(mine)
    assert torch.equal(made(client, streamed), first)
    other = checkpoints.write("wan_t2v", mine.parent, seed=9)
    other.replace(mine)
    assert not torch.equal(made(client, streamed), first)
    mine.unlink()
