"""Settings of a run, and the sigmas that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import comfy.samplers
import torch

from ..base.errors import WrongInput

SamplerName = Literal["euler", "lcm"]
SAMPLERS: tuple[SamplerName, ...] = ("euler", "lcm")
SD_TURBO = "sd_turbo"  # stock's SDTurboScheduler, which is a node of its own
SCHEDULERS: tuple[str, ...] = (*comfy.samplers.SCHEDULER_NAMES, SD_TURBO)


@dataclass(frozen=True)
class Settings:
    """
    steps, cfg, strength  of each frame. strength: how much of it is made anew (KSampler's denoise)
    sampler, scheduler    names of stock's
    seed                  of the noise, which is the same for all frames, so that still parts stay
                          as they are
    blend                 the largest share of the frame before in a frame, 0 to 1
    tolerance             difference of two incoming frames, 0 to 1, from which nothing is blended
    batch                 frames that pass through the network together
    skip                  a frame that differs less than this, on average, from the last one made
                          repeats that one; 0: none is skipped
    width, height         size that frames are scaled to, the excess cut off; 0: as they come
    """

    steps: int = 1
    cfg: float = 1.0
    strength: float = 0.5
    sampler: SamplerName = "euler"
    scheduler: str = "simple"
    seed: int = 0
    blend: float = 0.0
    tolerance: float = 0.1
    batch: int = 1
    skip: float = 0.0
    width: int = 0
    height: int = 0

    @property
    def compares(self) -> bool:
        """Whether frames are compared with the one before."""
        return self.blend > 0 or self.skip > 0


def sigmas_of(model: Any, settings: Settings) -> torch.Tensor:
    """The sigmas of stock's KSampler for steps and denoise, or of stock's SDTurboScheduler."""
    if settings.scheduler == SD_TURBO:
        from comfy_extras.nodes_custom_sampler import SDTurboScheduler  # noqa: PLC0415 - a module of nodes

        sigmas: torch.Tensor = SDTurboScheduler.execute(model, settings.steps, settings.strength).result[0]
    else:
        ready = comfy.samplers.KSampler(
            model,
            settings.steps,
            model.load_device,
            settings.sampler,
            settings.scheduler,
            settings.strength,
            model.model_options,
        )
        sigmas = ready.sigmas
    if len(sigmas) < 2:
        least = "0.1 for the scheduler sd_turbo" if settings.scheduler == SD_TURBO else "more than 0"
        raise WrongInput(f"strength {settings.strength:g} leaves no step to make. Set it to at least {least}.")
    return sigmas
