"""One file becomes a stock MODEL, CLIP and VAE: whole checkpoints, each part like a file of its
own.

The diffusion model streams, and so do the text encoders if their weights are tensors of the file.
The VAE, and a text encoder that cannot stream, have their tensors read, and no others. For a part
that the file lacks the node returns what stock's Load Checkpoint does: no CLIP, or a VAE that says
so when it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple

import comfy.sd
import comfy.utils

from ...kernels_cuda import LEDGER, STANDARD, KernelPolicy
from ...memory import Checkpoint
from ..base import file_formats
from ..base.errors import NotStreamable
from ..base.family import Family, Role
from ..families import family_of
from ..files.checkpoint_parts import CheckpointParts
from ..files.completeness import naming
from ..identify.checkpoint_info import CheckpointInfo, header_of
from ..weights.meta_tensor import real
from . import diffusion, encoders, vae
from .common import open_to_stream, streamed_or_stock
from .missing import require_whole
from .request import LoadRequest, keep
from .text import fuse, streaming_clip

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Parts(NamedTuple):
    """Stock's objects. clip: None if the file has no text encoder. vae: reports at use if the file
    has none."""

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
    """Load the checkpoint at `path`. Parts that a family knows compute through our ops.

    embedding_folders   searched for `embedding:name`
    vram_budget         as for `load_diffusion_model`, for the diffusion model and for the text
                        encoders
    options             stock's model_options of the text encoders
    """
    request = LoadRequest(
        path, Role.CHECKPOINT, policy, vram_budget, embedding_folders=embedding_folders, options=options
    )
    parts: Parts = streamed_or_stock(request, _streamed, _stocks)
    return parts


def beside_the_model(path: str) -> Beside | None:
    """The parts that a file has beside its diffusion model, by its header; None: it has no
    header."""
    if not file_formats.has_header(path):
        return None
    with Checkpoint.open(path) as source:
        parts = CheckpointInfo.of(source).parts
        return Beside(bool(parts.text), bool(parts.vae))


def _streamed(request: LoadRequest) -> Parts:
    model = diffusion.streamed(request.part(Role.DIFFUSION))
    return Parts(model, _streamed_clip(request.part(Role.TEXT)), _vae(request.part(Role.VAE)))


def _stocks(request: LoadRequest) -> Parts:
    """All parts in stock's own memory management, like files of their own with vram_budget 0."""
    model = diffusion.stocks(request.part(Role.DIFFUSION))
    return Parts(model, _stocks_clip(request.part(Role.TEXT)), _vae(request.part(Role.VAE)))


# -------------------------------------------------------------------------------------------------------- text encoders


def _streamed_clip(request: LoadRequest) -> Any:
    """The text encoders, streamed if they can be."""
    with ExitStack() as opened:
        source = opened.enter_context(open_to_stream(request.path))
        parts = CheckpointInfo.of(source).parts
        if not parts.text:
            return None
        families = _families(parts)
        try:
            clip, skeleton = encoders.text_of_checkpoint(source, request, parts, is_known=bool(families))
            streaming_clip(source, clip, skeleton, {0: families}, request)
            opened.pop_all()  # the stream closes the file from now on
        except NotStreamable as reason:
            LEDGER.say_once(f"{reason} Its text encoder is loaded as stock does now.", logging.INFO)
            clip = _clip_in_memory(request, parts)
    keep(clip.patcher, request, _streamed_clip)
    return clip


def _stocks_clip(request: LoadRequest) -> Any:
    """The text encoders in stock's memory management."""
    with naming(request.path):
        tensors, metadata = comfy.utils.load_torch_file(request.path, return_metadata=True)
    parts = CheckpointParts(request.path, tensors, metadata)
    if not parts.text:
        return None
    clip = _clip_in_memory(request, parts)
    keep(clip.patcher, request, _stocks_clip)
    return clip


def _clip_in_memory(request: LoadRequest, parts: CheckpointParts) -> Any:
    """The text encoders from tensors in memory, read here if they are stand-ins."""
    with naming(request.path):
        own = real(parts.text)
        names, families = tuple(own), _families(parts)
        clip = parts.clip(own, request.embedding_folders, request.options, disable_dynamic=request.disable_dynamic)
    require_whole(request.path, names if families else None, clip.cond_stage_model)
    fuse(clip, request, families)
    return clip


def _families(parts: CheckpointParts) -> list[Family]:
    """The families of a checkpoint's text encoders, without repetition."""
    found = (family_of(header_of(encoder)) for encoder in parts.encoders())
    return list({family.name: family for family in found if family is not None and family.role is Role.TEXT}.values())


# ------------------------------------------------------------------------------------------------------------------ VAE


def _vae(request: LoadRequest) -> Any:
    """The VAE of a checkpoint, of which only the VAE's tensors are read."""
    path = request.path
    if file_formats.has_header(path):
        with Checkpoint.open(path) as source, naming(path):
            info = CheckpointInfo.of(source)
            weights, metadata = real(info.parts.vae), dict(info.header.metadata)
    else:
        with naming(path):
            tensors, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
        weights = CheckpointParts(path, tensors, metadata).vae
    if not weights:
        return comfy.sd.VAE(sd={})  # reports at use that the checkpoint has none
    made = vae.of_tensors(request, weights, metadata)
    keep(made.patcher, request, _vae)
    return made
