"""Streamed models on the card: stock's latents through every backend, ours as near to fp32 as stock's fp16, nothing left."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from gpu.models import OFF, load, sample, stock, with_loras
from gpu.support import error, until_chosen

from fusestream import checkpoints
from fusestream.kernels_cuda import LEDGER, KernelPolicy

pytestmark = [
    pytest.mark.usefixtures("as_comfyui_runs"),
    pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI"),
]

STORAGES = ("fp16", "bf16", "fp32", "fp8_e4m3fn", "fp8_scaled")
MIB = 2**20


@pytest.mark.parametrize("backend", ["slots", "managed"])
@pytest.mark.parametrize("kind", checkpoints.wan.SIZES)
def test_the_latents_are_stocks(folder, kind, backend):
    """With all kernels off: the same operations on the same numbers, no tolerance."""
    path = checkpoints.write(kind, folder)
    model = load(path, backend=backend)
    assert torch.equal(sample(model), sample(stock(path)))
    assert len(model.stream.pager.plan.streamed) > model.stream.pager.plan.slots, "otherwise nothing was streamed"
    assert model.stream.ledger.peak("VRAM") <= model.stream.least


@pytest.mark.parametrize("storage", STORAGES[1:])
def test_every_storage_is_stocks(folder, storage):
    """But for fp8 files: what they have in fp16 stock rounds to fp8, and we do not."""
    from as_stored import as_stored

    path = checkpoints.write("wan_t2v", folder, storage)
    latent, stocks = sample(load(path)), sample(stock(path))
    if storage == "fp8_e4m3fn":
        exact = sample(load(path, dtype=torch.float32))
        print(f"{storage}: error {error(latent, exact):.3g}, stock's {error(stocks, exact):.3g}")
        assert 2 * error(latent, exact) < error(stocks, exact)
        with as_stored():
            stocks = sample(stock(path))
    assert torch.equal(latent, stocks)


@pytest.mark.parametrize("kind", checkpoints.wan.SIZES)
def test_fused_latents_are_as_near_to_fp32_as_stocks(folder, kind, isa):
    path = checkpoints.write(kind, folder, "fp32")
    exact = sample(load(path, dtype=torch.float32))
    theirs = error(sample(load(path, dtype=torch.float16)), exact)
    for precision, allowed in (("precise", 1.1), ("fast", 1.5)):
        LEDGER.clear()
        policy = KernelPolicy.of("on", isa=isa, precision=precision)
        ours = error(sample(load(path, policy, dtype=torch.float16)), exact)
        print(f"{kind} {isa or 'native'} {precision}: error {ours:.3g}, stock's fp16 {theirs:.3g}")
        # A plan that an earlier case made is not chosen again: only what is chosen here is told.
        assert {choice.winner.split()[0] for choice in LEDGER.choices} <= {"cuda"}
        assert not [refusal for refusal in LEDGER.refusals if refusal.op == "wan block"]
        assert ours <= allowed * theirs


def test_a_lora_on_streamed_weights_is_stocks(folder):
    import comfy.sd
    import comfy.utils

    path = checkpoints.write("wan_t2v", folder)
    for kind in (name for name, base in checkpoints.LORA_BASES.items() if base == "wan_t2v"):
        file = comfy.utils.load_torch_file(str(checkpoints.write(kind, folder)))
        got, want = (
            sample(comfy.sd.load_lora_for_models(model, None, file, 0.8, 0.0)[0]) for model in (load(path), stock(path))
        )
        assert torch.equal(got, want), f"{kind}: {error(got, want):.3g}"


PLAIN = (("lora_ab", 0.8), ("lora_kohya", -0.5))


@pytest.mark.parametrize("window", ["least", "all"])
@pytest.mark.parametrize("backend", ["slots", "managed"])
def test_plain_lora_in_one_pass_is_as_near_to_fp32_as_stocks(folder, backend, window, monkeypatch):
    """Stacked, weighed anew, beside other kinds, and taken away; on weights that stream and on residents."""
    from fusestream.fusion.stream import lora

    added, passes = lora.added, []
    monkeypatch.setattr(lora, "added", lambda *a, **k: passes.append(1) or added(*a, **k))
    path = checkpoints.write("wan_t2v", folder, "fp32")
    ours, theirs, exact = (
        load(path, policy, backend, dtype=dtype)
        for policy, dtype in ((KernelPolicy(), torch.float16), (OFF, torch.float16), (OFF, torch.float32))
    )
    if window == "all":
        ours.stream.ceiling = None
    plain = until_chosen(lambda: sample(ours))
    errors = []
    for loras in (PLAIN, PLAIN[:1], (("lora_ab", 0.2), ("lora_dora", 0.7)), (*PLAIN, ("lora_diff", 1.0)), PLAIN):
        passes.clear()
        latent = sample(with_loras(ours, folder, *loras))
        assert bool(passes) == ("lora_dora" not in dict(loras)), "it is on every matrix, and no plain LoRA"
        assert ours.stream.patching.factors.parcels.held_bytes and ours.stream.ledger.peak("pinned RAM")
        stocks, wanted = (sample(with_loras(model, folder, *loras)) for model in (theirs, exact))
        errors.append((error(latent, wanted), error(stocks, wanted)))
        print(
            f"{backend} {window} {[kind for kind, _ in loras]}: error {errors[-1][0]:.3g}, stock's {errors[-1][1]:.3g}"
        )
        assert error(latent, plain) > 2 * errors[-1][0]
    got, of_stock = (sum(those) for those in zip(*errors, strict=True))  # one by one, stock's differs by a tenth itself
    assert got <= 1.1 * of_stock
    assert torch.equal(sample(ours), plain)


def test_lora_on_streamed_fp8_weights_is_nearer_to_fp32_than_stocks(folder):
    path = checkpoints.write("wan_t2v", folder, "fp8_e4m3fn")
    ours, theirs, exact = (
        load(path, policy, **options)
        for policy, options in ((KernelPolicy(), {}), (OFF, {}), (OFF, {"dtype": torch.float32}))
    )
    plain = sample(ours)
    for loras in (PLAIN, PLAIN[:1], (*PLAIN, ("lora_dora", 0.7))):
        latent = sample(with_loras(ours, folder, *loras))
        assert ours.stream.patching.factors.parcels.held_bytes
        stocks, wanted = (sample(with_loras(model, folder, *loras)) for model in (theirs, exact))
        got, of_stock = error(latent, wanted), error(stocks, wanted)
        print(f"fp8 {[kind for kind, _ in loras]}: error {got:.3g}, stock's {of_stock:.3g}")
        assert got <= 1.1 * of_stock
    assert torch.equal(sample(ours), plain)


def test_an_interrupted_run_leaves_a_model_that_works(folder):
    import comfy.model_management as mm

    model = load(checkpoints.write("wan_t2v", folder), KernelPolicy())
    want = sample(model)
    block = model.model.diffusion_model.blocks[1]
    calls = []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            mm.interrupt_current_processing()

    hook = block.register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(mm.InterruptProcessingException):
            sample(model)
    finally:
        hook.remove()
        mm.interrupt_current_processing(False)
    assert torch.equal(sample(model), want)


def test_a_step_without_enough_vram_runs_again_with_fewer_residents(folder, monkeypatch):
    """Memory runs out in the middle, with the reserve and without: the weights give back what they can, and the step is
    computed."""
    model = load(checkpoints.write("wan_t2v", folder), KernelPolicy())
    model.stream.ceiling = None
    want = sample(model)
    assert model.stream.held > model.stream.least
    head = model.model.diffusion_model.head
    forward, failed = head.forward, []

    def fails_twice(*args: Any, **kwargs: Any) -> Any:
        if len(failed) < 2:
            failed.append(1)
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return forward(*args, **kwargs)

    monkeypatch.setattr(head, "forward", fails_twice)
    assert torch.equal(sample(model), want)
    assert len(failed) == 2 and model.stream.held == model.stream.least


@pytest.mark.parametrize("backend", ["slots", "managed"])
@pytest.mark.parametrize("policy", [OFF, KernelPolicy()])
def test_blocks_in_parts_are_the_same_to_the_bit(folder, policy, backend):
    """Of models this small the card's steps of memory leave a part no less room than a block: they are told to stream in parts."""
    path = checkpoints.write("wan_t2v", folder)
    want = sample(with_loras(load(path, policy, backend), folder, ("lora_ab", 0.5)))
    model = load(path, policy, backend)
    stream = model.stream
    stream.grains = stream.grains[1:]
    stream._become(stream.grains[0])
    stream.ceiling = stream.least
    assert torch.equal(sample(with_loras(model, folder, ("lora_ab", 0.5))), want)
    assert len(stream.pager.plan.streamed) > stream.pager.plan.slots and stream.ledger.peak("VRAM") <= stream.least


def test_what_is_free_for_a_step_is_what_stock_counts():
    import comfy.model_management as mm

    from fusestream.fusion.stream import step

    card = torch.device("cuda", torch.cuda.current_device())
    kept = torch.zeros(64 * MIB, dtype=torch.uint8, device=card)
    del kept  # torch keeps it
    assert step._free(card) == pytest.approx(mm.get_free_memory(card), abs=16 * MIB)


def test_many_prompts_leave_nothing(folder):
    """Two models and a LoRA in turns: VRAM is flat after the third, and all of it is back in the end."""
    import comfy.model_management as mm
    import comfy.sd
    import comfy.utils

    file = comfy.utils.load_torch_file(str(checkpoints.write("lora_ab", folder)))
    models = [load(checkpoints.write(kind, folder), KernelPolicy()) for kind in ("wan_t2v", "wan22_i2v")]
    held = []
    for turn in range(10):
        model = models[turn % 2]
        if turn % 4 == 0:
            model, _ = comfy.sd.load_lora_for_models(model, None, file, 0.5, 0.0)
        sample(model)
        del model
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert max(held[4:]) - min(held[4:]) <= MIB, held
    mm.unload_all_models()
    models.clear()
    gc.collect()
    assert torch.cuda.memory_allocated() <= min(held) + MIB
