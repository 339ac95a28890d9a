"""A VAE whose weights are held on the card, and are the file's again when they are given back.

The card is the CPU, where they are of another type.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy
import comfy.model_management
import comfy.sd
import comfy.utils
import pytest
import torch

from fusestream import checkpoints, fusion
from fusestream.checkpoints import narrow
from fusestream.fusion.base.hooks import HELD
from fusestream.fusion.families import family_of
from fusestream.fusion.identify.checkpoint_info import header_of
from fusestream.fusion.load import other_policy
from fusestream.fusion.vae import resident_patcher
from fusestream.fusion.vae.resident_patcher import HeldPatcher
from fusestream.kernels_cuda import KernelPolicy

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

KIND, WEIGHT = "flux2_vae", "decoder.conv_in.weight"  # which has buffers as well: a batch norm's
LATENT = (1, 128, 3, 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(KIND, tmp_path_factory.mktemp("held"), "fp32")


@pytest.fixture(scope="module", autouse=True)
def small_ones_too() -> Iterator[None]:
    with narrow.opened(comfy):
        yield


@pytest.fixture
def vae(path: Path) -> Iterator[Any]:
    """As it is on a card under dynamic VRAM: what the file gave, in fp32, in a VAE that computes in fp16."""
    weights = comfy.utils.load_torch_file(str(path))
    made = comfy.sd.VAE(sd=dict(weights), dtype=torch.float16)
    net = made.first_stage_model
    family = family_of(header_of(weights))
    assert family is not None and family.fuse(made, KernelPolicy())
    net.load_state_dict(
        net.state_dict() | {name: weights[name] for name in net.state_dict() if name in weights}, assign=True
    )
    made.patcher = resident_patcher.patcher_of(net, made.patcher.load_device, made.patcher.offload_device)
    yield made
    comfy.model_management.unload_all_models()


def tensors(net: Any) -> dict[str, torch.Tensor]:
    return dict([*net.named_parameters(), *net.named_buffers()])


def load(vae: Any) -> None:
    comfy.model_management.load_models_gpu([vae.patcher])


def is_half(net: Any) -> bool:
    return all(one.dtype in (torch.float16, torch.int64) for one in tensors(net).values())


def test_our_loader_has_it_and_off_is_stocks(path: Path) -> None:
    assert type(fusion.load_vae(str(path)).patcher) is HeldPatcher
    assert type(fusion.load_vae(str(path), policy=KernelPolicy.of("off")).patcher) is not HeldPatcher


def test_it_computes_as_stocks_patcher_has_it_and_is_loaded_once(vae: Any, path: Path) -> None:
    stocks = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)), dtype=torch.float16)
    z = torch.randn(LATENT)
    net, nbytes = vae.first_stage_model, vae.patcher.model_size()
    assert nbytes == sum(one.nbytes for one in tensors(stocks.first_stage_model).values())
    first = vae.decode(z)
    assert is_half(net) and vae.patcher.loaded_size() == nbytes
    there = tensors(net)
    assert torch.equal(vae.decode(z), first)
    assert all(one is there[name] for name, one in tensors(net).items()), "nothing was brought again"
    plain = stocks.first_stage_model  # stock's patcher, our kernels
    family_of(header_of(plain.state_dict())).fuse(stocks, KernelPolicy())
    assert torch.equal(stocks.decode(z), first)


def test_what_it_gives_back_is_the_files(vae: Any) -> None:
    net = vae.first_stage_model
    before = tensors(net)
    assert before[WEIGHT].dtype is torch.float32
    load(vae)
    here = [weakref.ref(one) for name, one in tensors(net).items() if one is not before[name]]
    assert len(here) > 100
    comfy.model_management.unload_all_models()
    assert all(one is before[name] for name, one in tensors(net).items())
    assert vae.patcher.loaded_size() == 0 and HELD not in net.__dict__
    assert not any(one() is not None for one in here), "nothing of it is left"
    load(vae)
    assert is_half(net)


def test_who_wants_room_gets_all_of_it(vae: Any) -> None:
    load(vae)
    assert vae.patcher.partially_unload(torch.device("cpu"), 100) == 0 and is_half(vae.first_stage_model)
    loaded = comfy.model_management.current_loaded_models[0]
    assert loaded.model is vae.patcher
    comfy.model_management.free_memory(1 << 60, loaded.device)  # other processes free RAM meanwhile, but not as much
    assert not comfy.model_management.current_loaded_models
    assert not is_half(vae.first_stage_model) and vae.patcher.loaded_size() == 0


def test_saving_has_all_digits_and_the_patches(vae: Any) -> None:
    net = vae.first_stage_model
    before = {name: one.clone() for name, one in net.state_dict().items()}
    load(vae)
    assert is_half(net)
    saved = vae.get_sd()
    assert all(torch.equal(saved[name], one) and saved[name].dtype is one.dtype for name, one in before.items())
    vae.patcher.add_patches({WEIGHT: ("diff", (torch.ones_like(before[WEIGHT]),))})
    load(vae)
    patched = tensors(net)[WEIGHT]
    assert torch.allclose(patched.float(), before[WEIGHT] + 1, atol=2e-3) and is_half(net)
    assert torch.equal(vae.get_sd()[WEIGHT], patched)
    vae.patcher.detach()
    assert all(torch.equal(one, before[name]) for name, one in net.state_dict().items())


def test_a_copy_under_another_policy_shares_what_is_there(vae: Any) -> None:
    load(vae)
    there = tensors(vae.first_stage_model)
    other = other_policy.vae_under(vae, KernelPolicy.of("off"))
    assert type(other.patcher) is HeldPatcher and other.patcher.model_size() == vae.patcher.model_size()
    load(other)
    assert all(one is there[name] for name, one in tensors(other.first_stage_model).items())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), KeyboardInterrupt()])
def test_one_that_is_not_loaded_to_the_end(vae: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Too little memory: all is given back. An interrupt: the next time goes on where it was."""
    net, put, count = vae.first_stage_model, resident_patcher._put, [0]
    before = tensors(net)

    def fails(*given: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] == 9:
            raise error
        return put(*given)

    monkeypatch.setattr(resident_patcher, "_put", fails)
    with pytest.raises(type(error)):
        load(vae)
    if isinstance(error, torch.OutOfMemoryError):
        assert all(one is before[name] for name, one in tensors(net).items())
    monkeypatch.undo()
    load(vae)
    assert is_half(net)
    vae.patcher.detach()
    assert all(one is before[name] for name, one in tensors(net).items())


def test_a_card_that_has_no_room_for_all_of_it(vae: Any) -> None:
    """Stock's way: some modules there, the others brought at each use."""
    z = torch.randn(LATENT)
    load(vae)
    whole = vae.first_stage_model.decode(z.half())
    vae.patcher.detach()
    vae.patcher.load(torch.device("cpu"), lowvram_model_memory=vae.patcher.model_size() // 2)
    net = vae.first_stage_model
    assert net.model_lowvram and HELD not in net.__dict__
    torch.testing.assert_close(net.decode(z.half()), whole, atol=2e-2, rtol=0)
    vae.patcher.detach()


def test_it_goes_with_its_vae(path: Path) -> None:
    gc.collect()
    made = fusion.load_vae(str(path))
    load(made)
    net = weakref.ref(made.first_stage_model)
    gc.disable()
    try:
        del made
        comfy.model_management.cleanup_models_gc()
        comfy.model_management.cleanup_models()
        assert net() is None
    finally:
        gc.enable()
