"""A tiny Wan sampled on the GPU with our attention, beside stock's, against stock in fp32. Needs a ComfyUI."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fusestream import checkpoints
from fusestream.kernels_cuda import LEDGER, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

STEPS = 6
LATENT = (1, 16, 5, 30, 52)  # 17 frames of 416 x 240: 1950 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wan")


def sample(model: Any) -> torch.Tensor:
    """Latents after some Euler steps, guidance 3, from seed 1."""
    import comfy.sample

    generator = torch.Generator().manual_seed(2)
    words = [[[torch.randn(1, 77, checkpoints.wan.SIZES["wan_t2v"].text, generator=generator), {}]] for _ in range(2)]
    latent = torch.zeros(LATENT)
    noise = comfy.sample.prepare_noise(latent, 1)
    run = (STEPS, 3.0, "euler", "simple", *words, latent)
    out: torch.Tensor = comfy.sample.sample(model, noise, *run, disable_pbar=True, seed=1)
    return out


def stock(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    import comfy.sd

    path = str(checkpoints.write("wan_t2v", folder, "fp32"))
    return sample(comfy.sd.load_diffusion_model(path, model_options={"dtype": dtype}))


def ours(folder: Path, policy: KernelPolicy) -> torch.Tensor:
    import comfy.sd

    from fusestream.fusion.fused import attention

    path = str(checkpoints.write("wan_t2v", folder, "fp32"))
    model = comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float16})
    attention.install(model, policy)
    return sample(model)


@torch.inference_mode()
def test_the_latent_is_as_near_to_fp32_as_stocks(folder, isa):
    exact = stock(folder, torch.float32).double().flatten()

    def nearness(latent: torch.Tensor) -> float:
        return float(torch.cosine_similarity(latent.double().flatten(), exact, dim=0))

    theirs = nearness(stock(folder, torch.float16))
    assert 0.9 < theirs < 1
    for precision in ("precise", "fast"):
        LEDGER.clear()
        near = nearness(ours(folder, KernelPolicy.of("on", isa=isa, precision=precision)))
        print(f"{isa or 'native'} {precision}: cosine to fp32 1 - {1 - near:.3g}, stock fp16 1 - {1 - theirs:.3g}")
        assert {choice.winner for choice in LEDGER.choices} == {"cuda"}
        # One is for wider heads, the other for so much work that compiling it pays.
        assert {refusal.candidate for refusal in LEDGER.refusals} <= {"products in stripes", "torch cudnn"}
        assert near >= theirs - 1e-4, f"{precision}: {near} against stock's {theirs}"


@torch.inference_mode()
def test_two_models_have_their_own_policies(folder):
    """Opposite toggles in one process: `off` is stock to the bit, `on` is not, whichever came first."""
    off, on = KernelPolicy.of("off"), KernelPolicy.of("on")
    want = stock(folder, torch.float16)
    first, second, third = ours(folder, off), ours(folder, on), ours(folder, off)
    assert torch.equal(first, want) and torch.equal(third, want) and not torch.equal(second, want)
