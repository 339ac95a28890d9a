"""A file becomes a stock MODEL, CLIP or VAE: one loader for each role, whatever the family.

Loading goes through ComfyUI's own functions, so whatever stock loads, loads here. Around them stand two checks that stock leaves
out: is this the right kind of file (before the load), and did every weight of the model come from it (after). Stock only logs a
missing weight and runs on with whatever was in memory; the picture is then noise.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.sd
import comfy.utils
import torch

from ..kernels_cuda import LEDGER, STANDARD, KernelPolicy, obstacle, unpack_soon
from ..memory import Checkpoint
from . import attention, recognise, text_kinds
from .errors import NotStreamable
from .families import family_of
from .family import Family, Role
from .stream import branches, conditions, progress, skeleton, step
from .stream.blocks import found_in
from .stream.encoding import hold_while_writing, watch_encoding
from .stream.patcher import StreamingModelPatcher, attach
from .stream.stream import Stream

# Stock takes a diffusion model out of a whole checkpoint by this prefix.
CHECKPOINT_PREFIX = "model.diffusion_model."
NO_HEADER = "only .safetensors files can be streamed. Set vram_budget to 0 to load it as stock does."


def _prepare(policy: KernelPolicy) -> None:
    """The kernels are unpacked while the model loads."""
    if policy.default != "off":
        unpack_soon(comfy.model_management.get_torch_device())


def _streamed_or_stock(stream: Any, stock: Any, vram_budget: float) -> Any:
    """The model that streams within the budget; with 0 stock's, and with an automatic budget where it cannot stream."""
    if vram_budget > 0:
        return stream(vram_budget)
    if vram_budget < 0:
        try:
            return stream(None)
        except NotStreamable as reason:  # and nobody insisted on it
            LEDGER.say_once(f"{reason} It is loaded as stock does now.", logging.INFO)
    return stock()


def _note_who_computes(stream: Stream, path: str, family: Family | None, fused: int) -> None:
    """For the report, and where ComfyUI computes the blocks, for the log."""
    if family is not None and fused:
        stream.family = family.name
    else:
        LEDGER.say_once(f"{path} streams; no fused kernels for this family: ComfyUI computes its blocks.", logging.INFO)


# ------------------------------------------------------------------------------------------------------ diffusion model


def load_diffusion_model(path: str, policy: KernelPolicy = STANDARD, vram_budget: float = 0.0) -> Any:
    """Load the diffusion model at `path` as a stock MODEL (a `ModelPatcher`) whose attention is ours.

    vram_budget: GiB through which the blocks' weights stream; negative: what is free, and a file that cannot be streamed is
    loaded as with 0: by stock's own memory management.
    """
    return _streamed_or_stock(
        lambda budget: load_streamed_diffusion_model(path, budget, policy),
        lambda: _stock_diffusion_model(path, policy),
        vram_budget,
    )


def _stock_diffusion_model(path: str, policy: KernelPolicy) -> Any:
    family, names = _checked(path, Role.DIFFUSION)
    _prepare(policy)
    model = comfy.sd.load_diffusion_model(path)
    if family is not None:
        _require_all_weights(path, names, model.model.diffusion_model, CHECKPOINT_PREFIX)
    attention.install(model, policy)
    return model


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
    source = _open_to_stream(path)
    try:
        family = recognise.check(source, Role.DIFFUSION)
        _prepare(policy)
        find = found_in if family is None or family.blocks is None else family.blocks
        parts = skeleton.diffusion_model(source, dtype, find, is_known=family is not None)
        fused = 0 if family is None else family.fuse(parts.model.diffusion_model, policy)
        device = comfy.model_management.get_torch_device()
        stream = Stream(source, parts.blocks, parts.layers, device, _bytes(vram_budget))
    except BaseException:
        source.close()
        raise
    _note_who_computes(stream, path, family, fused)
    attach(parts.model, stream)
    model = StreamingModelPatcher(parts.model, device, comfy.model_management.unet_offload_device())
    model.cached_patcher_init = (load_streamed_diffusion_model, (path, vram_budget, policy, dtype))
    conditions.attach(model.model)
    # Around each call of the model, the outermost first: see stream/model_call.py.
    step.attach(model, None if family is None else family.need)
    branches.attach(model)
    progress.attach(model)
    attention.install(model, policy)
    return model


# --------------------------------------------------------------------------------------------------------- text encoder


def load_text_encoder(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy = STANDARD,
    vram_budget: float = 0.0,
    kind: str = text_kinds.AUTO,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Load the text encoder at `path` as a stock CLIP, which computes through our ops where a family knows it.

    embedding_folders   searched for `embedding:name`
    vram_budget         as `load_diffusion_model` has it
    kind                stock's type of text encoder in lower case, or `auto` where the file tells
    options             stock's model_options, beside those that the file tells
    """
    return _streamed_or_stock(
        lambda budget: load_streamed_text_encoder(path, embedding_folders, budget, policy, kind, options),
        lambda: _stock_text_encoder(path, embedding_folders, policy, kind, options),
        vram_budget,
    )


def _stock_text_encoder(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy,
    kind: str,
    options: Mapping[str, Any] | None,
) -> Any:
    if not recognise.has_header(path):
        clip_type = getattr(comfy.sd.CLIPType, ("wan" if kind == text_kinds.AUTO else kind).upper())
        return comfy.sd.load_clip([path], embedding_folders, clip_type, model_options=dict(options or {}))
    with Checkpoint.open(path) as source:
        family = recognise.check(source, Role.TEXT)
        all_options = _text_options(source, family, options)
        clip_type = text_kinds.kind_of(source, family, kind)
        names = source.extents.keys()
    _prepare(policy)
    clip = comfy.sd.load_clip([path], embedding_folders, clip_type, model_options=all_options)
    if family is not None:
        _require_all_weights(path, names, clip.cond_stage_model, is_part=True)
        family.fuse(clip.cond_stage_model, policy)
    return clip


def load_streamed_text_encoder(
    path: str,
    embedding_folders: Sequence[str],
    vram_budget: float | None = None,
    policy: KernelPolicy = STANDARD,
    kind: str = text_kinds.AUTO,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Load the text encoder at `path` as a CLIP whose encoder blocks stream from the file.

    vram_budget: GiB of VRAM for the blocks' weights; None: what is free.
    """
    source = _open_to_stream(path)
    try:
        family = recognise.check(source, Role.TEXT)
        all_options = _text_options(source, family, options)
        clip_type = text_kinds.kind_of(source, family, kind)
        _prepare(policy)
        clip, parts = skeleton.text_encoder(
            source, clip_type, embedding_folders, all_options, is_known=family is not None
        )
        fused = 0 if family is None else family.fuse(parts.model, policy)
        device = clip.patcher.load_device
        stream = Stream(
            source,
            parts.blocks,
            parts.layers,
            device,
            _bytes(vram_budget),
            parts.left,
            Role.TEXT.loader,
            spare=len(parts.heads),
        )
    except BaseException:
        source.close()
        raise
    _note_who_computes(stream, path, family, fused)
    attach(parts.model, stream)
    watch_encoding(parts.model, stream)
    for network, block in parts.heads:
        hold_while_writing(network, stream, block)
    # As stock's CLIP makes its own.
    clip.patcher = StreamingModelPatcher(parts.model, device, clip.patcher.offload_device)
    clip.patcher.set_model_compute_dtype(torch.float32)
    clip.patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
    clip.patcher.is_clip = True
    init = (path, embedding_folders, vram_budget, policy, kind, options)
    clip.patcher.cached_patcher_init = (_streamed_text_encoder_patcher, init)
    return clip


def _streamed_text_encoder_patcher(*given: Any, **_others: Any) -> StreamingModelPatcher:
    patcher: StreamingModelPatcher = load_streamed_text_encoder(*given).patcher
    return patcher


def _text_options(source: Checkpoint, family: Family | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    told = {} if family is None or family.options is None else family.options(source.files[0])
    return {**told, **(given or {})}


# ------------------------------------------------------------------------------------------------------------------ VAE


def load_vae(path: str, policy: KernelPolicy = STANDARD) -> Any:
    """Load the VAE at `path` as a stock VAE that computes through our ops where a family knows it; by the policy `off`, as stock
    does."""
    family, names = _checked(path, Role.VAE)
    _prepare(policy)
    progress.read_through(path)
    weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    vae = _fused_vae(weights, metadata, policy)
    # As stock's loader node does: a second GPU makes its own copy of the VAE with this.
    vae.patcher.cached_patcher_init = (load_vae_patcher, (path, metadata, policy))
    if family is not None:
        _require_all_weights(path, names, vae.first_stage_model)
    return vae


def load_vae_patcher(
    path: str, metadata: Any = None, policy: KernelPolicy = STANDARD, device: Any = None, **_others: Any
) -> Any:
    """Stock's function of this name, with the policy of the VAE that is loaded once more. Returns its patcher."""
    weights, found = comfy.utils.load_torch_file(path, return_metadata=True)
    return _fused_vae(weights, found if metadata is None else metadata, policy, device).patcher


def _fused_vae(weights: Any, metadata: Any, policy: KernelPolicy, device: Any = None) -> Any:
    family = None if policy.default == "off" else family_of(recognise.header_of(weights))
    known = family is not None and family.role is Role.VAE
    vae = comfy.sd.VAE(sd=weights, metadata=metadata, device=device, dtype=vae_dtype(device) if known else None)
    vae.throw_exception_if_invalid()
    if known and family is not None:
        family.fuse(vae, policy)
    return vae


def vae_dtype(device: torch.device | None = None) -> torch.dtype | None:
    """The type in which a VAE that a family knows computes on a device, ComfyUI's VAE device unless given. None: as stock chooses.

    Our kernels are fp16. Of fp16 and bf16, both of which stock allows for these VAEs, it takes bf16 from Ampere on and
    fp16 on Turing. The flags for a VAE's type, and cards whose fp16 stock does not trust, decide here as they do there.
    """
    device = device or comfy.model_management.vae_device()
    if obstacle(device) is not None:
        return None
    chosen: torch.dtype = comfy.model_management.vae_dtype(device, [torch.float16, torch.bfloat16, torch.float32])
    return chosen


# ------------------------------------------------------------------------------------------------------------- all three


def _open_to_stream(path: str) -> Checkpoint:
    if not recognise.has_header(path):
        raise NotStreamable(f"{path}: {NO_HEADER}")
    return Checkpoint.open(path)


def _bytes(vram_budget: float | None) -> int | None:
    return None if vram_budget is None else int(vram_budget * 2**30)


def _checked(path: str, role: Role) -> tuple[Family | None, Collection[str]]:
    """The family of a file that stock will load, if one knows it, and the names of the file's tensors."""
    if not recognise.has_header(path):
        return None, ()
    with Checkpoint.open(path) as source:
        return recognise.check(source, role), source.extents.keys()


def _require_all_weights(
    path: str, names: Iterable[str], model: torch.nn.Module, prefix: str = "", *, is_part: bool = False
) -> None:
    """Raise `WrongFile` if a parameter of a model that stock loaded is none of the file's tensors, by these names. is_part: they
    are those within some part of the model."""
    present = {name.removeprefix(prefix) for name in names}
    # The scales of quantised layers have gone by several names, and stock makes those that a file may omit.
    wanted = [name for name, _ in model.named_parameters() if not name.endswith(("_scale", *skeleton.MAY_LACK))]
    if is_part:
        within = [name.partition(skeleton.NETWORK) for name in wanted if skeleton.NETWORK in name]
        wanted = [inner for _, _, inner in within]
    if any(name in present for name in wanted):  # or stock translated a foreign layout: there is nothing to compare by
        skeleton.refuse_lacking(path, sorted(name for name in wanted if name not in present))
