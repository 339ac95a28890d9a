"""A stock CLIP whose encoders' weights stay in their files, one or several.

Stock builds it of stand-ins as it does of tensors (`build.py`). Then each file's tensors are given
to it once more, this time to be kept, and its encoders are asked for their blocks. What writes is a
block too; tables of tokens, and large products outside of blocks, stay in the file.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from torch import nn

from ...memory import Checkpoint, WeightFile
from ..base.errors import NotStreamable
from ..base.file_formats import without_streaming
from ..base.subclassing import mix
from ..files.checkpoint_parts import NETWORK, CheckpointParts, Tensors
from ..files.completeness import naming, naming_each, say_leftovers
from ..files.llama_cpp import has_no_vision
from ..identify.clip_types import as_read
from ..stream import no_head, no_vision
from ..stream.blocks import blocks_of, found_in
from ..stream.embedding import FileEmbedding
from ..stream.file_linear import large_products
from ..weights.meta_tensor import StandIn, tensors_of
from ..weights.paged import Paged
from ..weights.storage import storage_of, stored
from . import build, filling
from .missing import Missing, names_of
from .request import LoadRequest


@dataclass(frozen=True)
class EncoderFile:
    """One file of a text encoder.

    source    its checkpoint, under stock's names
    is_known  whether a sound file has every weight of such a model
    borrowed  tensors that it lacks, from another file
    """

    source: Checkpoint
    is_known: bool
    borrowed: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def header(self) -> WeightFile:
        return self.source.files[0]

    @property
    def is_packed(self) -> bool:
        """Whether it has tensors in ggml's blocks."""
        return any(extent.is_packed for extent in self.source.extents.values())

    @property
    def path(self) -> Path:
        return self.header.path

    def tensors(self) -> Tensors:
        """Its tensors, unread, as stock's builder takes them."""
        with naming(self.path):
            return plain({**tensors_of(self.source), **self.borrowed}, self.header.metadata)


def plain(tensors: Tensors, metadata: Mapping[str, str]) -> Tensors:
    """A file's tensors with their scales where stock's present form has them."""
    found: Tensors = comfy.utils.convert_old_quants(tensors, model_prefix="", metadata=dict(metadata))[0]
    return found


class _Given(list[Tensors]):
    """The files' tensors for stock's builder. Some of its models take out of a dictionary what they
    load, but the tensors are loaded once more, so a loop over them sees copies."""

    def __iter__(self) -> Iterator[Tensors]:
        return map(dict, super().__iter__())


def text_encoder(
    source: Checkpoint, files: Sequence[EncoderFile], request: LoadRequest, kind: Any, options: Mapping[str, Any]
) -> tuple[Any, build.Skeleton]:
    """The text encoder in these files as a stock CLIP, as `comfy.sd.load_clip` would make it, and
    its parts.

    source   the file, or all of them
    files    in the order in which stock is given them
    kind     stock's CLIPType
    options  stock's model_options
    """
    headers = [file.header for file in files]
    quietly = no_vision.unheard() if any(map(has_no_vision, headers)) else contextlib.nullcontext()
    with build.naming_files(source):
        given = _Given(as_read(file.tensors(), kind) for file in files)  # stock renames the tensors in this list
        wide = list(map(filling.is_wide, given))
        with naming_each(headers), build.dropping_bytes(), quietly, _staying():
            clip: Any = comfy.sd.load_text_encoder_state_dicts(
                given, request.embedding_folders, kind, model_options={**options, **_where()}, disable_dynamic=True
            )
        model = clip.cond_stage_model
        loaded = [
            _Loaded(file, partial(model.load_sd, tensors), was_asked)
            for file, tensors, was_asked in zip(files, given, wide, strict=True)
        ]
        return clip, _divided(source, model, loaded)


def text_of_checkpoint(
    source: Checkpoint, request: LoadRequest, parts: CheckpointParts, *, is_known: bool
) -> tuple[Any, build.Skeleton]:
    """The text encoders of a whole checkpoint as a stock CLIP, and their parts. parts: of
    `source`."""
    tensors, options = parts.text, {**request.options, **_where()}
    with build.naming_files(source):
        was_asked = filling.is_wide(tensors)
        with naming(source.files[0].path), build.dropping_bytes():
            clip = parts.clip(dict(tensors), request.embedding_folders, options, disable_dynamic=True)
        model = clip.cond_stage_model
        loads = partial(model.load_state_dict, tensors, strict=False, assign=True)
        return clip, _divided(source, model, [_Loaded(EncoderFile(source, is_known), loads, was_asked)])


@contextlib.contextmanager
def _staying() -> Iterator[None]:
    """Raise `NotStreamable` if stock moves a text encoder while it builds it, because stand-ins have
    no bytes to move. It does so for a type that it does not cast on the device, such as FP64."""
    try:
        yield
    except NotImplementedError as error:  # torch's, of a tensor on the meta device
        raise NotStreamable("ComfyUI knows no cast from the type of its weights on this device") from error


def _where() -> Mapping[str, torch.device]:
    """Stock's options for a text encoder that will stream."""
    return {
        "load_device": comfy.model_management.get_torch_device(),  # whose VRAM the budget counts
        # The CPU, in a spelling that stock does not take for the load device: it loads a text
        # encoder at once that is made on its load device.
        "initial_device": torch.device("cpu", 0),
    }


class _Loaded(NamedTuple):
    """A file whose tensors a text encoder is to hold.

    loads      gives it the tensors, and returns the missing and unexpected names as torch does
    was_asked  whether a type of fp8 is the user's wish, not the file's
    """

    file: EncoderFile
    loads: Callable[[], Any]
    was_asked: bool


def _divided(source: Checkpoint, model: Any, loaded: Sequence[_Loaded]) -> build.Skeleton:
    """Divide a text encoder that stock has made into blocks. source: of all its files."""
    types = filling.types_of(model)
    for module in model.modules():
        module.can_assign_sd = True  # lets stock's encoders keep the tensors that they are given
    missing = [_filled_from(one, model) for one in loaded]
    filling.cast(model, types, exactly=False)
    named = found_in(model)
    for one in loaded:
        if one.was_asked:
            filling.cast_blocks(filling.of_part(named, one.file.source.part), types)
    root = _root_of([name for name, _ in named])
    heads = list(_heads(model))
    named += [(name, head) for name, head, _ in heads]
    tables = [head for _, head, _ in heads]
    filling.keep_packed(named, tables)
    for one in loaded:
        if one.file.is_packed:
            filling.keep_narrow(filling.of_part(named, one.file.source.part), tables)
    blocks = blocks_of(root, [(name.removeprefix(root), module) for name, module in named])
    paged = [module for _, module in named]
    left_there = itertools.chain(_tables(model, source), large_products(model, source, paged))
    blocks, layers, left = build.filled(model, blocks, missing, source, tables=left_there)
    first = len(blocks) - len(heads)
    return build.Skeleton(model, blocks, layers, left, tuple((net, first + i) for i, (*_, net) in enumerate(heads)))


def _filled_from(loaded: _Loaded, model: Any) -> Missing:
    """Let a text encoder hold a file's tensors."""
    file = loaded.file
    with naming(file.path):
        missing, unexpected = loaded.loads()
    if has_no_vision(file.header):
        no_vision.take_out(model, file.path)
    no_head.take_out(model, missing, file.path)
    if unexpected:
        logging.debug("clip unexpected: %s", unexpected)  # stock's words
    if file.is_known:
        inner = (name.rpartition(NETWORK)[2] for name in unexpected)  # a checkpoint has whole names
        say_leftovers(file.path, inner, (name.partition(NETWORK)[2] for name in names_of(model)))
    return Missing(file.path, missing, file.is_known)


def _root_of(names: Sequence[str]) -> str:
    """The prefix of the names of all blocks of a text encoder model, up to its only network; empty
    if it has several."""
    roots = {name.partition(NETWORK)[0] + NETWORK for name in names if NETWORK in name}
    return roots.pop() if len(roots) == 1 and all(NETWORK in name for name in names) else ""


def _heads(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """The output matrices of language models with their networks: `lm_head`, or else the token
    embedding."""
    names = {id(module): name for name, module in model.named_modules()}
    for network in model.modules():
        if hasattr(network, "logits"):
            inner: Any = getattr(network, "model", None)
            head = getattr(inner, "lm_head", None) or getattr(inner, "embed_tokens", None)
            if head is not None and isinstance(getattr(head, "weight", None), StandIn):
                yield names[id(head)], head, network


def _tables(model: nn.Module, source: Checkpoint) -> Iterator[Paged]:
    """The token embeddings, whose rows are read from the file on demand."""
    names = {id(module): name for name, module in model.named_modules()}
    seen = set()
    for owner in model.modules():
        ask = getattr(owner, "get_input_embeddings", None)
        table: Any = None if ask is None else ask()
        if table is None or id(table) in seen:
            continue
        seen.add(id(table))
        weight = table.weight
        data: Any = stored(weight)
        if not storage_of(weight).has_rows:
            raise NotStreamable(
                f"{source.label}: its token embedding is quantised, of which no rows can be read. "
                + without_streaming(*(file.path for file in source.files))
            )
        if isinstance(data, StandIn) and data.extent is not None:
            mix(table, FileEmbedding, fusestream_source=source, fusestream_extent=data.extent)
            name = names[id(table)]
            yield Paged(f"{name}.weight", f"{name}.weight", table, "weight", table.weight)
