"""A file becomes a stock MODEL, CLIP or VAE.

Loading goes through ComfyUI's own functions, so whatever stock loads, loads here. Around them stand two checks that
stock leaves out: is this the right kind of file (before the load), and did every weight of the model come from it
(after). Stock only logs a missing weight and runs on with whatever was in memory; the picture is then noise.
"""

from __future__ import annotations

import logging
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.sd
import comfy.utils
import torch

from ..kernels_cuda import LEDGER, STANDARD, KernelPolicy, unpack_soon
from ..memory import Checkpoint, WeightFile
from . import activations, attention, calls, conditions, progress, skeleton, t5, t5_skeleton, umt5, wan, wan_vae
from .mixing import mix
from .patcher import StreamingModelPatcher, attach
from .recognise import Kind, WrongFile, inspect
from .skeleton import NotStreamable
from .stream import Stream

# Stock takes a diffusion model out of a whole checkpoint by this prefix.
CHECKPOINT_PREFIX = "model.diffusion_model."


def _begin(path: str, kind: Kind, policy: KernelPolicy) -> WeightFile | None:
    """The checked header, or None for formats without one. The kernels are unpacked meanwhile."""
    header = inspect(path, kind)
    if policy.default != "off":
        unpack_soon(comfy.model_management.get_torch_device())
    return header


def load_diffusion_model(path: str, policy: KernelPolicy = STANDARD, vram_budget: float = 0.0) -> Any:
    """Load the diffusion model at `path` as a stock MODEL (a `ModelPatcher`) whose attention is ours.

    vram_budget: GiB through which the blocks' weights stream; negative: what is free, and a file that cannot be streamed is
    loaded as with 0: by stock's own memory management.
    """
    if vram_budget > 0:
        return load_streamed_diffusion_model(path, vram_budget, policy)
    if vram_budget < 0:
        try:
            return load_streamed_diffusion_model(path, None, policy)
        except NotStreamable as reason:
            _say_as_stock(reason)
    header = _begin(path, Kind.WAN, policy)
    model = comfy.sd.load_diffusion_model(path)
    _require_all_weights(model.model.diffusion_model, header, CHECKPOINT_PREFIX)
    attention.install(model, policy)
    return model


def _say_as_stock(reason: NotStreamable) -> None:
    """Automatic streaming was not possible, and nobody insisted on it."""
    LEDGER.say_once(f"{reason} It is loaded as stock does now.", logging.INFO)


def load_streamed_diffusion_model(
    path: str,
    vram_budget: float | None = None,
    policy: KernelPolicy = STANDARD,
    dtype: torch.dtype | None = None,
    disable_dynamic: bool = True,  # noqa: ARG001 - stock says so when it makes another one; this one never is
    **_others: Any,
) -> StreamingModelPatcher:
    """Load the diffusion model at `path` as a MODEL whose blocks stream from the file.

    vram_budget: GiB of VRAM for the blocks' weights; None: what is free, less what stock reckons the activations need.
    dtype: in which to hold the weights; None: as stock chooses.
    """
    header = _begin(path, Kind.WAN, policy)
    if header is None:
        raise NotStreamable(
            f"{path}: only .safetensors files can be streamed. Set vram_budget to 0 to load it as stock does."
        )
    source = Checkpoint.open(path)
    try:
        parts = skeleton.build(source, dtype)
        wan.fuse(parts.model.diffusion_model)
        ceiling = None if vram_budget is None else int(vram_budget * 2**30)
        device = comfy.model_management.get_torch_device()
        stream = Stream(source, parts.blocks, parts.layers, device, ceiling)
    except BaseException:
        source.close()
        raise
    attach(parts.model, stream)
    _require_all_weights(parts.model.diffusion_model, header, CHECKPOINT_PREFIX)
    model = StreamingModelPatcher(parts.model, device, comfy.model_management.unet_offload_device())
    model.cached_patcher_init = (load_streamed_diffusion_model, (path, vram_budget, policy, dtype))
    conditions.attach(model.model)
    # Around each call of the model, the outermost first: see model_call.py.
    activations.attach(model)
    calls.attach(model)
    progress.attach(model)
    attention.install(model, policy)
    return model


def load_text_encoder(
    path: str, embedding_folders: list[str], policy: KernelPolicy = STANDARD, vram_budget: float = 0.0
) -> Any:
    """Load the UMT5 text encoder at `path` as a stock CLIP that computes through our ops; `embedding_folders` are searched
    for `embedding:name`. vram_budget: as `load_diffusion_model` has it.
    """
    if vram_budget > 0:
        return load_streamed_text_encoder(path, embedding_folders, vram_budget, policy)
    if vram_budget < 0:
        try:
            return load_streamed_text_encoder(path, embedding_folders, None, policy)
        except NotStreamable as reason:
            _say_as_stock(reason)
    header = _begin(path, Kind.T5, policy)
    options = {} if header is None else {umt5.CONFIG_OPTION: umt5.config(header)}
    clip = comfy.sd.load_clip(
        [path], embedding_directory=embedding_folders, clip_type=comfy.sd.CLIPType.WAN, model_options=options
    )
    _require_all_weights(clip.cond_stage_model.umt5xxl.transformer, header)
    t5.fuse(clip.cond_stage_model, policy)
    return clip


def load_streamed_text_encoder(
    path: str, embedding_folders: list[str], vram_budget: float | None = None, policy: KernelPolicy = STANDARD
) -> Any:
    """Load the UMT5 text encoder at `path` as a CLIP whose encoder blocks stream from the file.

    vram_budget: GiB of VRAM for the blocks' weights; None: what is free.
    """
    header = _begin(path, Kind.T5, policy)
    if header is None:
        raise NotStreamable(
            f"{path}: only .safetensors files can be streamed. Set vram_budget to 0 to load it as stock does."
        )
    options = {umt5.CONFIG_OPTION: umt5.config(header)}
    source = Checkpoint.open(path)
    try:
        parts = t5_skeleton.build_clip(source, embedding_folders, options)
        clip = parts.clip
        ceiling = None if vram_budget is None else int(vram_budget * 2**30)
        device = clip.patcher.load_device
        stream = Stream(source, parts.blocks, parts.layers, device, ceiling, parts.left, t5_skeleton.LOADER)
    except BaseException:
        source.close()
        raise
    attach(clip.cond_stage_model, stream)
    _require_all_weights(parts.net, header)
    mix(parts.net, t5_skeleton.Checked, fusestream_checks=stream)
    t5.fuse(clip.cond_stage_model, policy)
    # As stock's CLIP makes its own.
    clip.patcher = StreamingModelPatcher(clip.cond_stage_model, device, clip.patcher.offload_device)
    clip.patcher.set_model_compute_dtype(torch.float32)
    clip.patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
    clip.patcher.is_clip = True
    clip.patcher.cached_patcher_init = (_streamed_text_encoder_patcher, (path, embedding_folders, vram_budget, policy))
    return clip


def _streamed_text_encoder_patcher(
    path: str,
    embedding_folders: list[str],
    vram_budget: float | None,
    policy: KernelPolicy,
    disable_dynamic: bool = True,  # noqa: ARG001 - stock says so when it makes another one; this one never is
) -> StreamingModelPatcher:
    patcher: StreamingModelPatcher = load_streamed_text_encoder(path, embedding_folders, vram_budget, policy).patcher
    return patcher


def load_vae(path: str, policy: KernelPolicy = STANDARD) -> Any:
    """Load the VAE at `path` as a stock VAE that computes through our ops; by the policy `off`, as stock does."""
    header = _begin(path, Kind.WAN_VAE, policy)
    progress.read_through(path)
    weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    vae = _fused_vae(weights, metadata, policy)
    # As stock's loader node does: a second GPU makes its own copy of the VAE with this.
    vae.patcher.cached_patcher_init = (load_vae_patcher, (path, metadata, policy))
    _require_all_weights(vae.first_stage_model, header)
    return vae


def load_vae_patcher(
    path: str, metadata: Any = None, policy: KernelPolicy = STANDARD, device: Any = None, **_others: Any
) -> Any:
    """Stock's function of this name, with the policy of the VAE that is loaded once more. Returns its patcher."""
    weights, found = comfy.utils.load_torch_file(path, return_metadata=True)
    return _fused_vae(weights, found if metadata is None else metadata, policy, device).patcher


def _fused_vae(weights: Any, metadata: Any, policy: KernelPolicy, device: Any = None) -> Any:
    off = policy.default == "off"
    vae = comfy.sd.VAE(sd=weights, metadata=metadata, device=device, dtype=None if off else wan_vae.dtype_for(device))
    vae.throw_exception_if_invalid()
    if not off and wan_vae.is_wan(vae.first_stage_model):
        wan_vae.install(vae, policy)
    return vae


def _require_all_weights(model: torch.nn.Module, header: WeightFile | None, prefix: str = "") -> None:
    """Raise `WrongFile` if a parameter of `model` has no tensor of its name in the file."""
    if header is None:
        return
    present = {name.removeprefix(prefix) for name in header.extents}
    # The scales of quantised layers have gone by several names, and stock makes those that a file may omit.
    wanted = [name for name, _ in model.named_parameters() if not name.endswith("_scale")]
    if not any(name in present for name in wanted):
        return  # stock translated the names of a foreign layout: there is nothing to compare by
    missing = sorted(name for name in wanted if name not in present)
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise WrongFile(f"{header.path} lacks {len(missing)} of the model's weights: {shown}. Download it again.")
