"""A file becomes a stock CLIP: text encoders, streamed or stock's, in whatever names their authors gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import comfy.hooks
import comfy.model_management
import comfy.sd
import comfy.utils
import torch

from ...kernels_cuda import STANDARD, KernelPolicy
from ...memory import Checkpoint, WeightFile
from ..base import file_formats, other_cards
from ..base.family import Family, Role
from ..compatibility import families as compatibility
from ..files import sentencepiece
from ..files.completeness import naming, odd_layers, refuse_misfits
from ..graphs.calls import Graphs
from ..identify import clip_types, inspection, recognise
from ..patcher.streaming_patcher import StreamingModelPatcher
from ..stream.stream import Stream
from ..stream.text_encoding import hold_while_writing, watch_encoding
from . import build
from .common import (
    in_bytes,
    let_stream,
    open_to_stream,
    prepare,
    require_all_weights,
    streamed_or_stock,
)


def load_text_encoder(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy = STANDARD,
    vram_budget: float = 0.0,
    kind: str = clip_types.AUTO,
    options: Mapping[str, Any] | None = None,
    others: Sequence[str] = (),
) -> Any:
    """Load the text encoder at `path` as a stock CLIP, which computes through our ops where a family knows it.

    embedding_folders   searched for `embedding:name`
    vram_budget         as `load_diffusion_model` has it
    kind                stock's type of text encoder in lower case, or `auto` where the file tells
    options             stock's model_options, beside those that the file tells
    others              the user's other text encoders, from which it takes what it lacks: a tokenizer
    """
    device = comfy.model_management.text_encoder_device()
    policy = other_cards.policy_for(device, policy)
    return streamed_or_stock(
        path,
        lambda budget: load_streamed_text_encoder(path, embedding_folders, budget, policy, kind, options, others),
        lambda: _stock_text_encoder(path, embedding_folders, policy, kind, options, others),
        vram_budget,
        device,
    )


def _stock_text_encoder(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy,
    kind: str,
    options: Mapping[str, Any] | None,
    others: Sequence[str],
    disable_dynamic: bool = False,
) -> Any:
    recognise.require_stocks(path)
    if not file_formats.has_header(path):
        return _unheaded_text_encoder(path, embedding_folders, policy, kind, options, others, disable_dynamic)
    with Checkpoint.open(path) as source:
        as_stored = source.files[0]
        family, header, borrowed, all_options, clip_type = _looked_at(source, kind, options, others)
    prepare(policy)
    with naming(path):
        if header is as_stored and not borrowed:
            clip = comfy.sd.load_clip([path], embedding_folders, clip_type, all_options, disable_dynamic)
        else:
            tensors, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
            tensors, metadata = inspection.with_stocks_names(tensors, metadata or {}, family, path)
            clip = _clip_of(
                {**tensors, **borrowed}, metadata, embedding_folders, clip_type, all_options, disable_dynamic
            )
            given = (path, embedding_folders, policy, kind, options, others)
            clip.patcher.cached_patcher_init = (_stock_text_encoder_patcher, given)
    refuse_misfits(path, odd_layers(clip.cond_stage_model))
    if family is not None:
        require_all_weights(path, header.extents.keys(), clip.cond_stage_model, is_part=True)
        fuse([family], clip, policy)
    return clip


def _unheaded_text_encoder(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy,
    kind: str,
    options: Mapping[str, Any] | None,
    others: Sequence[str],
    disable_dynamic: bool,
) -> Any:
    """Of a file that only stock reads (.pth): whose it is and whether it is whole shows when it is in memory."""
    clip_type = getattr(comfy.sd.CLIPType, ("wan" if kind == clip_types.AUTO else kind).upper())
    with naming(path):
        tensors, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
    family = recognise.known(recognise.header_of(tensors, path), Role.TEXT)
    tensors, metadata = inspection.with_stocks_names(tensors, metadata or {}, family, path)
    header = recognise.header_of(tensors, path)
    inspection.require_whole(header, Role.TEXT, family)
    borrowed = _borrowed(header, family, others)
    if sentencepiece.TENSOR in tensors:
        sentencepiece.refuse_broken(path, tensors[sentencepiece.TENSOR])
    prepare(policy)
    with naming(path):
        all_options = _text_options(header, family, options)
        clip = _clip_of({**tensors, **borrowed}, metadata, embedding_folders, clip_type, all_options, disable_dynamic)
    given = (path, embedding_folders, policy, kind, options, others)
    clip.patcher.cached_patcher_init = (_stock_text_encoder_patcher, given)
    if family is not None:
        fuse([family], clip, policy)
    return clip


def _clip_of(
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str],
    embedding_folders: Sequence[str],
    clip_type: Any,
    options: Mapping[str, Any],
    disable_dynamic: bool,
) -> Any:
    """What `comfy.sd.load_clip` makes of a file with these tensors."""
    plain = comfy.utils.convert_old_quants(dict(tensors), model_prefix="", metadata=dict(metadata))[0]
    return comfy.sd.load_text_encoder_state_dicts(
        [plain], embedding_folders, clip_type, model_options=dict(options), disable_dynamic=disable_dynamic
    )


def _stock_text_encoder_patcher(*given: Any, disable_dynamic: bool = False, **_others: Any) -> Any:
    again: Any = partial(_stock_text_encoder, *given)
    return again(disable_dynamic=disable_dynamic).patcher


def load_streamed_text_encoder(
    path: str,
    embedding_folders: Sequence[str],
    vram_budget: float | None = None,
    policy: KernelPolicy = STANDARD,
    kind: str = clip_types.AUTO,
    options: Mapping[str, Any] | None = None,
    others: Sequence[str] = (),
) -> Any:
    """Load the text encoder at `path` as a CLIP whose encoder blocks stream from the file.

    vram_budget: GiB of VRAM for the blocks' weights; None: what is free.
    """
    source = open_to_stream(path)
    try:
        family, _, borrowed, all_options, clip_type = _looked_at(source, kind, options, others)
        prepare(policy)
        clip, parts = build.text_encoder(
            source, clip_type, embedding_folders, all_options, borrowed, is_known=family is not None
        )
        families = () if family is None else (family,)
        streaming_clip(source, clip, parts, families, policy, vram_budget)
    except BaseException:
        source.close()
        raise
    init = (path, embedding_folders, vram_budget, policy, kind, options, others)
    clip.patcher.cached_patcher_init = (_streamed_text_encoder_patcher, init)
    return clip


def streaming_clip(
    source: Checkpoint,
    clip: Any,
    parts: build.Skeleton,
    families: Sequence[Family],
    policy: KernelPolicy,
    vram_budget: float | None,
) -> None:
    """Let a CLIP that was made with these parts stream from its file. families: those that know an encoder in it."""
    device = clip.patcher.load_device
    found = [compatibility.checked(family, device, policy) for family in families]
    known = [family for family in found if family.fuse(parts.model, policy)]
    idle = known[0].idle if len(known) == 1 else None  # of several encoders the last blocks are those of one
    stream = Stream(
        source,
        parts.blocks,
        parts.layers,
        device,
        in_bytes(vram_budget),
        parts.left,
        Role.TEXT.loader,
        spare=len(parts.heads),
        idle=0 if idle is None else idle(parts.model, device),
    )
    let_stream(parts.model, stream, str(source.files[0].path), next(iter(known or found), None), len(known))
    stream.graphs = Graphs(stream, parts.model)
    watch_encoding(parts.model, stream)
    for network, block in parts.heads:
        hold_while_writing(network, stream, block)
    # As stock's CLIP makes its own.
    clip.patcher = StreamingModelPatcher(parts.model, device, clip.patcher.offload_device)
    clip.patcher.set_model_compute_dtype(torch.float32)
    clip.patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
    clip.patcher.is_clip = True


def _streamed_text_encoder_patcher(*given: Any, **_others: Any) -> StreamingModelPatcher:
    patcher: StreamingModelPatcher = load_streamed_text_encoder(*given).patcher
    return patcher


class _Found(NamedTuple):
    """What is known of a file before it is loaded: its family, its header with stock's names, what another file lends it, stock's
    options and type."""

    family: Family | None
    header: WeightFile
    borrowed: Mapping[str, torch.Tensor]
    options: dict[str, Any]
    clip_type: Any


def _looked_at(source: Checkpoint, kind: str, options: Mapping[str, Any] | None, others: Sequence[str]) -> _Found:
    family = inspection.look_at(source, Role.TEXT)
    header = source.files[0]
    inspection.say_doubts(header, family)
    borrowed = _borrowed(header, family, others)
    _refuse_broken_tokenizer(source)
    return _Found(
        family, header, borrowed, _text_options(header, family, options), clip_types.kind_of(source, family, kind)
    )


def fuse(families: Sequence[Family], clip: Any, policy: KernelPolicy) -> None:
    """Let a stock CLIP's encoders compute through our ops, as far as ComfyUI's code is what ours was written after."""
    for family in families:
        compatibility.checked(family, clip.patcher.load_device, policy).fuse(clip.cond_stage_model, policy)


def _text_options(header: WeightFile, family: Family | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    told = {} if family is None or family.options is None else family.options(header)
    return {**told, **(given or {})}


def _borrowed(header: WeightFile, family: Family | None, others: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """What the file lacks and another one of the user's has."""
    return {} if family is None or family.borrows is None else family.borrows(header, others)


def _refuse_broken_tokenizer(source: Checkpoint) -> None:
    own = source.extents.get(sentencepiece.TENSOR)
    if own is not None:
        sentencepiece.refuse_broken(source.files[0].path, source.read(own))
