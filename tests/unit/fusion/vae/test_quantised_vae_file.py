"""VAEs whose matrices a file has as integers: a MiniMax H3's decoder is made of such, on a ComfyUI whose VAEs know none."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import comfy.ldm.minimax.vae as minimax
import comfy.ops
import comfy.sd
import comfy.utils
import int8_files
import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS
from torch import Tensor

from fusestream.fusion.base.errors import WrongFile
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
    int8_files.save(tensors, path)
    return str(path)


def files(halves: dict[str, Tensor], folder: Path, kind: str) -> tuple[str, str]:
    """With matrices of integers, and the same in halves."""
    stored, exact = int8_files.in_integers(halves, kind, lambda name, _: MATRIX.fullmatch(name) is not None)
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
    with pytest.raises(WrongFile, match=f"(?s)tomorrow.safetensors.*{re.escape(layer)}.*of tomorrow.*update"):
        load_vae(path)


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (b"no json", "is not sound JSON"),
        (b"\xff", "is not sound JSON"),
        (b"[" * 50_000, "is not sound JSON"),
        (b"[]", "is not sound JSON"),
        (b" " * 100_000, "is no note on a quantised layer"),
        (torch.zeros(8, dtype=torch.bfloat16), "is no note on a quantised layer"),
        (None, "and lacks it"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_broken_note_is_named(halves: dict[str, Tensor], tmp_path: Path, note: Any, words: str) -> None:
    of_integers, _ = files(halves, tmp_path, "rows")
    tensors = comfy.utils.load_torch_file(of_integers)
    layer = quantised_file.quantised_layers(tensors)[0]
    if note is None:
        del tensors[f"{layer}.weight"]
    else:
        note = torch.frombuffer(bytearray(note), dtype=torch.uint8) if isinstance(note, bytes) else note
        tensors = {**tensors, f"{layer}.comfy_quant": note}
    path = written(tmp_path / "broken.safetensors", tensors)
    with pytest.raises(WrongFile, match=f"(?s)broken.safetensors: .*{re.escape(layer)}.* {words}"):
        load_vae(path)


@pytest.mark.parametrize("kind", sorted({*QUANT_ALGOS} - {"convrot_w4a4"}))
def test_a_layer_computes_as_stocks_quantised_one(kind: str) -> None:
    """Scales of inputs, as AWQ has them, are in the weight then."""
    weight, x = torch.randn(32, 64).half(), torch.randn(5, 64).half()
    smoothing = {"pre_quant_scale": (1 + torch.rand(64)).half()} if kind == "nvfp4" else {}
    tensors = int8_files.in_format(weight, kind, "a.b", **smoothing)
    stocks: Any = comfy.ops.mixed_precision_ops({}, torch.float16, full_precision_mm=True).Linear(64, 32, bias=False)
    stocks.load_state_dict({name.removeprefix("a.b."): tensor for name, tensor in tensors.items()})
    found = quantised_file.in_halves(tensors)
    assert found.keys() == {"a.b.weight"}
    assert off(x.float() @ found["a.b.weight"].float().T, stocks(x).float()) < 0.01


def test_of_convolutions_fp8_alone_is_unpacked() -> None:
    weight = torch.randn(4, 4, 3, 3)
    note = torch.frombuffer(bytearray(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    file = {"c.weight": weight.to(torch.float8_e4m3fn), "c.weight_scale": torch.tensor(2.0), "c.comfy_quant": note}
    assert off(quantised_file.in_halves(file)["c.weight"].float(), 2 * weight) < 0.05
    of_int8 = torch.frombuffer(bytearray(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)
    with pytest.raises(WrongFile, match=r"c\.weight is int8_tensorwise in 4 dimensions"):
        quantised_file.in_halves({"c.weight": weight.to(torch.int8), "c.comfy_quant": of_int8})
