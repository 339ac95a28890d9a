"""VAEs whose matrices a file has as integers: a MiniMax H3's decoder is made of such, on a ComfyUI whose VAEs know none."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import comfy.ldm.minimax.vae as minimax
import comfy.sd
import comfy.utils
import int8_files
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fusestream.fusion.load.vae import load_vae
from fusestream.fusion.vae import quantised_file
from fusestream.kernels_cuda import LEDGER

MATRIX = re.compile(r"decoder\.transformer_blocks\.\d+\..*\.weight")
LATENT = (1, 24, 7, 2, 2)

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture(autouse=True)
def a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock makes it at one size."""
    LEDGER.clear()
    monkeypatch.setattr(minimax, "ViT3DDecoder", partial(minimax.ViT3DDecoder, num_layers=2, heads=4))
    monkeypatch.setattr(minimax, "MiniMaxH3VideoVAE", partial(minimax.MiniMaxH3VideoVAE, ch=32))


@pytest.fixture
def halves() -> dict[str, Tensor]:
    net = minimax.MiniMaxH3VideoVAE()
    generator = torch.Generator().manual_seed(0)

    def drawn(name: str, tensor: Tensor) -> Tensor:
        if name.startswith("latents_"):
            return tensor
        if re.search(r"scale\d$", name):  # what a block's half is multiplied by
            return torch.ones_like(tensor).half()
        return torch.randn(tensor.shape, generator=generator).mul_(0.05).half()

    return {name: drawn(name, tensor) for name, tensor in net.state_dict().items()}


def written(path: Path, tensors: dict[str, Tensor]) -> str:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return str(path)


def files(halves: dict[str, Tensor], folder: Path, kind: str) -> tuple[str, str]:
    """With matrices of integers, and the same in halves."""
    stored, exact = dict(halves), dict(halves)
    for name in filter(MATRIX.fullmatch, halves):
        if halves[name].ndim == 2:
            one = int8_files.quantised(halves[name], int8_files.KINDS[kind])
            stored |= int8_files.state_dict(one, name.removesuffix(".weight"))
            exact[name] = int8_files.numbers(one)
    assert len(quantised_file.quantised_layers(stored)) == 8
    return written(folder / "integers.safetensors", stored), written(folder / "halves.safetensors", exact)


def decoded(vae: Any) -> Tensor:
    found: Tensor = vae.decode(torch.randn(LATENT, generator=torch.Generator().manual_seed(1)))
    return found


def off(found: Tensor, wanted: Tensor) -> float:
    """The difference of frames, of what differs in them."""
    return float((found - wanted).norm() / (wanted - wanted.mean()).norm())


@pytest.mark.parametrize("kind", ["one scale", "rows", "convrot", "convrot_w4a4"])
def test_its_frames_are_those_of_its_numbers(kind: str, halves: dict[str, Tensor], tmp_path: Path) -> None:
    of_integers, of_halves = files(halves, tmp_path, kind)
    found, wanted = decoded(load_vae(of_integers)), decoded(load_vae(of_halves))
    assert off(found, wanted) < 0.01
    assert any("unpacked to FP16" in words for words in LEDGER.messages)


def test_stock_takes_codes_for_numbers(halves: dict[str, Tensor], tmp_path: Path) -> None:
    """The reason for all this. If a ComfyUI does better, its own way is taken, and this test says so."""
    of_integers, of_halves = files(halves, tmp_path, "rows")
    stocks = comfy.sd.VAE(sd=comfy.utils.load_torch_file(of_integers))
    assert not quantised_file.holds_quantised(stocks.first_stage_model)
    assert off(decoded(stocks), decoded(load_vae(of_halves))) > 0.25


def test_other_files_are_stocks_to_the_bit(halves: dict[str, Tensor], tmp_path: Path) -> None:
    path = written(tmp_path / "halves.safetensors", halves)
    assert torch.equal(decoded(load_vae(path)), decoded(comfy.sd.VAE(sd=comfy.utils.load_torch_file(path))))
    assert not any("unpacked" in words for words in LEDGER.messages)


def test_a_format_that_this_comfyui_does_not_know_is_named(halves: dict[str, Tensor], tmp_path: Path) -> None:
    of_integers, _ = files(halves, tmp_path, "rows")
    tensors = comfy.utils.load_torch_file(of_integers)
    layer = quantised_file.quantised_layers(tensors)[0]
    told = torch.frombuffer(bytearray(b'{"format": "of tomorrow"}'), dtype=torch.uint8)
    path = written(tmp_path / "tomorrow.safetensors", {**tensors, f"{layer}.comfy_quant": told})
    with pytest.raises(ValueError, match=f"(?s)tomorrow.safetensors.*{re.escape(layer)}.*of tomorrow.*update"):
        load_vae(path)
