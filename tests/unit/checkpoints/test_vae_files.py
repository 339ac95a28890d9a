"""Stock ComfyUI loads every VAE's file in every storage format, with nothing missing and nothing
left over, and turns pictures and videos into latents and back.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import comfy.ldm.minimax.vae
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.sd
import comfy.utils
import pytest
import torch
from scenes import distance

from fusestream import checkpoints
from fusestream.checkpoints import narrow

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")

FRAMES, SIDE, PICTURE = 9, 32, 64
# The latents of a video of FRAMES frames, or of a picture.
LATENTS = {
    "wan_vae": (1, 16, 3, SIDE // 8, SIDE // 8),
    "wan22_vae": (1, 48, 3, SIDE // 16, SIDE // 16),
    "sd_vae": (1, 4, PICTURE // 8, PICTURE // 8),
    "flux_vae": (1, 16, PICTURE // 8, PICTURE // 8),
    "flux2_vae": (1, 128, PICTURE // 16, PICTURE // 16),
    "minimax_video_vae": (1, 24, 7, SIDE // 16, SIDE // 16),
}
CAUSAL = ("wan_vae", "wan22_vae")
VIDEO = (*CAUSAL, "minimax_video_vae")
LENGTHS = {"minimax_video_vae": 22}  # 5 frames, and each 17 more
CLASSES = {
    "wan_vae": comfy.ldm.wan.vae.WanVAE,
    "wan22_vae": comfy.ldm.wan.vae2_2.WanVAE,
    "minimax_video_vae": comfy.ldm.minimax.vae.MiniMaxH3VideoVAE,
}
SECOND = 32000  # samples
# Distances from the fp32 file's latents and pixels, relative to their size.
TOLERANCE = {"fp32": 0.001, "fp16": 0.01, "bf16": 0.03, "fp8_e4m3fn": 0.25}


def given(kind: str) -> torch.Tensor:
    """A picture [1, 64, 64, 3], or moving gradients [frames, SIDE, SIDE, 3], in [0, 1]."""
    if kind not in VIDEO:
        return torch.rand(1, PICTURE, PICTURE, 3, generator=torch.Generator().manual_seed(0))
    y, x = torch.linspace(0, 1, SIDE)[:, None], torch.linspace(0, 1, SIDE)
    frame = torch.stack([x + 0 * y, y + 0 * x, x * y], -1)
    return torch.stack([frame + index / 9 for index in range(LENGTHS.get(kind, FRAMES))]).remainder(1.0)


def load(kind: str, folder: Path, storage: str) -> Any:
    path = checkpoints.write(kind, folder, storage)
    state_dict, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    fixed = kind == "wan22_vae"
    with narrow.wan22_widths(comfy.ldm.wan.vae2_2, path) if fixed else nullcontext():
        return comfy.sd.VAE(sd=state_dict, metadata=metadata)


@pytest.mark.every_other
@pytest.mark.parametrize("kind", LATENTS)
def test_loads_whole_and_goes_there_and_back(
    families_folder: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.DEBUG)
    made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    pixels = given(kind)
    for storage in ("fp32", *(it for it in checkpoints.KINDS[kind].storages if it != "fp32")):
        vae = load(kind, families_folder, storage)
        # "Missing VAE keys" is a warning, "Leftover VAE keys" only a debug line.
        assert [line for line in caplog.messages if "VAE keys" in line] == []
        if kind in VIDEO:
            assert isinstance(vae.first_stage_model, CLASSES[kind])
        latents = vae.encode(pixels)
        made[storage] = latents, vae.decode(latents)
        assert latents.shape == LATENTS[kind]
        assert made[storage][1].shape == ((1, *pixels.shape) if kind in VIDEO else pixels.shape)
        for one, other in zip(made[storage], made["fp32"], strict=True):
            assert one.isfinite().all()
            assert distance(one, other) <= TOLERANCE[storage]
    latents, picture = made["fp32"]
    assert 0.3 < latents.std() < 3
    assert picture.std() > 0.05
    assert ((picture <= 0) | (picture >= 1)).float().mean() < (0.02 if kind in VIDEO else 0.2)


@pytest.mark.every_other
def test_sounds_load_whole_and_go_there_and_back(families_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two ears, each by itself."""
    caplog.set_level(logging.DEBUG)
    sound = torch.sin(torch.arange(SECOND)[None, :, None] / torch.tensor([11.0, 23.0]))  # [1, samples, 2]
    made: dict[str, torch.Tensor] = {}
    for storage in ("fp32", *(it for it in checkpoints.KINDS["minimax_audio_vae"].storages if it != "fp32")):
        vae = load("minimax_audio_vae", families_folder, storage)
        assert [line for line in caplog.messages if "VAE keys" in line] == []
        latents = vae.encode(sound)
        assert latents.shape == (1, 32, 2, 40)
        made[storage] = vae.decode(latents)
        assert made[storage].shape == sound.shape and made[storage].isfinite().all()
        assert distance(made[storage], made["fp32"]) <= TOLERANCE[storage]
    assert 0.3 < latents.std() < 3 and 0.02 < made["fp32"].std() < 0.9
    changed = latents.clone()
    changed[:, :, 0] += 1.0
    moved = (vae.decode(changed) - made[storage]).abs().mean((0, 1))
    assert moved[0] > 0.002 and moved[1] < 1e-6


def test_the_vaes_of_a_whole_ltx_load_and_compute(families_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Videos there and back; sounds from latents, two ears at 48000 samples a second."""
    caplog.set_level(logging.DEBUG)
    path = checkpoints.write("ltx23_checkpoint", families_folder, "bf16")
    tensors, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    video, audio = (
        comfy.sd.VAE(
            sd=comfy.utils.state_dict_prefix_replace(dict(tensors), prefixes, filter_keys=True), metadata=metadata
        )
        for prefixes in ({"vae.": ""}, {"audio_vae.": "autoencoder.", "vocoder.": "vocoder."})
    )
    assert [line for line in caplog.messages if "VAE keys" in line] == []
    pixels = torch.rand(FRAMES, PICTURE, PICTURE, 3, generator=torch.Generator().manual_seed(0))
    latents = video.encode(pixels)
    frames = video.decode(latents)
    assert latents.shape == (1, 128, 2, 2, 2) and 0.3 < latents.std() < 3
    assert frames.shape == (1, *pixels.shape) and frames.std() > 0.02
    sound = audio.decode(torch.randn(1, 8, 5, 16, generator=torch.Generator().manual_seed(0)))
    assert sound.shape == (1, 17 * 480, 2) and 0.01 < sound.std() < 0.9  # of 5 latents 17 bands, 10 ms each


@pytest.mark.parametrize("kind", CAUSAL)
def test_pixels_follow_the_latents_in_place_and_time(families_folder: Path, kind: str) -> None:
    vae = load(kind, families_folder, "fp32")
    latents = vae.encode(given(kind))
    changed = latents.clone()
    changed[:, :, -1] += 1.0
    moved = (vae.decode(changed) - vae.decode(latents)).abs().mean((0, 2, 3, 4))
    assert (moved[-4:] > 0.002).all()  # the frames of the last latent
    assert (moved[:-4] < 1e-6).all()  # and no earlier one: causal


@pytest.mark.parametrize("kind", CAUSAL)  # MiniMax's computes in place
@torch.inference_mode(False)
def test_every_weight_matters(families_folder: Path, kind: str) -> None:
    net = load(kind, families_folder, "fp32").first_stage_model.float().cpu().requires_grad_(True)
    latents = net.encode(given(kind).movedim(-1, 0)[None] * 2 - 1)
    (latents.square().mean() + net.decode(latents).square().mean()).backward()
    weights = {name: parameter for name, parameter in net.named_parameters() if not name.endswith("bias")}
    assert [name for name, weight in weights.items() if weight.grad is None or weight.grad.abs().max() < 1e-9] == []


def test_stock_alone_wants_the_full_wan22_width(families_folder: Path) -> None:
    state_dict = comfy.utils.load_torch_file(str(checkpoints.write("wan22_vae", families_folder, "fp16")))
    with pytest.raises(RuntimeError, match=r"size mismatch for encoder\.conv1\.weight"):
        comfy.sd.VAE(sd=state_dict)
