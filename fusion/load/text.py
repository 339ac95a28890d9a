"""A file becomes a stock CLIP: text encoders, streamed or in stock's memory, under the names of any
of their authors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import comfy.hooks
import comfy.sd
import comfy.utils
import torch

from ...kernels_cuda import STANDARD, KernelPolicy
from ...memory import Checkpoint
from ..base.family import Family, Role
from ..compatibility import families as compatibility
from ..files.completeness import naming
from ..graphs.calls import Graphs
from ..identify import clip_types
from ..identify.checkpoint_info import CheckpointInfo, look_at, renamed
from ..patcher.streaming_patcher import StreamingModelPatcher
from ..stream.block_stream import BlockStream
from ..stream.text_encoding import hold_while_writing, watch_encoding
from . import build
from .common import let_stream, looked_at, open_to_stream, prepare, streamed_or_stock
from .missing import require_whole
from .request import FREE, LoadRequest, keep


def load_text_encoder(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy = STANDARD,
    vram_budget: float = 0.0,
    kind: str = clip_types.AUTO,
    options: Mapping[str, Any] | None = None,
    others: Sequence[str] = (),
) -> Any:
    """Load the text encoder at `path` as a stock CLIP, which computes through our ops if a family
    knows it.

    embedding_folders   searched for `embedding:name`
    vram_budget         as for `load_diffusion_model`
    kind                stock's type of text encoder in lower case, or `auto` if the file tells
    options             stock's model_options, in addition to those that the file tells
    others              the user's other text encoders, which lend it a tokenizer if its file has
                        none
    """
    request = LoadRequest(
        path,
        Role.TEXT,
        policy,
        vram_budget,
        embedding_folders=embedding_folders,
        kind=kind,
        options=options or {},
        others=others,
    )
    return load(request)


def load_streamed_text_encoder(
    path: str,
    embedding_folders: Sequence[str],
    vram_budget: float | None = None,
    policy: KernelPolicy = STANDARD,
    **others: Any,
) -> Any:
    """Load the text encoder at `path` as a CLIP whose encoder blocks stream from the file.

    vram_budget: GiB of VRAM for the blocks' weights; None: all free VRAM. others: of `LoadRequest`.
    """
    budget = FREE if vram_budget is None else vram_budget
    return streamed(LoadRequest(path, Role.TEXT, policy, budget, embedding_folders=embedding_folders, **others))


def load(request: LoadRequest) -> Any:
    """The requested CLIP."""
    return streamed_or_stock(request, streamed, stocks)


class _Told(NamedTuple):
    """Tensors borrowed from another file, stock's model_options, and stock's CLIPType, by the
    header."""

    borrowed: Mapping[str, torch.Tensor]
    options: dict[str, Any]
    clip_type: Any


def _told(info: CheckpointInfo, request: LoadRequest) -> _Told:
    """Raises `WrongFile` if no file has the tokenizer, if it is broken, or if the file's type is
    not known."""
    borrowed = info.borrowed(request.others)
    info.require_tokenizer()
    family = info.family
    options = {} if family is None or family.options is None else family.options(info.header)
    return _Told(borrowed, {**options, **request.options}, clip_types.kind_of(info, request.kind))


# --------------------------------------------------------------------------------------------------------------- stock's


def stocks(request: LoadRequest) -> Any:
    """A CLIP in stock's own memory management."""
    path = request.path
    with looked_at(request) as info:
        told = None if info is None else _told(info, request)
    prepare(request)
    with naming(path):
        tensors, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
    tensors, metadata = renamed(tensors, metadata or {}, path)
    # Only stock reads such files (.pth), so they are checked in memory.
    if info is None or told is None:
        info = CheckpointInfo.of_tensors(tensors, path)
        info.require_role(Role.TEXT)
        info.require_whole(Role.TEXT)
        told = _told(info, replace(request, kind="wan") if request.kind == clip_types.AUTO else request)
    with naming(path):
        tensors = {**tensors, **told.borrowed}
        plain, _ = comfy.utils.convert_old_quants(tensors, model_prefix="", metadata=dict(metadata))
        clip: Any = comfy.sd.load_text_encoder_state_dicts(
            [plain],
            request.embedding_folders,
            told.clip_type,
            model_options=told.options,
            disable_dynamic=request.disable_dynamic,
        )
    known = [] if info.family is None else [info.family]
    fuse(clip, request, known, info.header.extents if known else None, is_part=True)
    keep(clip.patcher, request, stocks)
    return clip


def fuse(
    clip: Any,
    request: LoadRequest,
    families: Sequence[Family],
    names: Collection[str] | None,
    *,
    is_part: bool = False,
) -> None:
    """Check that a stock CLIP has every weight from its file, and let its encoders compute through
    our ops, if ComfyUI's code is unchanged.

    families        those that know an encoder in it
    names, is_part  as in `require_whole`
    """
    require_whole(request.path, names, clip.cond_stage_model, is_part=is_part)
    policy = request.kernels
    for family in families:
        compatibility.checked(family, clip.patcher.load_device, policy).fuse(clip.cond_stage_model, policy)


# ------------------------------------------------------------------------------------------------------------- streamed


def streamed(request: LoadRequest) -> Any:
    """A CLIP whose encoder blocks stream from the file."""
    source = open_to_stream(request.path)
    try:
        info = look_at(source, Role.TEXT)
        info.say_doubts()
        told = _told(info, request)
        prepare(request)
        families = () if info.family is None else (info.family,)
        clip, parts = build.text_encoder(
            source, request, told.clip_type, told.options, told.borrowed, is_known=bool(families)
        )
        streaming_clip(source, clip, parts, families, request)
    except BaseException:
        source.close()
        raise
    keep(clip.patcher, request, streamed)
    return clip


def streaming_clip(
    source: Checkpoint, clip: Any, parts: build.Skeleton, families: Sequence[Family], request: LoadRequest
) -> None:
    """Let a CLIP that was made with these parts stream from its file. families: those that know an
    encoder in it."""
    policy, device = request.kernels, clip.patcher.load_device
    found = [compatibility.checked(family, device, policy) for family in families]
    known = [family for family in found if family.fuse(parts.model, policy)]
    # With several encoders the last blocks belong to one of them.
    idle = known[0].idle if len(known) == 1 else None
    stream = BlockStream(
        source,
        parts.blocks,
        parts.layers,
        device,
        request.budget_bytes,
        parts.left,
        Role.TEXT.loader,
        spare=len(parts.heads),
        idle=0 if idle is None else idle(parts.model, device),
    )
    let_stream(parts.model, stream, request.path, next(iter(known or found), None), len(known))
    stream.residency.graphs = Graphs(stream, parts.model)
    watch_encoding(parts.model, stream)
    for network, block in parts.heads:
        hold_while_writing(network, stream, block)
    # As stock's CLIP sets up its own patcher.
    clip.patcher = StreamingModelPatcher(parts.model, device, clip.patcher.offload_device)
    clip.patcher.set_model_compute_dtype(torch.float32)
    clip.patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
    clip.patcher.is_clip = True
