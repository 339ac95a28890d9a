"""Stock ComfyUI recognises, loads and samples every Wan checkpoint in every storage format, with nothing left over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import comfy.clip_vision
import comfy.ldm.wan.vae2_2
import comfy.model_management
import comfy.sample
import comfy.sd
import comfy.utils
import pytest
import torch
from comfy_extras import nodes_edit_model, nodes_wan

import checkpoints

SIDE = 64
FRAMES = 5
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


class Scene(NamedTuple):
    """What goes into the sampler beside the model."""

    positive: Any
    negative: Any
    latent: dict[str, torch.Tensor]


class Studio:
    """What makes a scene: prompts, VAEs and picture embeddings, all from tiny checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = checkpoints.write("umt5", folder)
        options = checkpoints.umt5.model_options(path)
        clip = comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.WAN, model_options=options)
        prompts = ("a red fox runs through the snow", "two cats fight on a stage", "static, blurred, ugly")
        self.fox, self.cats, self.bad = (clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in prompts)

        self.vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(checkpoints.write("wan_vae", folder))))
        path = checkpoints.write("wan22_vae", folder)
        with checkpoints.wan_vae.wan22_widths(comfy.ldm.wan.vae2_2, path):
            self.vae22 = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)))

        path = checkpoints.write("clip_vision", folder)
        vision = comfy.clip_vision.ClipVisionModel(checkpoints.clip_vision.model_config(path))
        vision.load_sd(comfy.utils.load_torch_file(str(path)))
        self.first, self.last, self.control = (torch.rand(count, SIDE, SIDE, 3) for count in (1, 1, FRAMES))
        self.seen_first, self.seen_last = vision.encode_image(self.first), vision.encode_image(self.last)

    def scene(self, kind: str) -> Scene:
        """The fox, in the hands of the node that a user would take for this kind of model."""
        size = (SIDE, SIDE, FRAMES, 1)
        if kind == "wan_t2v":
            return Scene(self.fox, self.bad, {"samples": torch.zeros(1, 16, 2, SIDE // 8, SIDE // 8)})
        if kind == "wan22_5b":
            latent = nodes_wan.Wan22ImageToVideoLatent.execute(self.vae22, *size, start_image=self.first).result[0]
            return Scene(self.fox, self.bad, latent)
        common = (self.fox, self.bad, self.vae, *size)
        start = {"start_image": self.first}
        seen = {"clip_vision_output": self.seen_first}
        control = {"control_video": self.control}
        if kind == "wan_i2v":
            return Scene(*nodes_wan.WanImageToVideo.execute(*common, **start, **seen).result)
        if kind == "wan22_i2v":
            return Scene(*nodes_wan.WanImageToVideo.execute(*common, **start).result)
        if kind == "wan_flf2v":
            both = {"clip_vision_start_image": self.seen_first, "clip_vision_end_image": self.seen_last}
            frames = nodes_wan.WanFirstLastFrameToVideo.execute(*common, **start, end_image=self.last, **both)
            return Scene(*frames.result)
        if kind == "wan_vace":
            return Scene(
                *nodes_wan.WanVaceToVideo.execute(*common, 1.0, **control, reference_image=self.last).result[:3]
            )
        if kind == "wan22_fun_control":
            return Scene(*nodes_wan.Wan22FunControlToVideo.execute(*common, **control, ref_image=self.last).result)
        assert kind == "wan_fun_control"
        scene = Scene(*nodes_wan.WanFunControlToVideo.execute(*common, **start, **seen, **control).result)
        reference = {"samples": self.vae.encode(self.last)}
        referred = [nodes_edit_model.ReferenceLatent.execute(side, reference).result[0] for side in scene[:2]]
        return Scene(*referred, scene.latent)


@pytest.fixture(scope="module", autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    """ComfyUI loads and runs in inference mode. A quantised model loaded outside of it cannot be moved inside of it."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    torch.manual_seed(0)
    return Studio(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def scenes(studio: Studio) -> dict[str, Scene]:
    return {kind: studio.scene(kind) for kind in checkpoints.wan.SIZES}


@pytest.fixture(scope="module")
def exact(studio: Studio, scenes: dict[str, Scene]) -> dict[str, torch.Tensor]:
    """What the fp32 file of each kind makes."""
    return {kind: sample(load(studio, kind, "fp32"), scene) for kind, scene in scenes.items()}


def load(studio: Studio, kind: str, storage: str) -> Any:
    return comfy.sd.load_diffusion_model(str(checkpoints.write(kind, studio.folder, storage)))


def sample(model: Any, scene: Scene) -> torch.Tensor:
    """Latents after two Euler steps, guidance 3, from seed 1."""
    latent = scene.latent["samples"]
    run = ("euler", "simple", scene.positive, scene.negative, latent)
    mask = scene.latent.get("noise_mask")
    noise = comfy.sample.prepare_noise(latent, 1)
    return comfy.sample.sample(model, noise, 2, 3.0, *run, noise_mask=mask, disable_pbar=True, seed=1)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


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
