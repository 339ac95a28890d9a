"""How many channels latents have, by headers: what stock says once it has loaded the files."""

from __future__ import annotations

import contextlib
from pathlib import Path

import comfy.ldm.wan.vae2_2
import comfy.sd
import comfy.utils
import pytest
import torch
from safetensors.torch import save_file

from fusestream import checkpoints
from fusestream.fusion.identify import latents
from fusestream.fusion.identify.checkpoint_info import CheckpointInfo
from fusestream.memory import Checkpoint

OTHERS = ("minimax_video_vae", "minimax_audio_vae")  # no family names them, so nobody asks
VAES = [kind for kind, entry in checkpoints.KINDS.items() if entry.folder == "vae" and kind not in OTHERS]

pytestmark = pytest.mark.usefixtures("small_ones_too")


def write(kind: str, folder: Path) -> Path:
    return checkpoints.write(kind, folder, next(iter(checkpoints.KINDS[kind].storages)))


@pytest.mark.parametrize("kind", [*checkpoints.wan.SIZES, "flux1", "flux2", "z_image", "sd3"])
def test_of_a_model_as_stock_has_it(tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path)
    with Checkpoint.open(path) as source:
        found = latents.of_model(CheckpointInfo.of(source))
    stock = comfy.sd.load_diffusion_model(str(path)).model.latent_format
    assert found == (stock.latent_channels, stock.latent_dimensions)


def test_of_a_whole_checkpoints_model(tmp_path: Path) -> None:
    tensors = comfy.utils.load_torch_file(str(write("wan22_5b", tmp_path)))
    whole = tmp_path / "whole.safetensors"
    save_file({f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}, whole)
    with Checkpoint.open(whole) as source:
        assert latents.of_model(CheckpointInfo.of(source)) == (48, 3)


@pytest.mark.parametrize("kind", VAES)
def test_of_a_vae_as_stock_has_it(tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path)
    with Checkpoint.open(path) as source:
        found = latents.of_vae(CheckpointInfo.of(source))
    fixed = checkpoints.narrow.wan22_widths(comfy.ldm.wan.vae2_2, path) if kind == "wan22_vae" else None
    with fixed or contextlib.nullcontext():
        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)))
    assert found == (vae.latent_channels, vae.latent_dim)


def test_what_does_not_tell_is_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"decoder.conv_in.weight": torch.zeros(8, 32, 3, 3, 3), "what.weight": torch.ones(2)}, path)
    with Checkpoint.open(path) as source:
        info = CheckpointInfo.of(source)
        assert latents.of_model(info) is None and latents.of_vae(info) is None


@pytest.mark.parametrize(
    ("model", "vae", "right"),
    [
        ("wan_t2v", "wan_vae", None),
        ("wan_i2v", "wan_vae", None),
        ("wan22_5b", "wan22_vae", None),
        ("wan_t2v", "wan22_vae", "wan_2.1_vae.safetensors"),
        ("wan22_i2v", "wan22_vae", "wan_2.1_vae.safetensors"),
        ("wan22_5b", "wan_vae", "wan2.2_vae.safetensors"),
        ("wan_t2v", "sd_vae", "wan_2.1_vae.safetensors"),
        ("flux1", "wan22_vae", "ae.safetensors"),
        ("flux2", "flux_vae", "flux2-vae.safetensors"),
        ("flux2", "wan_vae", "flux2-vae.safetensors"),
        ("flux2", "flux2_vae", None),
        ("z_image", "flux_vae", None),
        ("z_image", "flux2_vae", "ae.safetensors"),
        ("z_image", "wan_vae", "ae.safetensors"),  # of as many channels
        ("wan_t2v", "flux_vae", "wan_2.1_vae.safetensors"),
        ("chroma", "flux_vae", None),
        ("sd3", "wan22_vae", None),  # of a model that nobody knows nothing is said
        ("wan_t2v", "umt5", None),
    ],
)
def test_a_mismatch_names_both_and_the_right_one(tmp_path: Path, model: str, vae: str, right: str | None) -> None:
    paths = [write(kind, tmp_path) for kind in (model, vae)]
    found = latents.mismatch(*(str(path) for path in paths))
    if right is None:
        assert found is None
    else:
        assert found is not None and all(path.name in found for path in paths) and f"Choose {right}" in found


def test_files_without_a_header_are_not_compared(tmp_path: Path) -> None:
    model, vae = tmp_path / "model.safetensors", tmp_path / "vae.pth"
    assert latents.mismatch(str(model), str(vae)) is None
