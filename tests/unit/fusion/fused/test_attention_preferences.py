"""Files and LoRAs that ask for an attention, layer by layer, as newer ComfyUIs let them: loaded, kept, merged and saved."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import comfy.ldm.wan.model
import comfy.utils
import pytest
import torch
from comfy_extras import nodes_model_merging
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_models import saved
from scenes import Scene, Studio, sample
from torch import nn

from fusestream import checkpoints, fusion
from fusestream.fusion.fused.block import Parts
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

KIND = "wan_t2v"
INT8 = [{"attention": "comfy_kitchen_sol", "tau": 0.5}, {"attention": "comfy_kitchen_int8"}]
OTHER = {"attention": "comfy_kitchen_int8"}
ENDING = ".comfy_attention.config"


class ComfyAttention(nn.Module):
    """What stock's newer module of this name is to whoever loads, patches and saves."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = None
        self.function: Any = None

    def with_config(self, config: Any) -> ComfyAttention:
        """As a LoRA asks for it: in the place of this one."""
        other = type(self)()
        other.config = config
        return other

    def _load_from_state_dict(self, tensors: Any, prefix: str, *others: Any) -> None:
        text = tensors.pop(f"{prefix}config", None)
        self.config = None if text is None else json.loads(text.numpy().tobytes())
        super()._load_from_state_dict(tensors, prefix, *others)

    def _save_to_state_dict(self, tensors: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(tensors, prefix, keep_vars)
        if self.config is not None:
            tensors[f"{prefix}config"] = text_of(self.config)


def text_of(config: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's attention has such a module."""
    begin = comfy.ldm.wan.model.WanSelfAttention.__init__

    def with_preference(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.comfy_attention = ComfyAttention()

    monkeypatch.setattr(comfy.ldm.wan.model.WanSelfAttention, "__init__", with_preference)


@pytest.fixture
def file(studio: Studio, tmp_path: Path) -> Path:
    """One that asks for it in every block but the first."""
    source, path = checkpoints.write(KIND, studio.folder, "fp16"), tmp_path / "asks.safetensors"
    tensors = load_file(source)
    layers = checkpoints.wan.SIZES[KIND].layers
    tensors |= {f"blocks.{i}.self_attn{ENDING}": text_of(INT8) for i in range(1, layers)}
    with safe_open(source, "pt") as opened:
        save_file(tensors, path, opened.metadata())
    return path


def streamed(path: Path) -> Any:
    model = load_streamed_diffusion_model(str(path), policy=fusion.KernelPolicy.of("off"))
    model.stream.residency.ceiling = model.stream.residency.least
    return model


def settings(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a saved file asks for, by the number of the block."""
    names = {name: name.split("blocks.")[1].split(".")[0] for name in tensors if name.endswith(ENDING)}
    return {number: json.loads(tensors[name].numpy().tobytes()) for name, number in names.items()}


@pytest.mark.deep
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_a_comfyui_without_it_leaves_it_out(
    file: Path, studio: Studio, scenes: dict[str, Scene], caplog: pytest.LogCaptureFixture, budget: float
) -> None:
    """Nobody is told that the file may be damaged. Streamed, and all in memory."""
    caplog.set_level(logging.WARNING)
    model = fusion.load_diffusion_model(str(file), vram_budget=budget)
    assert not [line for line in caplog.messages if "no place" in line]
    plain = fusion.load_diffusion_model(str(checkpoints.write(KIND, studio.folder, "fp16")), vram_budget=budget)
    assert torch.equal(sample(model, scenes[KIND]), sample(plain, scenes[KIND]))


def test_what_a_file_asks_for_is_kept_and_saved(newer: None, file: Path, output: Path) -> None:
    model = streamed(file)
    blocks = model.model.diffusion_model.blocks
    assert [block.self_attn.comfy_attention.config for block in blocks] == [None, INT8, INT8, INT8]
    found = saved(model, output, "again")
    assert settings(found) == {"1": INT8, "2": INT8, "3": INT8}
    given = load_file(file)
    prefix = "model.diffusion_model."
    assert {name.removeprefix(prefix) for name in found} == given.keys()
    assert all(torch.equal(tensor, given[name.removeprefix(prefix)]) for name, tensor in found.items())


def test_what_a_lora_asks_for_is_saved(newer: None, file: Path, output: Path, scenes: dict[str, Scene]) -> None:
    """Which puts its own in the place of the layer's, and is taken away again."""
    model = streamed(file)
    asking = model.clone()
    for i in (0, 2):
        name = f"diffusion_model.blocks.{i}.self_attn.comfy_attention"
        asking.add_object_patch(name, model.get_model_object(name).with_config(OTHER))
    plain = sample(model, scenes[KIND])
    assert torch.equal(sample(asking, scenes[KIND]), plain)
    assert settings(saved(asking, output, "lora")) == {"0": OTHER, "1": INT8, "2": OTHER, "3": INT8}
    assert settings(saved(model, output, "without")) == {"1": INT8, "2": INT8, "3": INT8}


@pytest.mark.parametrize("storage", ["fp16", "fp8_scaled"])
def test_merged_then_saved(newer: None, file: Path, studio: Studio, output: Path, storage: str) -> None:
    """The weights are merged, and what the first model asks for stays."""
    second = checkpoints.write(KIND, studio.folder, storage, 1)
    asks = file.with_name("second.safetensors")
    with safe_open(second, "pt") as opened:
        save_file(
            load_file(second) | {f"blocks.{i}.self_attn{ENDING}": text_of(OTHER) for i in (0, 1)},
            asks,
            opened.metadata(),
        )  # both ask
    found = {}
    for name, other in (("plain", second), ("asks", asks)):
        merged = nodes_model_merging.ModelMergeSimple().merge(streamed(file), streamed(other), 0.4)[0]
        found[name] = saved(merged, output, name)
    assert settings(found["plain"]) == settings(found["asks"]) == {"1": INT8, "2": INT8, "3": INT8}
    assert found["plain"].keys() == found["asks"].keys()
    assert all(torch.equal(tensor, found["asks"][name]) for name, tensor in found["plain"].items())


def test_nothing_but_weights_is_there_to_be_merged(newer: None, file: Path) -> None:
    """As newer stock's own patcher has it: whoever merges does sums with all of it."""
    model = streamed(file)
    found = model.get_key_patches("diffusion_model.")
    assert {key for key in model.model_state_dict("diffusion_model.") if not key.endswith(ENDING)} == found.keys()
    assert all(isinstance(patches[0][0], torch.Tensor) for patches in found.values())


# ----------------------------------------------------------------------------------------------------------- fused blocks


def block() -> Any:
    attention = nn.ModuleDict({"q": nn.Linear(4, 4), "comfy_attention": ComfyAttention()})
    return nn.ModuleDict({"self_attn": attention, "ffn": nn.Linear(4, 4)})


def test_another_attention_leaves_a_block_ours() -> None:
    """As a LoRA with such settings does it, and takes it back."""
    net = block()
    parts, held = Parts(net), net.self_attn["comfy_attention"]
    for config in (OTHER, INT8):
        net.self_attn["comfy_attention"] = held.with_config(config)
        assert parts.replaced() is None and parts.replaced() is None
    net.self_attn["comfy_attention"] = held
    assert parts.replaced() is None
    other = copy.deepcopy(net)
    other.self_attn["q"] = nn.Linear(4, 4)
    assert Parts(net).replaced() is None


@pytest.mark.parametrize("name", ["q", "comfy_attention"])
def test_other_parts_are_seen_all_the_same(name: str) -> None:
    """Beside such a change, and one that computes in the place of what only holds settings."""
    net = block()
    parts = Parts(net)
    if name == "q":
        net.self_attn["comfy_attention"] = net.self_attn["comfy_attention"].with_config(OTHER)
        assert parts.replaced() is None
        net.self_attn["comfy_attention"] = net.self_attn["comfy_attention"].with_config(INT8)
    net.self_attn[name] = nn.Linear(4, 4)
    assert parts.replaced() is not None and parts.replaced() == parts.replaced()
    assert "another node has replaced" in str(parts.replaced())
