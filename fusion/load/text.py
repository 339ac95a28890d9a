"""A file becomes a stock CLIP: text encoders, streamed or in stock's memory, under the names of any
of their authors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import comfy.hooks
import comfy.sd
import comfy.utils
import torch

from ...kernels_cuda import STANDARD, KernelPolicy
from ...memory import Checkpoint, JoinedCheckpoint
from ..base.family import Family, Role
from ..compatibility import families as compatibility
from ..files.completeness import naming, naming_each
from ..graphs.calls import Graphs
from ..identify import clip_types, encoder_sets, ltx_projection
from ..identify.checkpoint_info import CheckpointInfo, renamed
from ..patcher.streaming_patcher import StreamingModelPatcher
from ..stream.block_stream import BlockStream
from ..stream.text_encoding import hold_while_writing, watch_encoding
from ..weights.meta_tensor import real
from . import build, encoders
from .common import let_stream, looked_at, open_to_stream, prepare, streamed_or_stock
from .missing import encoder_from, require_whole
from .request import FREE, LoadRequest, keep


def load_text_encoder(
    path: str,
    embedding_folders: Sequence[str],
    policy: KernelPolicy = STANDARD,
    vram_budget: float = 0.0,
    kind: str = clip_types.AUTO,
    options: Mapping[str, Any] | None = None,
    others: Sequence[str] = (),
    further: Sequence[str] = (),
) -> Any:
    """Load the text encoder at `path` as a stock CLIP, which computes through our ops if a family
    knows it.

    embedding_folders   searched for `embedding:name`
    vram_budget         as for `load_diffusion_model`
    kind                stock's type of text encoder in lower case, or `auto` if the file tells
    options             stock's model_options, in addition to those that the file tells
    others              the user's other text encoders, which lend it a tokenizer if its file has
                        none
    further             files beside `path` that make one text encoder with it
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
        further=further,
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
    """What the headers tell: the files in the order in which stock is given them, tensors that each
    borrows from another file, stock's model_options, and stock's CLIPType."""

    infos: Sequence[CheckpointInfo]
    borrowed: Sequence[Mapping[str, torch.Tensor]]
    options: dict[str, Any]
    clip_type: Any


def _told(infos: Sequence[CheckpointInfo], request: LoadRequest) -> _Told:
    """Raises `WrongFile` if no file has the tokenizer, if one is broken, or if the type of the
    files is not known."""
    infos = encoder_sets.in_stocks_order(infos)
    options: dict[str, Any] = {}
    for info in infos:
        info.require_tokenizer()
        if info.family is not None and info.family.options is not None:
            options.update(info.family.options(info.header))
    borrowed = [info.borrowed(request.others) for info in infos]
    return _Told(infos, borrowed, {**options, **request.options}, encoder_sets.kind_of(infos, request.kind))


# --------------------------------------------------------------------------------------------------------------- stock's


def stocks(request: LoadRequest) -> Any:
    """A CLIP in stock's own memory management."""
    encoder_sets.refuse_twice(request.paths)
    look = encoder_sets.look_of(request.paths)
    with ExitStack() as opened:
        looked = [opened.enter_context(looked_at(path, look)) for path in request.paths]
        known = [info for info in looked if info is not None]
        told = _told(known, request) if len(known) == len(looked) else None
        prepare(request)
        read = [_Read.of(path, info, request) for path, info in zip(request.paths, looked, strict=True)]
        if told is None:  # only stock reads some of the files (.pth), so they are checked in memory
            told = _told([one.info for one in read], request)
    given = {one.info.path: one for one in read}
    with naming_each([info.header for info in told.infos]):
        clip: Any = comfy.sd.load_text_encoder_state_dicts(
            [
                clip_types.as_read(given[info.path].plain(more), told.clip_type)
                for info, more in zip(told.infos, told.borrowed, strict=True)
            ],
            request.embedding_folders,
            told.clip_type,
            model_options=told.options,
            disable_dynamic=request.disable_dynamic,
        )
    model = clip.cond_stage_model
    for info in told.infos:
        if encoder_sets.is_projection(info):
            names, net = ltx_projection.place_in(model, info.header)
        else:
            names = set(info.header.extents)
            net = encoder_from(model, names)
        require_whole(info.path, names if encoder_sets.is_known(info) else None, net)
    fuse(clip, request, [info.family for info in told.infos if info.family is not None])
    keep(clip.patcher, request, stocks)
    return clip


class _Read(NamedTuple):
    """A file that stock has read: its contents, and its tensors and metadata under stock's
    names."""

    info: CheckpointInfo
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, path: str, info: CheckpointInfo | None, request: LoadRequest) -> _Read:
        """info: by the header, of an open file; None: it has none."""
        if info is not None and encoder_sets.is_projection(info):
            return cls(info, real(dict(info.tensors)), info.header.metadata)  # all else is left unread
        with naming(path):
            tensors, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
        tensors, metadata = renamed(tensors, metadata or {}, path)
        if info is None:
            info = CheckpointInfo.of_tensors(tensors, path)
            info.require_role(request.role)
            info.require_whole(request.role)
        return cls(info, tensors, metadata)

    def plain(self, borrowed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as stock's builder takes them."""
        return encoders.plain({**self.tensors, **borrowed}, self.metadata)


def fuse(clip: Any, request: LoadRequest, families: Sequence[Family]) -> None:
    """Let a stock CLIP's encoders compute through our ops, if ComfyUI's code is unchanged.
    families: those that know an encoder in it."""
    policy = request.kernels
    for family in _each_once(families):
        compatibility.checked(family, clip.patcher.load_device, policy).fuse(clip.cond_stage_model, policy)


def _each_once(families: Iterable[Family]) -> list[Family]:
    return list({family.name: family for family in families}.values())


# ------------------------------------------------------------------------------------------------------------- streamed


def streamed(request: LoadRequest) -> Any:
    """A CLIP whose encoder blocks stream from the files."""
    encoder_sets.refuse_twice(request.paths)
    look = encoder_sets.look_of(request.paths)
    with ExitStack() as opened:
        sources = [opened.enter_context(open_to_stream(path, part=part)) for part, path in enumerate(request.paths)]
        infos = [look(source) for source in sources]
        for info in infos:
            info.say_doubts()
        told = _told(infos, request)
        prepare(request)
        source = sources[0] if len(sources) == 1 else JoinedCheckpoint(sources)
        files = [
            encoders.EncoderFile(info.opened, encoder_sets.is_known(info), borrowed)
            for info, borrowed in zip(told.infos, told.borrowed, strict=True)
        ]
        families = {info.opened.part: [info.family] for info in told.infos if info.family is not None}
        clip, parts = encoders.text_encoder(source, files, request, told.clip_type, told.options)
        streaming_clip(source, clip, parts, families, request)
        opened.pop_all()  # the stream closes the files from now on
    keep(clip.patcher, request, streamed)
    return clip


def streaming_clip(
    source: Checkpoint,
    clip: Any,
    parts: build.Skeleton,
    families: Mapping[int, Sequence[Family]],
    request: LoadRequest,
) -> None:
    """Let a CLIP that was made with these parts stream from its files. families: those that know an
    encoder, by the number of its file."""
    policy, device = request.kernels, clip.patcher.load_device
    every = _each_once(family for some in families.values() for family in some)
    found = {family.name: compatibility.checked(family, device, policy) for family in every}
    known = {name: family for name, family in found.items() if family.fuse(parts.model, policy)}
    idle: set[int] = set()
    for part, some in families.items():
        # With several encoders in a file the last blocks belong to one of them.
        if len(some) == 1 and some[0].name in known:
            idle |= _idle(known[some[0].name], part, parts, device)
    stream = BlockStream(
        source,
        parts.blocks,
        parts.layers,
        device,
        request.budget_bytes,
        parts.left,
        Role.TEXT.loader,
        spare=len(parts.heads),
        idle=idle,
    )
    let_stream(parts.model, stream, source.label, next(iter((known or found).values()), None), len(known))
    stream.residency.graphs = Graphs(stream, parts.model)
    watch_encoding(parts.model, stream)
    for network, block in parts.heads:
        hold_while_writing(network, stream, block)
    # As stock's CLIP sets up its own patcher.
    clip.patcher = StreamingModelPatcher(parts.model, device, clip.patcher.offload_device)
    clip.patcher.set_model_compute_dtype(torch.float32)
    clip.patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
    clip.patcher.is_clip = True


def _idle(family: Family, part: int, parts: build.Skeleton, device: torch.device) -> set[int]:
    """The numbers of the blocks in a file that its family says are rarely called."""
    if family.idle is None:
        return set()
    called = parts.layers[: len(parts.layers) - len(parts.heads)]
    own = [i for i, layer in enumerate(called) if any(weight.extent.part == part for weight in layer.weights)]
    return set(own[len(own) - family.idle(parts.model, device) :])
