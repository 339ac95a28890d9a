"""Tiny Wan models on the card, streamed and stock's, and what they make of the same noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fusestream import checkpoints
from fusestream.kernels_cuda import KernelPolicy

OFF = KernelPolicy.of("off")


def sample(model: Any) -> torch.Tensor:
    """Two Euler steps with guidance from seed 1, for words of seed 0; models that take pictures see none."""
    import comfy.sample

    source = torch.Generator().manual_seed(0)
    words, others = ([[torch.randn(1, 20, checkpoints.T5_WIDTH, generator=source), {}]] for _ in range(2))
    latent = torch.zeros(1, model.model.latent_format.latent_channels, 2, 8, 8)
    run = ("euler", "simple", words, others, latent)
    noise = comfy.sample.prepare_noise(latent, 1)
    out: torch.Tensor = comfy.sample.sample(model, noise, 2, 3.0, *run, disable_pbar=True, seed=1)
    return out


def load(path: Path | str, policy: KernelPolicy = OFF, backend: str = "slots", **options: Any) -> Any:
    """Streamed through the smallest window."""
    from fusestream.fusion.load.diffusion import load_streamed_diffusion_model

    model = load_streamed_diffusion_model(str(path), policy=policy, **options)
    model.stream.residency.ceiling = model.stream.residency.least
    model.stream.residency.pager_options = {"backend": backend, "guard": True}
    return model


def stock(path: Path | str, **options: Any) -> Any:
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path), model_options=options)


def with_loras(model: Any, folder: Path, *loras: tuple[str, float]) -> Any:
    import comfy.sd
    import comfy.utils

    for kind, strength in loras:
        file = comfy.utils.load_torch_file(str(checkpoints.write(kind, folder)))
        model, _ = comfy.sd.load_lora_for_models(model, None, file, strength, 0.0)
    return model
