"""On a card of another maker, or without NVIDIA's driver, models load as in stock ComfyUI, and it is said once.

Torch's device `mps` is what stands for such a card here: stock loads models for it on any machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import pytest
import torch

from fusestream import checkpoints, fusion
from fusestream.fusion import report
from fusestream.fusion.base import other_cards
from fusestream.fusion.base.errors import NotStreamable
from fusestream.fusion.base.hooks import STREAM
from fusestream.fusion.base.policy import policy_on
from fusestream.gpu import NoDriver, cuda, nvidia
from fusestream.kernels_cuda import LEDGER, KernelPolicy, obstacle
from fusestream.memory import Checkpoint, DeviceBudget, Layer, Weight, open_pager

CARDS = ["mps", "xpu:0", "privateuseone:0", "cuda:0"]


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine without NVIDIA's library, whatever this one has."""
    monkeypatch.setattr(cuda, "library_names", lambda: ("a-library-that-nobody-has.so",))
    cuda.driver.cache_clear()
    yield
    cuda.driver.cache_clear()


@pytest.fixture
def on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_torch_device", "text_encoder_device", "vae_device"):
        monkeypatch.setattr(comfy.model_management, name, lambda: torch.device("mps"))
    monkeypatch.setattr(comfy.model_management, "mac_version", lambda: (15, 0))
    LEDGER.clear()


def said() -> list[str]:
    return [message for message in LEDGER.messages if other_cards.SERVED in message]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.usefixtures("on_mps")
def test_by_default_a_diffusion_model_is_loaded_as_stock_does(folder: Path) -> None:
    path = str(checkpoints.write("wan_t2v", folder))
    for _ in range(2):
        model = fusion.load_diffusion_model(path, vram_budget=-1.0)
    assert type(model) is type(comfy.sd.load_diffusion_model(path)) and not hasattr(model.model, STREAM)
    assert policy_on(model).default == "off"
    (sentence,) = said()
    assert sentence.startswith("mps is no NVIDIA card. ") and sentence.endswith("as it does without FuseStream.")
    found = report.gather(model)
    assert "mps is no NVIDIA card" in found.state and "Set vram_budget" not in found.state
    assert sentence in found.messages


@pytest.mark.usefixtures("on_mps", "small_ones_too")
def test_so_are_a_text_encoder_and_a_vae(folder: Path) -> None:
    path = str(checkpoints.write("umt5", folder))
    clip = fusion.load_text_encoder(path, [], vram_budget=-1.0)
    assert not hasattr(clip.patcher.model, STREAM) and len(said()) == 1
    vae = fusion.load_vae(str(checkpoints.write("wan_vae", folder)))
    assert type(vae.first_stage_model).__module__.startswith("comfy.")


@pytest.mark.usefixtures("on_mps")
@pytest.mark.parametrize("kind", ["wan_t2v", "umt5"])
def test_a_budget_insists_and_gets_the_remedy(folder: Path, kind: str) -> None:
    path = str(checkpoints.write(kind, folder))
    load = fusion.load_diffusion_model if kind == "wan_t2v" else lambda *a, **k: fusion.load_text_encoder(*a, [], **k)
    with pytest.raises(NotStreamable, match=r"^mps is no NVIDIA card\. .* Set vram_budget to -1 or 0: "):
        load(path, vram_budget=4.0)
    assert load(path, vram_budget=0.0) is not None and not said()


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("card", CARDS)
def test_every_such_card_falls_back(card: str) -> None:
    LEDGER.clear()
    device = torch.device(card)
    for _ in range(3):
        assert other_cards.must_fall_back(device, -1.0, "a.safetensors")
    assert len(said()) == 1
    assert not other_cards.must_fall_back(device, 0.0, "a.safetensors")
    with pytest.raises(NotStreamable, match="Set vram_budget to -1 or 0"):
        other_cards.must_fall_back(device, 1.0, "a.safetensors")
    for budget in (-1.0, 1.0):
        with pytest.raises(
            NotStreamable, match=r"^a\.GGUF: .*ComfyUI reads no GGUF files.* as a \.safetensors file\.$"
        ):
            other_cards.must_fall_back(device, budget, "a.GGUF")
    assert other_cards.policy_for(device, KernelPolicy.of("auto", precision="fast")) == KernelPolicy("off", (), "fast")
    assert other_cards.policy_for(device, KernelPolicy.of("on")).default == "on"


def test_amds_cards_are_called_cuda_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    device = torch.device("cuda", 0)
    assert nvidia.no_nvidia(device) == obstacle(device) == "cuda:0 is an AMD card"


def test_the_cpu_is_none_of_them() -> None:
    cpu = torch.device("cpu")
    assert other_cards.lacks(cpu) is None and not other_cards.must_fall_back(cpu, -1.0, "a.gguf")
    assert other_cards.policy_for(cpu, KernelPolicy()) == KernelPolicy()


def test_a_pager_says_so_too(folder: Path) -> None:
    with Checkpoint.open(str(checkpoints.write("wan_t2v", folder))) as source:
        name, extent = next(iter(source.extents.items()))
        with pytest.raises(NoDriver, match="mps is no NVIDIA card: weights stream to NVIDIA cards, and to the CPU"):
            open_pager(source, [Layer(name, (Weight(name, extent),))], DeviceBudget(1 << 30), 1 << 30, "mps")
