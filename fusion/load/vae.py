"""A file becomes a stock VAE. Its weights are read whole, because a VAE does not stream."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch

from ...kernels_cuda import LEDGER, STANDARD, KernelPolicy, obstacle
from ..base.errors import WrongFile
from ..base.family import Role
from ..compatibility import families as compatibility
from ..families import family_of
from ..files.completeness import naming
from ..identify.checkpoint_info import CheckpointInfo, header_of, look_at
from ..stream import progress
from ..vae import quantised_file
from ..vae.banded import install as banded
from ..vae.block_by_block import install as block_by_block
from ..vae.memory_limits import LIMIT
from ..vae.resident_patcher import patcher_of
from .common import looked_at, prepare
from .missing import require_whole
from .request import LoadRequest, keep


def load_vae(path: str, policy: KernelPolicy = STANDARD) -> Any:
    """Load the VAE at `path` as a stock VAE that computes through our ops if a family knows it; as
    stock does under the policy `off`."""
    return load(LoadRequest(path, Role.VAE, policy))


def load_vae_in_parts(name: str, weights: Any, metadata: Any = None, policy: KernelPolicy = STANDARD) -> Any:
    """Like `load_vae`, for weights that stock has put together out of several files (a TAESD).
    name: for messages."""
    request = LoadRequest(name, Role.VAE, policy)
    prepare(request)
    return of_tensors(request, weights, metadata)


def load(request: LoadRequest) -> Any:
    """The requested VAE."""
    with looked_at(request.path, partial(look_at, role=request.role)) as info:
        prepare(request)
    progress.read_through(request.path)
    with naming(request.path):
        weights, metadata = comfy.utils.load_torch_file(request.path, return_metadata=True)
        if info is None:  # only stock reads it (.pth), so it is looked at in memory
            CheckpointInfo.of_tensors(weights, request.path).require_role(request.role)
    vae = of_tensors(request, weights, metadata)
    keep(vae.patcher, request, load)  # as stock's loader node does
    return vae


def of_tensors(
    request: LoadRequest, weights: dict[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Any:
    """The stock VAE of these tensors, which must be complete if a family knows it. request: its
    path is named in messages."""
    path, policy, names = request.path, request.kernels, tuple(weights)
    known = family_of(header_of(weights))
    if known is not None and known.role is not Role.VAE:
        known = None
    family = compatibility.checked(None if policy.default == "off" else known, request.device, policy)
    if family is not None and family.aside is not None:
        vae = _stocks(path, weights, metadata)  # `checked` has reported why
    elif family is None:
        vae = _stocks(path, weights, metadata)
        if policy.default != "off":
            _in_bands(path, vae)
    else:
        vae = _stocks(path, weights, metadata, vae_dtype())
        if family.fuse(vae, policy):
            vae.patcher = patcher_of(vae.first_stage_model, vae.patcher.load_device, vae.patcher.offload_device)
        # The header looked like the family's, but the network is not: use the type that stock
        # chooses.
        else:
            vae = _stocks(path, weights, metadata)
            _in_bands(path, vae)
    if known is not None:
        require_whole(path, names if known.spelling is None else known.spelling(names), vae.first_stage_model)
    return vae


def _stocks(
    path: str, weights: dict[str, torch.Tensor], metadata: Mapping[str, str] | None, dtype: torch.dtype | None = None
) -> Any:
    """Stock's own VAE. dtype: type to compute in; None: as stock chooses."""
    if not quantised_file.quantised_layers(weights):
        return _made(path, weights, metadata, dtype)
    try:
        quantised_file.check_notes(weights)
        if (vae := _of_quantised(path, weights, metadata, dtype)) is not None:
            return vae
        halves = quantised_file.in_halves(weights)
    except WrongFile as error:
        raise WrongFile(f"{path}: {error}") from error
    vae = _made(path, halves, metadata, dtype)
    LEDGER.say_once(f"{path}: this ComfyUI's VAEs take no quantised weights: they were unpacked to FP16.", logging.INFO)
    return vae


def _of_quantised(
    path: str, weights: dict[str, torch.Tensor], metadata: Mapping[str, str] | None, dtype: torch.dtype | None
) -> Any:
    """Stock's own VAE with its weights as the file has them; None: it would take their codes for numbers."""
    with contextlib.suppress(WrongFile):  # packed numbers have other shapes than the network's
        vae = _made(path, dict(weights), metadata, dtype)
        if quantised_file.holds_quantised(vae.first_stage_model):
            return vae
    return None


def _made(
    path: str, weights: dict[str, torch.Tensor], metadata: Mapping[str, str] | None, dtype: torch.dtype | None
) -> Any:
    with naming(path):
        vae = comfy.sd.VAE(sd=weights, metadata=metadata, dtype=dtype)
    vae.throw_exception_if_invalid()
    return vae


def _in_bands(path: str, vae: Any) -> None:
    """Let ComfyUI's own code compute a VAE without a family, in bands where it would take too much."""
    reason = banded.obstacle(vae)
    if reason is not None and block_by_block.install(vae) is None:
        what = "the blocks of its decoder one by one, each for many tiles"
    elif reason is None:
        banded.install(vae)
        vae.patcher = patcher_of(vae.first_stage_model, vae.patcher.load_device, vae.patcher.offload_device)
        what = f"in bands where it would take more than {LIMIT / 2**30:.1f} GiB"
    else:
        what = f"all at once, because {reason}"
    LEDGER.say_once(
        f"{path}: this VAE is of a kind without fused kernels: ComfyUI's code computes it, {what}.", logging.INFO
    )


def vae_dtype(device: torch.device | None = None) -> torch.dtype | None:
    """The type in which a VAE that a family knows computes on a device, by default ComfyUI's VAE
    device. None: as stock chooses.

    Our kernels are fp16. Of fp16 and bf16, both of which stock allows for these VAEs, it would take
    bf16 from Ampere on; fp16 is asked for first here. The flags for a VAE's type, and cards whose
    fp16 stock does not trust, count as they do there.
    """
    device = device or comfy.model_management.vae_device()
    if obstacle(device) is not None:
        return None
    chosen: torch.dtype = comfy.model_management.vae_dtype(device, [torch.float16, torch.bfloat16, torch.float32])
    return chosen
