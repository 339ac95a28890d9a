"""Compares our steps with stock's samplers, and runs stock's samplers if they differ.

Live video does not go through stock's KSampler for each frame: it makes the few steps itself, the
last together with the blend. So before a run both make a small latent out of another, with a model
that needs no network, and guidance is watched for the options that it looks up. If stock samples
otherwise, each frame goes through its sampler, and is blended afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import comfy.model_sampling
import comfy.samplers
import torch
from torch import Tensor

from ..base.specimen import PLAIN
from ..compatibility.aside import step_aside
from ..compatibility.recorded_options import RecordedOptions

CLOSE = 1e-4
SEED = 3
Run = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class _Sampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS):
    """Sampling of Stable Diffusion's models."""


class _Flow(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
    """Sampling of flow models."""


class _Toy:
    """A stand-in for a guider around a model, as far as samplers use it."""

    def __init__(self, sampling: Any) -> None:
        self.model_sampling = sampling
        self.process_latent_in = self.process_latent_out = lambda latent: latent
        self.inner_model = self
        self.cfg = 1.0
        self.conds: dict[str, Any] = {}
        self.model_options: dict[str, Any] = {}
        self.model_patcher = SimpleNamespace(get_model_object=lambda _name: sampling, model=self)

    def __call__(self, x: Tensor, sigma: Tensor, **_others: Any) -> Tensor:
        return 0.7 * torch.tanh(x) + 0.01 * sigma.view(-1, *[1] * (x.ndim - 1))


def by_sampler(
    name: str, guider: Any, sigmas: Tensor, options: dict[str, Any], seed: int, noise: Tensor, start: Tensor
) -> Tensor:
    """A latent [1, c, ...] through stock's sampler of this name, within a sampling that has
    begun."""
    extra = {"model_options": options, "seed": seed}
    made: Tensor = comfy.samplers.ksampler(name).sample(
        guider, sigmas, extra, None, noise.clone(), start.clone(), None, True
    )
    return made


def is_as_known(name: str, own: Run, hooks: Collection[str]) -> bool:
    """Whether stock's sampler of this name makes what our steps make, and guides as they do. Warns
    if not.

    own    our steps, from (guider, sigmas, noise, start)
    hooks  names in a model's options whose functions make us leave guidance to stock
    """
    found = difference(name, own) or _guides_otherwise(hooks)
    if found is not None:
        step_aside("Live video's own steps", found, "Each frame goes through ComfyUI's sampler")
    return found is None


def difference(name: str, own: Run) -> str | None:
    generator = torch.Generator().manual_seed(7)
    start, noise = (torch.randn(1, 4, 6, 5, generator=generator, **PLAIN) for _ in range(2))
    for sampling in (_Sampling(), _Flow()):
        first = float(sampling.sigma_max) * 0.6
        sigmas = torch.tensor([first, first * 0.5, first * 0.2, 0.0])
        try:
            stocks = by_sampler(name, _Toy(sampling), sigmas, {}, SEED, noise, start)
            ours = own(_Toy(sampling), sigmas, noise, start)
        except Exception as error:  # any error, because live video goes on with stock's sampler
            return f"its sampler {name} is asked otherwise: {error}"
        distance = float((ours - stocks).norm() / stocks.norm())
        if not distance <= CLOSE:
            return f"its sampler {name} makes another latent, by {distance:.1%}"
    return None


def _guides_otherwise(hooks: Collection[str]) -> str | None:
    cond, uncond, x = (torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(i), **PLAIN) for i in range(3))
    asked: set[str] = set()
    options = RecordedOptions(asked, set(), sampler_calc_cond_batch_function=lambda _given: [cond, uncond])
    toy = _Toy(_Sampling())
    try:
        guided = comfy.samplers.sampling_function(toy, x, torch.ones(1), ["-"], ["+"], 3.0, model_options=options)
    except Exception as error:
        return f"its guidance is asked otherwise: {error}"
    if not torch.allclose(guided, uncond + 3.0 * (cond - uncond), atol=CLOSE):
        return "its guidance is another sum of both predictions"
    unknown = sorted(asked - {*hooks, "disable_cfg1_optimization"})
    return f"its guidance looks for {', '.join(unknown)} in a model's options" if unknown else None
