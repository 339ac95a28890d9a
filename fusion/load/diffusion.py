"""A file becomes a stock MODEL or VAE (`text.py`: a CLIP): one loader for each role, whatever the family.

Loading goes through ComfyUI's own functions, so whatever stock loads, loads here. Around them stand two checks that stock leaves
out: is this the right kind of file (before the load), and did every weight of the model come from it (after). Stock only logs a
missing weight and runs on with whatever was in memory; the picture is then noise.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch

from ...kernels_cuda import (
    LEDGER,
    STANDARD,
    KernelPolicy,
    obstacle,
)
from ...kernels_cuda.ops.views.checks import word
from ...memory import Checkpoint
from ..base import other_cards
from ..base.family import Family, Role
from ..compatibility import families as compatibility
from ..compatibility.variants import leave_unknown
from ..families import family_of
from ..files.completeness import naming, odd_layers, refuse_misfits
from ..fused import attention
from ..fused.block import all_off
from ..graphs import diffusion
from ..identify import inspection, recognise
from ..patcher import (
    call_log,
    cards,
    conditions,
    vram_retry,
)
from ..patcher.streaming_patcher import StreamingModelPatcher
from ..patcher.vram_estimate import Reckoning
from ..sampling import checks, step_timer
from ..sampling.measured import describe
from ..stream import progress
from ..stream.blocks import found_in, lay_out_layers
from ..stream.stream import Stream
from ..vae.resident_patcher import patcher_of
from . import build
from .common import (
    checked,
    in_bytes,
    let_stream,
    open_to_stream,
    prepare,
    require_all_weights,
    streamed_or_stock,
)

# Stock takes a diffusion model out of a whole checkpoint by this prefix.
CHECKPOINT_PREFIX = "model.diffusion_model."


# ------------------------------------------------------------------------------------------------------ diffusion model


def load_diffusion_model(path: str, policy: KernelPolicy = STANDARD, vram_budget: float = 0.0) -> Any:
    """Load the diffusion model at `path` as a stock MODEL (a `ModelPatcher`) whose attention is ours.

    vram_budget: GiB through which the blocks' weights stream; negative: what is free, and a file that cannot be streamed is
    loaded as with 0: by stock's own memory management.
    """
    device = comfy.model_management.get_torch_device()
    policy = other_cards.policy_for(device, policy)
    return streamed_or_stock(
        path,
        lambda budget: load_streamed_diffusion_model(path, budget, policy),
        lambda: _stock_diffusion_model(path, policy),
        vram_budget,
        device,
    )


def _stock_diffusion_model(path: str, policy: KernelPolicy) -> Any:
    family, names = checked(path, Role.DIFFUSION)
    prepare(policy)
    with naming(path):
        model = comfy.sd.load_diffusion_model(path)
    refuse_misfits(path, odd_layers(model.model.diffusion_model))
    if family is not None:
        # Stock calls some of them otherwise than the file does; what they hold, it is not asked.
        renamed = model.model.model_config.process_unet_state_dict(dict.fromkeys(names, torch.empty(0, device="meta")))
        require_all_weights(path, renamed.keys(), model.model.diffusion_model, CHECKPOINT_PREFIX)
    attention.install(model, policy)
    checks.attach(model, path, family)
    return model


def load_streamed_diffusion_model(
    path: str,
    vram_budget: float | None = None,
    policy: KernelPolicy = STANDARD,
    dtype: torch.dtype | None = None,
    is_checkpoint: bool = False,
    disable_dynamic: bool = True,  # noqa: ARG001 - stock says so when it makes another one; this one never is
    **_others: Any,
) -> StreamingModelPatcher:
    """Load the diffusion model at `path` as a MODEL whose blocks stream from the file.

    vram_budget: GiB of VRAM for the blocks' weights; None: what is free, less what stock reckons the activations need.
    dtype: in which to hold the weights; None: as stock chooses.
    is_checkpoint: as stock takes it out of a whole checkpoint, rather than as a diffusion model by itself.
    """
    source = open_to_stream(path)
    prepare(policy)
    model = streamed_from(source, path, vram_budget, policy, dtype, is_checkpoint=is_checkpoint)
    model.cached_patcher_init = (load_streamed_diffusion_model, (path, vram_budget, policy, dtype, is_checkpoint))
    return model


def streamed_from(
    source: Checkpoint,
    path: str,
    vram_budget: float | None,
    policy: KernelPolicy,
    dtype: torch.dtype | None = None,
    *,
    is_checkpoint: bool = False,
) -> StreamingModelPatcher:
    """The same, from a file that is open. It is closed where this fails, and else with the model."""
    try:
        family = inspection.look_at(source, Role.DIFFUSION)
        inspection.say_doubts(source.files[0], family)
        find = found_in if family is None or family.blocks is None else family.blocks
        device = comfy.model_management.get_torch_device()
        family = compatibility.checked(family, device, policy)
        types = None if family is None else types_of(family, policy, device)
        parts = build.diffusion_model(
            source, dtype, find, is_known=family is not None, preferred=types, is_checkpoint=is_checkpoint
        )
        net = parts.model.diffusion_model
        fused = 0 if family is None else family.fuse(net, policy)
        if family is not None and fused:
            leave_unknown(family, net)
        layers = lay_out_layers(parts.blocks, parts.layers)
        is_ours = fused > 0 and not policy.is_off and parts.model.get_dtype_inference() is torch.float16
        stream = Stream(source, parts.blocks, layers, device, in_bytes(vram_budget), keeps_texts=is_ours)
    except BaseException:
        source.close()
        raise
    if parts.stocks_type is not None:
        stream.ledger.note(
            "computes in",
            f"{word(parts.model.get_dtype_inference())}, as the kernels do; ComfyUI would in {word(parts.stocks_type)}",
        )
    let_stream(parts.model, stream, path, family, fused)
    diffusion.attach(net, stream)
    model = StreamingModelPatcher(parts.model, device, comfy.model_management.unet_offload_device())
    conditions.attach(model.model)
    # Around each call of the model, the outermost first: see stream/model_call.py.
    vram_retry.attach(model, Reckoning() if family is None else Reckoning(family.need, in_pieces=family.in_pieces))
    call_log.attach(model)
    progress.attach(model)
    cards.attach(model)
    attention.install(model, policy)
    checks.attach(model, path, family)
    step_timer.attach(model, describe)
    return model


def types_of(family: Family, policy: KernelPolicy, device: torch.device) -> tuple[torch.dtype, ...] | None:
    """In which types a diffusion model should compute on a device, for its blocks to be ours; None: as stock chooses. On cards that
    have bf16 stock prefers it for some families, which they do in fp16, too."""
    if device.type != "cuda" or all_off(policy, family.ops) or family.aside is not None:
        return None
    return tuple(getattr(torch, name) for name in family.types)


# ------------------------------------------------------------------------------------------------------------------ VAE


def load_vae(path: str, policy: KernelPolicy = STANDARD) -> Any:
    """Load the VAE at `path` as a stock VAE that computes through our ops where a family knows it; by the policy `off`, as stock
    does."""
    policy = other_cards.policy_for(comfy.model_management.vae_device(), policy)
    family, names = checked(path, Role.VAE)
    prepare(policy)
    progress.read_through(path)
    with naming(path):
        weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    vae = _fused_vae(path, weights, metadata, policy)
    # As stock's loader node does: a second GPU makes its own copy of the VAE with this.
    vae.patcher.cached_patcher_init = (load_vae_patcher, (path, metadata, policy))
    _require_whole_vae(path, family, names, vae)
    return vae


def load_vae_in_parts(name: str, weights: Any, metadata: Any = None, policy: KernelPolicy = STANDARD) -> Any:
    """As `load_vae`, of weights that stock has put together out of several files: a TAESD. name: of it, for messages."""
    policy = other_cards.policy_for(comfy.model_management.vae_device(), policy)
    prepare(policy)
    return whole_vae(name, weights, metadata, policy)


def whole_vae(name: str, weights: Any, metadata: Any, policy: KernelPolicy, device: Any = None) -> Any:
    """The VAE of these tensors, of which none is missing where a family knows it. name: for messages."""
    family, names = family_of(recognise.header_of(weights)), tuple(weights)
    vae = _fused_vae(name, weights, metadata, policy, device)
    _require_whole_vae(name, family, names, vae)
    return vae


def _require_whole_vae(path: str, family: Family | None, names: Collection[str], vae: Any) -> None:
    """names: of the tensors that stock's VAE was made of, where a family knows it."""
    if family is not None:
        require_all_weights(path, names if family.spelling is None else family.spelling(names), vae.first_stage_model)


def load_vae_patcher(
    path: str, metadata: Any = None, policy: KernelPolicy = STANDARD, device: Any = None, **_others: Any
) -> Any:
    """Stock's function of this name, with the policy of the VAE that is loaded once more. Returns its patcher."""
    weights, found = comfy.utils.load_torch_file(path, return_metadata=True)
    return _fused_vae(path, weights, found if metadata is None else metadata, policy, device).patcher


def _fused_vae(path: str, weights: Any, metadata: Any, policy: KernelPolicy, device: Any = None) -> Any:
    family = None if policy.default == "off" else family_of(recognise.header_of(weights))
    if family is not None and family.role is not Role.VAE:
        family = None
    family = compatibility.checked(family, comfy.model_management.vae_device() if device is None else device, policy)
    known = family is not None and family.aside is None
    with naming(path):
        vae = comfy.sd.VAE(sd=weights, metadata=metadata, device=device, dtype=vae_dtype(device) if known else None)
    vae.throw_exception_if_invalid()
    if known and family is not None and family.fuse(vae, policy):
        vae.patcher = patcher_of(vae.first_stage_model, vae.patcher.load_device, vae.patcher.offload_device)
    elif known:
        # A header of the family's and a network that is not: stock's, in the type that stock chooses for it.
        vae = comfy.sd.VAE(sd=weights, metadata=metadata, device=device)
        _say_stocks(path)
    elif family is None and policy.default != "off":
        _say_stocks(path)
    return vae


def _say_stocks(path: str) -> None:
    LEDGER.say_once(f"{path}: this VAE is of a kind without fused kernels: ComfyUI computes it.", logging.INFO)


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
