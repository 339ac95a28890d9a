"""Checks at the start of a sampling, before the model is loaded for it: whether model, latents and
prompts go together, and how many prompts there are. They wrap each sampling with a MODEL of our
loader and with its clones, streamed or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import comfy.patcher_extension
import comfy.samplers
import torch

from ..base import notices
from ..base.errors import WrongFile
from ..base.family import Family, Role
from ..base.hooks import BEFORE_SAMPLING, RECKONING
from ..identify.latents import vae_for
from . import kernel_choices

PUBLISHED = "the text encoder that was published with it"


def attach(patcher: Any, path: str, family: Family | None) -> None:
    """Check samplings of this patcher. Without a family too little is known of the model."""
    if family is not None:
        around = partial(_look, Path(path).name, family)
        patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, BEFORE_SAMPLING, around)


def _look(
    name: str, family: Family, executor: Any, noise: torch.Tensor, latents: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """One sampling, as stock's wrappers call it. latents: [batch, channels, ...]."""
    guider = executor.class_obj
    model = guider.model_patcher.model
    fault = _wrong_latents(name, family, model.latent_format, latents)
    prompts = [prompt for several in guider.conds.values() for prompt in several]
    if not hasattr(model, "cc_projection"):  # by which stock changes the width of tokens
        fault = fault or _wrong_prompts(name, family, model.diffusion_model, prompts)
    if fault is not None:
        raise WrongFile(fault)
    if family.doubts is not None:
        doubt = family.doubts(model, guider.model_patcher.patches, prompts)
        if doubt is not None:
            notices.warn(f"{name} {doubt}")
    reckoning = getattr(model, RECKONING, None)
    if reckoning is not None:
        reckoning.is_alone = is_one_prompt(guider)
    with kernel_choices.counting(model):
        return executor(noise, latents, *args, **kwargs)


def is_one_prompt(guider: Any) -> bool:
    """Whether each step computes one prompt, because stock leaves out the negative one if the
    guidance is 1."""
    conds: Mapping[str, Any] = guider.conds
    if sum(map(len, conds.values())) == 1:
        return True
    is_left_out = math.isclose(getattr(guider, "cfg", math.nan), 1.0) and not guider.model_options.get(
        "disable_cfg1_optimization", False
    )
    return is_left_out and type(guider) is comfy.samplers.CFGGuider and len(conds.get("positive", ())) == 1


def _wrong_latents(name: str, family: Family, wanted: Any, latents: torch.Tensor) -> str | None:
    """Why the latents do not fit. Stock has already adapted empty ones, so these were encoded, or
    sampled, for another model."""
    channels: int = wanted.latent_channels
    if latents.ndim != wanted.latent_dimensions + 2 or latents.shape[1] == channels:
        return None
    return (
        f"{name} samples latents of {channels} channels, and those it is given to begin with have {latents.shape[1]}: they come "
        f"from another VAE or model. Encode them with {vae_for(family, channels)}."
    )


def _wrong_prompts(name: str, family: Family, net: Any, prompts: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the prompts do not fit. Stock would say so inside of the network, in shapes."""
    read = None if family.reads is None else family.reads(net)
    if read is None:
        return None
    wanted, encoder = read
    given = (prompt.get("cross_attn") for prompt in prompts)
    odd = next((tokens.shape[-1] for tokens in given if tokens is not None and tokens.shape[-1] != wanted), None)
    if odd is None:
        return None
    return (
        f"{name} reads prompts whose tokens are {wanted} numbers wide, and those it is given are {odd} wide: they come from "
        f"another text encoder, or from one that was loaded as another type. Choose {encoder or PUBLISHED} in the "
        f"{Role.TEXT.loader}."
    )
