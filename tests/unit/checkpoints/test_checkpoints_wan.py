"""Stock ComfyUI recognises, loads and samples every Wan checkpoint in every storage format, with nothing left over."""

from __future__ import annotations

import logging
from typing import Any

import comfy.model_management
import comfy.sd
import pytest
import torch
from scenes import Scene, Studio, distance, sample

from fusestream import checkpoints

CASES = [(kind, storage) for kind in checkpoints.wan.SIZES for storage in checkpoints.wan.STORAGES]

# The class in supported_models and the network that stock picks.
EXPECTED = {
    "wan_t2v": ("WAN21_T2V", "WanModel"),
    "wan_i2v": ("WAN21_I2V", "WanModel"),
    "wan_flf2v": ("WAN21_I2V", "WanModel"),
    "wan_vace": ("WAN21_Vace", "VaceWanModel"),
    "wan_fun_control": ("WAN21_FunControl2V", "WanModel"),
    "wan22_i2v": ("WAN21_T2V", "WanModel"),
    "wan22_fun_control": ("WAN21_T2V", "WanModel"),
    "wan22_5b": ("WAN22_T2V", "WanModel"),
}

# How far the latents after two steps may be from those of the fp32 file, relative to their size. On a CPU, where stock
# computes in fp32, the measured distances are at most 0.001, 0.008, 0 and 0.11.
TOLERANCE = {"fp16": 0.01, "bf16": 0.03, "fp32": 0.001}
FP8_TOLERANCE = 0.25


pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(scope="module")
def exact(studio: Studio, scenes: dict[str, Scene]) -> dict[str, torch.Tensor]:
    """What the fp32 file of each kind makes."""
    return {kind: sample(load(studio, kind, "fp32"), scene) for kind, scene in scenes.items()}


def load(studio: Studio, kind: str, storage: str) -> Any:
    return comfy.sd.load_diffusion_model(str(checkpoints.write(kind, studio.folder, storage)))


@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_loads_whole_and_samples(
    studio: Studio,
    scenes: dict[str, Scene],
    exact: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    storage: str,
) -> None:
    caplog.set_level(logging.INFO)
    model = load(studio, kind, storage)
    net = model.model.diffusion_model
    assert (type(model.model.model_config).__name__, type(net).__name__) == EXPECTED[kind]
    assert net.text_dim == checkpoints.umt5.WIDTH
    # "unet missing", "unet unexpected", "Missing weight for layer", "left over keys in diffusion model"
    assert [
        line for line in caplog.messages if any(w in line.lower() for w in ("missing", "unexpected", "left over"))
    ] == []
    assert checkpoints.KINDS[kind].table.keys() <= net.state_dict().keys()

    latents = sample(model, scenes[kind])
    assert latents.isfinite().all()
    assert 0.5 < latents.std() < 10
    assert distance(latents, exact[kind]) <= TOLERANCE.get(storage, FP8_TOLERANCE)


@pytest.mark.parametrize("kind", checkpoints.wan.SIZES)
def test_hears_the_prompt(studio: Studio, scenes: dict[str, Scene], exact: dict[str, torch.Tensor], kind: str) -> None:
    pictures = scenes[kind].positive[0][1]
    other = scenes[kind]._replace(positive=[[studio.cats[0][0], pictures]])
    assert distance(sample(load(studio, kind, "fp32"), other), exact[kind]) > 0.1


@pytest.mark.parametrize("kind", checkpoints.wan.SIZES)
@torch.inference_mode(False)
def test_every_tensor_and_every_input_matters(studio: Studio, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        comfy.model_management, "in_training", True
    )  # stock's switch for operations that have gradients
    size = checkpoints.wan.SIZES[kind]
    net = load(studio, kind, "fp32").model.diffusion_model.float().cpu().requires_grad_(True)
    source = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source).requires_grad_(True)

    inputs = {"x": noise(1, size.channels_in, 2, 8, 8), "context": noise(1, 20, size.text)}
    if size.image:
        inputs["clip_fea"] = noise(1, size.image_positions or 257, 1280)
    if size.reference_channels:
        inputs["reference_latent"] = noise(1, size.reference_channels, 8, 8)
    if size.vace_layers:
        inputs["vace_context"] = noise(1, 1, size.vace_channels, 2, 8, 8)
    inputs["timestep"] = torch.tensor([500.0], requires_grad=True)
    more = {"vace_strength": [1.0]} if size.vace_layers else {}
    net(**inputs, **more).square().mean().backward()

    gradients = {name: tensor.grad for name, tensor in (*net.named_parameters(), *inputs.items())}
    assert [name for name, grad in gradients.items() if grad is None or not grad.isfinite().all()] == []
    assert [name for name, grad in gradients.items() if grad.abs().max() < 1e-9] == []
