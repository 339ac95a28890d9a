"""Stock's *MultiGPU CFG Split* with a streamed model on two cards: stock's latents, each card's memory its own, nothing left."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.models import OFF, load, sample, stock, with_loras
from gpu.support import error

from fusestream import checkpoints
from fusestream.kernels_cuda import KernelPolicy

pytestmark = [
    pytest.mark.usefixtures("as_comfyui_runs"),
    pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

BACKENDS = ("slots", "managed")
MIB = 2**20
FLAT = 16  # MiB


@pytest.fixture(autouse=True)
def _the_first_card_stays_current() -> Iterator[None]:
    """What comes next in a graph is loaded to the current one."""
    yield
    assert torch.cuda.current_device() == 0


def split(model: Any) -> Any:
    import comfy.model_management
    from comfy_extras.nodes_multigpu import MultiGPUCFGSplitNode

    comfy.model_management.unload_all_models()
    gc.collect()
    out = MultiGPUCFGSplitNode.execute(model, 2).result[0]
    (other,) = out.get_additional_models_with_key("multigpu")
    assert other.load_device == torch.device("cuda", 1)
    return out


def streamed(path: Path | str, policy: KernelPolicy = OFF, backend: str = "slots", **options: Any) -> Any:
    """Through the smallest window, on both."""
    out = split(load(path, policy, backend, **options))
    (other,) = out.get_additional_models_with_key("multigpu")
    other.stream.residency.ceiling = other.stream.residency.least
    other.stream.residency.pager_options = out.stream.residency.pager_options
    return out


def streams(model: Any) -> list[Any]:
    return [model.stream, *(other.stream for other in model.get_additional_models_with_key("multigpu"))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_latents_are_those_of_stocks_two(folder: Path, backend: str) -> None:
    """With all kernels off: the same operations on the same numbers, no tolerance. With a LoRA on both, too."""
    path = checkpoints.write("wan_t2v", folder)
    ours = streamed(path, backend=backend)
    got = sample(ours)
    for number, stream in enumerate(streams(ours)):
        assert (
            stream.residency.device == torch.device("cuda", number)
            and stream.residency.ledger.peak("VRAM") <= stream.residency.ceiling
        )
        assert stream.residency.pager.plan.streamed, "otherwise nothing was"
    patched = sample(with_loras(ours, folder, ("lora_ab", 0.8)))
    theirs = split(stock(path))
    assert torch.equal(got, sample(theirs))
    assert torch.equal(patched, sample(with_loras(theirs, folder, ("lora_ab", 0.8)))) and not torch.equal(got, patched)


def test_fused_latents_are_as_near_to_fp32_as_stocks(folder: Path) -> None:
    path = checkpoints.write("wan_t2v", folder, "fp32")
    exact = sample(load(path, dtype=torch.float32))
    theirs = error(sample(load(path, dtype=torch.float16)), exact)
    ours = error(sample(streamed(path, KernelPolicy.of("on"), dtype=torch.float16)), exact)
    print(f"two cards: error {ours:.3g}, one of stock's in fp16 {theirs:.3g}")
    assert ours <= 1.1 * theirs


def test_an_interrupt_ends_both_and_nothing_is_left(folder: Path) -> None:
    import comfy.model_management as mm

    # Not `auto`: stock starts a thread for the second card at each sampling, which chooses for itself, and the few calls of a small
    # model are not enough; a library that is chosen late loads its code then: 18 MiB.
    model = streamed(checkpoints.write("wan_t2v", folder), KernelPolicy.of("on"))
    for _ in range(2):
        wanted = sample(model)
    held: list[list[float]] = []
    for turn in range(6):
        stream = streams(model)[turn % 2]
        stream.watcher = lambda _: mm.interrupt_current_processing(True)
        with pytest.raises(mm.InterruptProcessingException):
            sample(model)
        stream.watcher = None
        mm.interrupt_current_processing(False)
        assert all(not stream.residency.in_use and stream.together is None for stream in streams(model))
        assert error(sample(model), wanted) < 0.02
        torch.cuda.empty_cache()
        held.append([torch.cuda.mem_get_info(card)[0] / MIB for card in range(2)])
    assert max(before - after for before, after in zip(held[1], held[-1], strict=True)) <= FLAT, held
    mm.unload_all_models()
    assert all(not stream.residency.held for stream in streams(model))
