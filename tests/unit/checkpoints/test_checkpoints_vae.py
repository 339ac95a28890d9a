"""Stock ComfyUI loads the tiny Wan VAEs and turns video into latents and back."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.sd
import comfy.utils
import pytest
import torch

from fusestream import checkpoints

KINDS = {"wan_vae": (comfy.ldm.wan.vae.WanVAE, 16, 8), "wan22_vae": (comfy.ldm.wan.vae2_2.WanVAE, 48, 16)}
CASES = [(kind, storage) for kind in KINDS for storage in checkpoints.wan_vae.STORAGES]
FRAMES = 9
SIDE = 32

# Distances from the fp32 file's latents and pixels, relative to their size.
TOLERANCE = {"fp16": 0.01, "bf16": 0.03, "fp32": 0.001, "fp8_e4m3fn": 0.25}


pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vae")


@pytest.fixture(scope="module")
def video() -> torch.Tensor:
    """Moving gradients [FRAMES, SIDE, SIDE, 3] in [0, 1]."""
    y, x = torch.linspace(0, 1, SIDE)[:, None], torch.linspace(0, 1, SIDE)
    frame = torch.stack([x + 0 * y, y + 0 * x, x * y], -1)
    return torch.stack([frame + index / 9 for index in range(FRAMES)]).remainder(1.0)


@pytest.fixture(scope="module")
def exact(folder: Path, video: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Latents and pixels of each kind's fp32 file."""
    return {kind: round_trip(load(kind, folder, "fp32"), video) for kind in KINDS}


def load(kind: str, folder: Path, storage: str) -> Any:
    path = checkpoints.write(kind, folder, storage)
    state_dict, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    fixed = kind == "wan22_vae"
    with checkpoints.wan_vae.wan22_widths(comfy.ldm.wan.vae2_2, path) if fixed else contextlib.nullcontext():
        return comfy.sd.VAE(sd=state_dict, metadata=metadata)


def round_trip(vae: Any, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    latents = vae.encode(video)
    return latents, vae.decode(latents)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_loads_whole_and_goes_there_and_back(
    folder: Path, video: torch.Tensor, exact: Any, caplog: pytest.LogCaptureFixture, kind: str, storage: str
) -> None:
    caplog.set_level(logging.DEBUG)
    vae = load(kind, folder, storage)
    net, channels, ratio = KINDS[kind]
    assert isinstance(vae.first_stage_model, net)
    # "Missing VAE keys" is a warning, "Leftover VAE keys" only a debug line.
    assert [line for line in caplog.messages if "VAE keys" in line] == []
    assert vae.get_sd().keys() == checkpoints.KINDS[kind].table.keys()
    caplog.set_level(logging.INFO)

    latents, pixels = round_trip(vae, video)
    assert latents.shape == (1, channels, 1 + (FRAMES - 1) // 4, SIDE // ratio, SIDE // ratio)
    assert pixels.shape == (1, *video.shape)
    assert latents.isfinite().all() and pixels.isfinite().all()
    assert 0.5 < latents.std() < 2
    assert pixels.std() > 0.05
    assert ((pixels <= 0) | (pixels >= 1)).float().mean() < 0.02
    for ours, theirs in zip((latents, pixels), exact[kind], strict=True):
        assert distance(ours, theirs) <= TOLERANCE[storage]


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_follow_the_latents_in_place_and_time(folder: Path, exact: Any, kind: str) -> None:
    vae = load(kind, folder, "fp32")
    latents, pixels = exact[kind]
    changed = latents.clone()
    changed[:, :, -1] += 1.0
    moved = (vae.decode(changed) - pixels).abs().mean((0, 2, 3, 4))
    assert (moved[-4:] > 0.002).all()  # the frames of the last latent
    assert (moved[:-4] < 1e-6).all()  # and no earlier one: causal


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode(False)
def test_every_weight_matters(folder: Path, video: torch.Tensor, kind: str) -> None:
    net = load(kind, folder, "fp32").first_stage_model.float().cpu().requires_grad_(True)
    pixels = video.clone().movedim(-1, 0)[None] * 2 - 1
    latents = net.encode(pixels)
    (latents.square().mean() + net.decode(latents).square().mean()).backward()
    weights = {name: parameter for name, parameter in net.named_parameters() if not name.endswith("bias")}
    assert [name for name, weight in weights.items() if weight.grad is None or weight.grad.abs().max() < 1e-9] == []


def test_stock_alone_wants_the_full_wan22_width(folder: Path) -> None:
    state_dict = comfy.utils.load_torch_file(str(checkpoints.write("wan22_vae", folder, "fp16")))
    with pytest.raises(RuntimeError, match=r"size mismatch for encoder\.conv1\.weight"):
        comfy.sd.VAE(sd=state_dict)
