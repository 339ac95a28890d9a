"""Stock ComfyUI's picture tower takes the tiny CLIP in both spellings and makes the states Wan I2V wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.clip_vision
import comfy.utils
import pytest
import torch

from fusestream import checkpoints

KINDS = ("clip_vision", "clip_vision_open_clip")
CASES = [(kind, storage) for kind in KINDS for storage in checkpoints.clip_vision.STORAGES]

# Distance from the fp32 file's states, relative to their size.
TOLERANCE = {"fp16": 0.01, "bf16": 0.03, "fp32": 0.001, "fp8_e4m3fn": 0.2}


pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clip_vision")


@pytest.fixture(scope="module")
def pictures() -> torch.Tensor:
    """[2, 96, 128, 3] in [0, 1]."""
    torch.manual_seed(0)
    return torch.rand(2, 96, 128, 3)


@pytest.fixture(scope="module")
def exact(folder: Path, pictures: torch.Tensor) -> Any:
    return load(checkpoints.write("clip_vision", folder, "fp32")).encode_image(pictures)


def load(path: Path) -> Any:
    """As stock's `load` does it, but for the choice of the configuration."""
    state_dict = comfy.utils.load_torch_file(str(path))
    if "visual.proj" in state_dict:
        state_dict = comfy.clip_vision.convert_to_transformers(state_dict, "visual.")
    model = comfy.clip_vision.ClipVisionModel(checkpoints.clip_vision.model_config(path))
    missing, unexpected = model.load_sd(state_dict)
    assert (missing, unexpected) == ([], [])
    return model


@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_loads_whole_and_sees(folder: Path, pictures: torch.Tensor, exact: Any, kind: str, storage: str) -> None:
    model = load(checkpoints.write(kind, folder, storage))
    assert model.get_sd().keys() == checkpoints.KINDS["clip_vision"].table.keys()
    seen = model.encode_image(pictures)
    states = seen.penultimate_hidden_states
    assert states.shape == (2, 257, 1280)
    for name in ("penultimate_hidden_states", "image_embeds", "last_hidden_state"):
        ours, theirs = seen[name], exact[name]
        assert ours.isfinite().all() and ours.std() > 0.1
        assert (ours - theirs).norm() / theirs.norm() <= TOLERANCE[storage], name
    assert (states[0] - states[1]).norm() > 0.1 * states[0].norm()


def test_every_weight_matters(folder: Path, pictures: torch.Tensor, exact: Any) -> None:
    model = load(checkpoints.write("clip_vision", folder, "fp32"))
    keys = ("penultimate_hidden_states", "image_embeds")
    for name, parameter in model.model.named_parameters():
        if name.endswith("bias"):
            continue
        kept = parameter.clone()
        parameter.mul_(1.5)
        seen = model.encode_image(pictures)
        parameter.copy_(kept)
        moved = [(seen[key] - exact[key]).norm() / exact[key].norm() for key in keys]
        assert max(moved) > 0.01, name


@pytest.mark.parametrize("kind", KINDS)
def test_stock_alone_does_not_know_a_small_one(folder: Path, kind: str) -> None:
    assert comfy.clip_vision.load(str(checkpoints.write(kind, folder, "fp16"))) is None
