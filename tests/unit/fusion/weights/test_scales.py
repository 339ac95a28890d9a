"""Scales of quantised weights: those of groups stream with the numbers that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.sd
import int8_files
import pytest
import torch
from scenes import Scene, Studio, sample
from torch import Tensor, nn

from fusestream import checkpoints
from fusestream.fusion import KernelPolicy
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.weights.scales import as_parameter
from fusestream.fusion.weights.storage import is_quantised, stored

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")
SCALE = ".weight_scale"
# Fields of ComfyUI's parameters whose numbers are those of groups.
OF_GROUPS = {"nvfp4": "block_scale", "mxfp8": "scale"}


@pytest.fixture(params=OF_GROUPS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def file(studio: Studio, kind: str, *, in_bytes: bool = False) -> Path:
    """A Wan whose matrices are of this format. in_bytes: as older files have scales, by their bytes."""
    path = int8_files.blocks_in_format(checkpoints.write("wan_t2v", studio.folder, "fp16"), studio.folder, kind)
    if not in_bytes:
        return path
    tensors, metadata = int8_files.read(path)
    of_groups = [name for name, tensor in tensors.items() if name.endswith(SCALE) and tensor.ndim == 2]
    assert of_groups
    tensors |= {name: tensors[name].view(torch.uint8) for name in of_groups}
    older = path.with_stem(f"{path.stem} bytes")
    int8_files.save(tensors, older, metadata)
    return older


def load(path: Path) -> Any:
    return load_streamed_diffusion_model(str(path), None, KernelPolicy.of("off"))


def quantised(model: Any) -> list[Any]:
    return [weight for weight in model.model.diffusion_model.parameters() if is_quantised(weight)]


@pytest.mark.parametrize("in_bytes", [False, True])
def test_scales_of_groups_are_paged_with_their_weights(
    studio: Studio, scenes: dict[str, Scene], kind: str, in_bytes: bool
) -> None:
    path = file(studio, kind, in_bytes=in_bytes)
    stock = sample(comfy.sd.load_diffusion_model(str(path)), scenes["wan_t2v"])
    model = load(path)
    assert torch.equal(sample(model, scenes["wan_t2v"]), stock)
    held = quantised(model)
    of_groups = [getattr(weight._params, OF_GROUPS[kind]) for weight in held]
    assert of_groups and all(scale.is_meta for scale in of_groups), "they would stay beside the model, in no budget"
    paged = sum(weight.nbytes for layer in model.stream.layers for weight in layer.weights)
    assert paged >= sum(stored(weight).nbytes for weight in held) + sum(scale.nbytes for scale in of_groups)


def test_a_model_in_the_smallest_window_computes_the_same(studio: Studio, scenes: dict[str, Scene], kind: str) -> None:
    path = file(studio, kind)
    model = load(path)
    model.stream.residency.ceiling = model.stream.residency.least
    assert torch.equal(sample(model, scenes["wan_t2v"]), sample(load(path), scenes["wan_t2v"]))


def test_one_weight_is_read_with_its_scales(studio: Studio, kind: str) -> None:
    """For saving and merging."""
    path = file(studio, kind)
    key = "diffusion_model.blocks.0.ffn.0.weight"
    theirs: Any = comfy.sd.load_diffusion_model(str(path)).get_model_object(key)
    model = load(path)
    ours: Any = model.stream.in_file.weight(key)
    assert is_quantised(ours) and torch.equal(ours.dequantize(), theirs.dequantize())


def test_scales_of_rows_stay(studio: Studio, scenes: dict[str, Scene]) -> None:
    """They are small, and a copy more for each weight costs longer than they need."""
    of_int8, _ = int8_files.write(checkpoints.write("wan_t2v", studio.folder, "fp16"), studio.folder, "convrot")
    model = load(of_int8)
    sample(model, scenes["wan_t2v"])
    names = {weight.name for layer in model.stream.layers for weight in layer.weights}
    assert not any(name.endswith("scale") for name in names)
    assert not any(weight._params.scale.is_meta for weight in quantised(model))


def test_a_parameter_shares_its_scales() -> None:
    """torch would copy them with each parameter, so with each place that a weight comes to."""
    weight: Any = int8_files.quantised(torch.randn(32, 64).half(), int8_files.KINDS["convrot_w4a4"])
    scale: Tensor = weight._params.scale
    made: Any = as_parameter(weight)
    assert isinstance(made, nn.Parameter) and not made.requires_grad
    assert made._params.scale.data_ptr() == scale.data_ptr()
    assert nn.Linear(64, 32, bias=False).register_parameter("weight", made) is None
