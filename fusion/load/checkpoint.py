"""One file becomes a stock MODEL, CLIP and VAE: whole checkpoints, each part in the way of a file of its own.

The diffusion model streams, and so do the text encoders where their weights are tensors of the file; of the VAE and of what cannot
stream just their tensors are read. What a file does not have is what stock's Load Checkpoint hands out then: no CLIP, a VAE that
says so when it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import comfy.model_management
import comfy.sd
import comfy.utils
import torch

from ...kernels_cuda import LEDGER, STANDARD, KernelPolicy
from ...memory import Checkpoint
from ..base import file_formats, other_cards
from ..base.errors import NotStreamable
from ..base.family import Family, Role
from ..families import family_of
from ..files import checkpoint_parts
from ..files.completeness import naming, odd_layers, refuse_misfits
from ..fused import attention
from ..identify import inspection, recognise
from ..sampling import checks
from ..weights.meta_tensor import real, tensors_of
from . import build
from .common import (
    open_to_stream,
    prepare,
    require_all_weights,
    streamed_or_stock,
)
from .diffusion import CHECKPOINT_PREFIX, load_streamed_diffusion_model, whole_vae
from .text import fuse, streaming_clip

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Parts(NamedTuple):
    """Stock's objects. clip: None where the file has no text encoder. vae: one that says so at use where it has none."""

    model: Any
    clip: Any
    vae: Any


class Beside(NamedTuple):
    """Whether a checkpoint has these beside its diffusion model."""

    text: bool
    vae: bool


def load_checkpoint(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy = STANDARD,
    vram_budget: float = 0.0,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Parts:
    """Load the checkpoint at `path`; what a family knows of it computes through our ops.

    embedding_folders   searched for `embedding:name`
    vram_budget         as `load_diffusion_model` has it, for the diffusion model and for the text encoders
    options             stock's model_options of the text encoders
    """
    device = comfy.model_management.get_torch_device()
    parts: Parts = streamed_or_stock(
        path,
        lambda budget: _streamed(path, embedding_folders, policy, budget, options),
        lambda: _stocks(path, embedding_folders, policy, options),
        vram_budget,
        device,
    )
    return parts


def beside_the_model(path: str) -> Beside | None:
    """What a file has beside its diffusion model, by its header; None: it has none that would tell."""
    if not file_formats.has_header(path):
        return None
    with Checkpoint.open(path) as source, naming(path):
        tensors = tensors_of(source)
        config = checkpoint_parts.config_of(tensors, source.files[0].metadata)
        if config is None:
            return Beside(text=False, vae=False)
        return Beside(checkpoint_parts.has_text(tensors, config), bool(checkpoint_parts.vae_tensors(tensors, config)))


# ------------------------------------------------------------------------------------------------------------ streaming


def _streamed(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy,
    vram_budget: float | None,
    options: Mapping[str, Any],
) -> Parts:
    on_card = other_cards.policy_for(comfy.model_management.get_torch_device(), policy)
    model = load_streamed_diffusion_model(path, vram_budget, on_card, is_checkpoint=True)
    given = (path, embedding_folders, policy, vram_budget, options)
    return Parts(model, _clip(*given), _vae(path, policy))


def _clip(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy,
    vram_budget: float | None,
    options: Mapping[str, Any],
) -> Any:
    """The text encoders, streamed where they can."""
    policy = _for_text(policy)
    source = open_to_stream(path)
    try:
        every, metadata = tensors_of(source), source.files[0].metadata
        config = _config(path, every, metadata)
        if config is None or not checkpoint_parts.has_text(every, config):
            source.close()
            return None
        families = _families(checkpoint_parts.text_tensors(every, config))
        try:
            clip, parts = build.text_of_checkpoint(source, config, embedding_folders, options, is_known=bool(families))
            streaming_clip(source, clip, parts, families, policy, vram_budget)
        except NotStreamable as reason:
            LEDGER.say_once(f"{reason} Its text encoder is loaded as stock does now.", logging.INFO)
            clip = _stocks_clip(path, every, config, embedding_folders, policy, options)
            source.close()
    except BaseException:
        source.close()
        raise
    clip.patcher.cached_patcher_init = (_clip_patcher, (path, embedding_folders, policy, vram_budget, options))
    return clip


def _clip_patcher(*given: Any, **_others: Any) -> Any:
    return _clip(*given).patcher


def _for_text(policy: KernelPolicy) -> KernelPolicy:
    return other_cards.policy_for(comfy.model_management.text_encoder_device(), policy)


def _config(path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> Any:
    with naming(path):
        return checkpoint_parts.config_of(tensors, metadata or {})


def _families(tensors: Mapping[str, torch.Tensor]) -> list[Family]:
    """The families of a checkpoint's text encoders, each once."""
    found = (family_of(recognise.header_of(encoder)) for encoder in checkpoint_parts.encoders(tensors))
    return list({family.name: family for family in found if family is not None and family.role is Role.TEXT}.values())


# -------------------------------------------------------------------------------------------------------------- stock's


def _stocks(path: str, embedding_folders: Sequence[str], policy: KernelPolicy, options: Mapping[str, Any]) -> Parts:
    """By stock's own memory management: every part in the way in which the loaders of single files do it with vram_budget 0."""
    recognise.require_stocks(path)
    on_card = other_cards.policy_for(comfy.model_management.get_torch_device(), policy)
    family: Family | None = None
    names: tuple[str, ...] = ()
    if file_formats.has_header(path):
        with Checkpoint.open(path) as source:
            family = inspection.look_at(source, Role.CHECKPOINT)
            inspection.say_doubts(source.files[0], family)
            names = tuple(source.extents)
    prepare(on_card)
    with naming(path):
        found = comfy.sd.load_checkpoint_guess_config(path, output_vae=False, output_clip=False)
    model = found[0]
    refuse_misfits(path, odd_layers(model.model.diffusion_model))
    if family is not None:
        renamed = model.model.model_config.process_unet_state_dict(dict.fromkeys(names, torch.empty(0, device="meta")))
        require_all_weights(path, renamed.keys(), model.model.diffusion_model, CHECKPOINT_PREFIX)
    attention.install(model, on_card)
    checks.attach(model, path, family)
    clip = _clip_in_memory(path, embedding_folders, policy, options)
    return Parts(model, clip, _vae(path, policy))


def _clip_in_memory(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy,
    options: Mapping[str, Any],
    *,
    disable_dynamic: bool = False,
) -> Any:
    policy = _for_text(policy)
    with naming(path):
        tensors, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    config = _config(path, tensors, metadata)
    if config is None or not checkpoint_parts.has_text(tensors, config):
        return None
    clip = _stocks_clip(path, tensors, config, embedding_folders, policy, options, disable_dynamic=disable_dynamic)
    clip.patcher.cached_patcher_init = (_clip_in_memory_patcher, (path, embedding_folders, policy, options))
    return clip


def _clip_in_memory_patcher(*given: Any, disable_dynamic: bool = False, **_others: Any) -> Any:
    return _clip_in_memory(*given, disable_dynamic=disable_dynamic).patcher


def _stocks_clip(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    config: Any,
    embedding_folders: Sequence[str],
    policy: KernelPolicy,
    options: Mapping[str, Any],
    *,
    disable_dynamic: bool = False,
) -> Any:
    """tensors: the whole file's, read or not."""
    with naming(path):
        own = real(checkpoint_parts.text_tensors(tensors, config))
        names = tuple(own)
        families = _families(own)
        clip = checkpoint_parts.clip_of(
            own, config, tensors, embedding_folders, options, disable_dynamic=disable_dynamic
        )
    refuse_misfits(path, odd_layers(clip.cond_stage_model))
    if families:
        require_all_weights(path, names, clip.cond_stage_model)
    fuse(families, clip, policy)
    return clip


# ------------------------------------------------------------------------------------------------------------------ VAE


def _vae(path: str, policy: KernelPolicy, device: Any = None) -> Any:
    """The VAE of a checkpoint, of which just its tensors are read."""
    policy = other_cards.policy_for(comfy.model_management.vae_device(), policy)
    if file_formats.has_header(path):
        with Checkpoint.open(path) as source:
            metadata: Mapping[str, str] | None = dict(source.files[0].metadata)
            weights = _vae_weights(path, tensors_of(source), metadata)
    else:
        with naming(path):
            tensors, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
        weights = _vae_weights(path, tensors, metadata)
    if not weights:
        return comfy.sd.VAE(sd={})  # which says at its use that the checkpoint has none
    vae = whole_vae(path, weights, metadata, policy, device)
    vae.patcher.cached_patcher_init = (_vae_patcher, (path, policy))
    return vae


def _vae_weights(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> dict[str, torch.Tensor]:
    config = _config(path, tensors, metadata)
    with naming(path):
        return {} if config is None else real(checkpoint_parts.vae_tensors(tensors, config))


def _vae_patcher(path: str, policy: KernelPolicy, device: Any = None, **_others: Any) -> Any:
    return _vae(path, policy, device).patcher
