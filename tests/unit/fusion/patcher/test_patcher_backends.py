"""Streamed models over the backends for GPUs, on a device of plain memory that checks what a GPU would silently get wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.sample
import comfy.sd
import comfy.utils
import pytest
import torch
from plain_backends import BACKENDS, MIB, plain_backends

from fusestream import checkpoints
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backends")


@pytest.fixture
def load(folder: Path) -> Iterator[Callable[..., Any]]:
    with plain_backends() as backends:

        def loaded(backend: str, storage: str) -> tuple[Any, Any]:
            path = str(checkpoints.write("wan_t2v", folder, storage))
            model = load_streamed_diffusion_model(path)
            backends.become(model, backend)
            return model, comfy.sd.load_diffusion_model(path)

        loaded.device_of = backends.device_of  # type: ignore[attr-defined]
        yield loaded


def sample(model: Any, deed: Any = None) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    words = [[torch.randn(1, 20, checkpoints.T5_WIDTH, generator=source), {}]]
    latent = torch.zeros(1, 16, 2, 8, 8)
    run = ("euler", "simple", words, words, latent)
    noise = comfy.sample.prepare_noise(latent, 1)
    return comfy.sample.sample(model, noise, 2, 1.0, *run, disable_pbar=True, seed=1, callback=deed)


@pytest.mark.every_other
@pytest.mark.parametrize("storage", ["fp32", "fp16", "fp8_metadata"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_latents_are_stocks_with_loras_and_without(
    load: Callable[..., Any], folder: Path, backend: str, storage: str
) -> None:
    ours, stock = load(backend, storage)
    lora = comfy.utils.load_torch_file(str(checkpoints.write("lora_kohya", folder)))
    for strength in (0.0, 1.0, 0.5, 0.0):
        pair = (ours, stock)
        if strength:
            pair = tuple(comfy.sd.load_lora_for_models(model, None, lora, strength, 0.0)[0] for model in pair)
        assert torch.equal(*(sample(model) for model in pair)), strength
        assert bool(ours.stream.patching.factors.parcels.held_bytes) == bool(strength), (
            "the factors come with the blocks"
        )
    assert ours.stream.residency.pager.is_writable == (backend != "managed")
    assert 0 < ours.stream.residency.held <= ours.stream.residency.ledger.peak("VRAM") <= ours.stream.residency.ceiling


def test_a_model_that_takes_turns_with_others_stays_registered(load: Callable[..., Any], folder: Path) -> None:
    """As text encoder and diffusion model do on a card too small for both. Until its file changes, it is let go of, or it ends."""
    model, stock = load("registered", "fp16")
    want = sample(stock)
    assert torch.equal(sample(model), want)
    device, stream = load.device_of(model), model.stream  # type: ignore[attr-defined]
    count, held = device.registrations, stream.residency.ledger.held("registered RAM")
    for _ in range(3):
        mm.unload_all_models()
        assert stream.residency.pager is None and stream.residency.ledger.held("registered RAM") == held > 0
        assert torch.equal(sample(model), want)
        assert device.registrations == count
    stream.residency.give_ram_back()
    assert stream.residency.ledger.held("registered RAM") == held, "what a loaded model uses stays"
    mm.unload_all_models()
    stream.residency.give_ram_back()
    assert stream.residency.ledger.held("registered RAM") == 0 and not device.registered
    assert torch.equal(sample(model), want)
    mm.unload_all_models()
    os.utime(stream.path, ns=(1, 1))
    stream.residency.refresh()
    assert stream.residency.ledger.held("registered RAM") == 0 and not device.registered
    assert torch.equal(sample(model), want)
    stream.close()
    assert stream.residency.ledger.held("registered RAM") == 0 and not device.registered


@pytest.mark.every_other
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_in_parts_have_their_loras(load: Callable[..., Any], folder: Path, backend: str) -> None:
    ours, stock = load(backend, "fp32")
    ours.stream.residency.ceiling = ours.stream.residency.narrow
    lora = comfy.utils.load_torch_file(str(checkpoints.write("lora_kohya", folder)))
    for strength in (1.0, 0.0):
        pair = [comfy.sd.load_lora_for_models(model, None, lora, strength, 0.0)[0] for model in (ours, stock)]
        assert torch.equal(*(sample(model) for model in pair)), strength
    assert (
        ours.stream.residency.is_in_parts and ours.stream.residency.ledger.peak("VRAM") <= ours.stream.residency.narrow
    )


@pytest.mark.every_other
@pytest.mark.parametrize("backend", BACKENDS)
def test_interrupted_unloaded_and_run_again(load: Callable[..., Any], backend: str) -> None:
    ours, stock = load(backend, "fp32")
    wanted = sample(stock)
    with pytest.raises(mm.InterruptProcessingException):
        sample(ours, lambda *_: mm.interrupt_current_processing())
    assert torch.equal(sample(ours, lambda *_: mm.unload_all_models()), wanted)
    assert ours.stream.residency.held == 0
    assert torch.equal(sample(ours), wanted)


@pytest.mark.every_other
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_gives_back_and_takes_again(load: Callable[..., Any], backend: str) -> None:
    ours, stock = load(backend, "fp32")
    ours.stream.residency.ceiling = None
    wanted = sample(stock)
    assert torch.equal(sample(ours), wanted)
    resident = len(ours.stream.residency.pager.plan.resident)
    assert resident == 4
    assert ours.partially_unload(torch.device("cpu"), 3 * MIB) >= 3 * MIB
    assert len(ours.stream.residency.pager.plan.resident) < resident
    for i in range(4):  # with what is left
        with ours.stream.bound(i):
            assert not ours.model.diffusion_model.blocks[i].ffn[0].weight.is_meta
    assert torch.equal(sample(ours), wanted)


@pytest.mark.deep
def test_every_kind_of_lora_comes_with_the_blocks(load: Callable[..., Any], folder: Path) -> None:
    ours, stock = load("registered", "fp16")
    for kind in (kind for kind, base in checkpoints.LORA_BASES.items() if base == "wan_t2v"):
        lora = comfy.utils.load_torch_file(str(checkpoints.write(kind, folder)))
        pair = tuple(comfy.sd.load_lora_for_models(model, None, lora, 0.8, 0.0)[0] for model in (ours, stock))
        assert torch.equal(*(sample(model) for model in pair)), kind
