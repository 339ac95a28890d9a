"""A LoRA that fits a model of ours in part, or not at all, is told; one that fits is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.sd
import comfy.utils
import int8_files
import packed_files
import pytest
import torch

from fusestream import checkpoints, fusion
from fusestream.fusion.base import notices
from fusestream.fusion.load import lora_fit
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.kernels_cuda import KernelPolicy

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[str]]]:
    """The sentences, and the lines on a node."""
    heard: tuple[list[str], list[str]] = [], []
    monkeypatch.setattr(notices, "_listeners", [heard[0].append])
    monkeypatch.setattr(notices, "_writers", [heard[1].append])
    monkeypatch.setattr(notices, "_said", set())
    return heard


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Any]:
    return {
        kind: load_streamed_diffusion_model(str(checkpoints.write(kind, folder, "fp16")))
        for kind in ("wan_t2v", "wan_i2v")
    }


def file(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    read: dict[str, torch.Tensor] = comfy.utils.load_torch_file(str(checkpoints.write(kind, folder)))
    return read


def put(model: Any, lora: dict[str, torch.Tensor], clip: Any = None) -> Any:
    return comfy.sd.load_lora_for_models(model, clip, lora, 1.0, 1.0)


@pytest.mark.parametrize("kind", [kind for kind, base in checkpoints.LORA_BASES.items() if base.startswith("wan")])
def test_every_spelling_and_kind_that_fits_is_not_told(
    folder: Path, models: dict[str, Any], said: tuple[list[str], list[str]], kind: str
) -> None:
    put(models[checkpoints.LORA_BASES[kind]], file(folder, kind))
    assert said == ([], [])


@pytest.mark.parametrize("storage", ["Q8_0", "nvfp4", *int8_files.KINDS])
def test_it_fits_weights_that_are_packed(
    folder: Path, tmp_path: Path, said: tuple[list[str], list[str]], storage: str
) -> None:
    path = checkpoints.write("wan_t2v", folder, "fp16")
    if storage == "Q8_0":
        tensors, metadata = int8_files.read(path)
        packed = packed_files.packed_file(tmp_path / "wan.gguf", tensors, storage, metadata=metadata)
    elif storage == "nvfp4":
        packed = int8_files.blocks_in_format(path, tmp_path, storage)
    else:
        packed, _ = int8_files.write(path, tmp_path, storage)
    put(load_streamed_diffusion_model(str(packed)), file(folder, "lora_ab"))
    assert said == ([], [])


def test_a_part_of_its_layers(folder: Path, models: dict[str, Any], said: tuple[list[str], list[str]]) -> None:
    lora = {**file(folder, "lora_ab"), **file(folder, "lora_i2v")}
    layers = list(dict.fromkeys(name.partition(".lora_")[0] for name in lora if ".lora_" in name))
    weights = models["wan_t2v"].model.state_dict()
    unknown = [layer for layer in layers if f"{layer}.weight" not in weights]
    assert 0 < len(unknown) < len(layers)
    put(models["wan_t2v"], lora)
    [sentence], [line] = said
    assert sentence.startswith(f"{len(layers) - len(unknown)} of this LoRA's {len(layers)} layers fit this model. ")
    assert f"the first is {unknown[0]}." in sentence
    assert line == f"LoRA: {len(layers) - len(unknown)} of {len(layers)} layers fit"


def test_no_layer_of_it(folder: Path, models: dict[str, Any], said: tuple[list[str], list[str]]) -> None:
    flux = {f"lora_unet_double_blocks_0_img_attn_{part}.lora_{way}.weight": torch.ones(4, 4) for part in ("qkv", "proj")
            for way in ("up", "down")}  # fmt: skip
    put(models["wan_t2v"], flux)
    assert said == (
        [
            "This LoRA does nothing: none of its 2 layers is in this model (the first is lora_unet_double_blocks_0_img_attn_qkv). "
            "Choose one that was made for this model."
        ],
        ["LoRA: 0 of 2 layers fit"],
    )


def test_a_model_of_another_size(folder: Path, models: dict[str, Any], said: tuple[list[str], list[str]]) -> None:
    lora = file(folder, "lora_ab")
    wide = {name: torch.cat([tensor, tensor], 1 if "lora_A" in name else 0) for name, tensor in lora.items()}
    put(models["wan_t2v"], wide)
    [sentence], [line] = said
    assert "it is for a model of another size" in sentence and line.startswith("LoRA: 0 of ")
    weight = models["wan_t2v"].model.diffusion_model.blocks[0].self_attn.q.weight.shape
    assert f"{2 * weight[0]} x {2 * weight[1]} in the LoRA, {weight[0]} x {weight[1]} in the model" in sentence


def test_layers_of_text_encoders_count_where_there_is_one(
    folder: Path, models: dict[str, Any], said: tuple[list[str], list[str]]
) -> None:
    both = {**file(folder, "lora_ab"), **file(folder, "lora_text")}
    put(models["wan_t2v"], both)  # Load LoRA (Model): nobody asked for the rest
    assert said == ([], [])
    clip = fusion.load_text_encoder(
        str(checkpoints.write("umt5", folder, "fp16")), [], KernelPolicy(), -1.0, kind="wan"
    )
    put(models["wan_t2v"], both, clip)
    put(None, file(folder, "lora_text"), clip)
    assert said == ([], [])
    put(models["wan_t2v"], file(folder, "lora_text"))
    [sentence], [line] = said
    assert "it has no layers of what it is put on" in sentence and line == "LoRA: no layer fits"


def test_models_of_other_loaders_are_left_alone(folder: Path, said: tuple[list[str], list[str]]) -> None:
    stock = comfy.sd.load_diffusion_model(str(checkpoints.write("wan_t2v", folder, "fp16")))
    lora = {
        "lora_unet_nowhere.lora_up.weight": torch.ones(4, 4),
        "lora_unet_nowhere.lora_down.weight": torch.ones(4, 4),
    }
    put(stock, lora)
    assert said == ([], [])


def test_it_is_attached_once_and_a_changed_comfyui_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lora_fit.attach()
    ours = comfy.lora.load_lora, comfy.sd.load_lora_for_models
    lora_fit.attach()
    assert ours == (comfy.lora.load_lora, comfy.sd.load_lora_for_models)
    told: list[str] = []
    monkeypatch.setattr(lora_fit, "step_aside", lambda what, reason, instead: told.append(reason))
    monkeypatch.setattr(comfy.lora, "load_lora", lambda tensors, to_load: {})
    monkeypatch.setattr(comfy.sd, "load_lora_for_models", ours[1])
    lora_fit.attach()
    assert told == ["<lambda> takes other arguments"]
    assert comfy.sd.load_lora_for_models is ours[1]
