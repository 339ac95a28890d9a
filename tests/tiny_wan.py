"""A tiny Wan of stock's classes, loaded by stock or streamed, and samplings with it: for tests of nodes behind a loader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import comfy.sample
import comfy.sd
import torch

from fusestream import checkpoints
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model


def by_stock(folder: Path) -> Any:
    return comfy.sd.load_diffusion_model(str(checkpoints.write("wan_t2v", folder)))


def streamed(folder: Path) -> Any:
    """Through the smallest window."""
    model = load_streamed_diffusion_model(str(checkpoints.write("wan_t2v", folder)))
    model.stream.residency.ceiling = model.stream.residency.least
    return model


def prompts(**options: Any) -> tuple[Any, Any]:
    """A positive prompt with these options, and a negative one."""
    source = torch.Generator().manual_seed(0)
    words, others = (torch.randn(1, 20, checkpoints.T5_WIDTH, generator=source) for _ in range(2))
    return [[words, dict(options)]], [[others, {}]]


def sample(
    model: Any,
    latent: Sequence[int],
    steps: int,
    guidance: float = 3.0,
    sampler: str = "euler",
    given: tuple[Any, Any] | None = None,
    **how: Any,
) -> torch.Tensor:
    """Latents from seed 1. given: the prompts; how: stock's other arguments."""
    empty = torch.zeros(tuple(latent))
    noise = comfy.sample.prepare_noise(empty, 1)
    run = (sampler, "simple", *(given or prompts()), empty)
    made: torch.Tensor = comfy.sample.sample(model, noise, steps, guidance, *run, disable_pbar=True, seed=1, **how)
    return made
