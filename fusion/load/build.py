"""A stock model whose blocks' weights stay in the file.

Stock's own functions build it from stand-ins (`weights/meta_tensor.py`), with the same conversions
of old layouts, the same detection, and the same choice of types and operations. Then the network is
asked for its blocks (`stream/blocks.py`). The weights of their operations that are tensors of the
file are paged; all other tensors are read (`filling.py`). So a model of 28 GB is built in the
memory of its embeddings, whatever its tensors are called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from torch import nn

from ...memory import Checkpoint, Layer
from ..base.errors import NotStreamable
from ..base.family import Family
from ..base.file_formats import without_streaming
from ..base.subclassing import mix
from ..files.checkpoint_parts import NETWORK, CheckpointParts, Tensors
from ..files.completeness import naming, say_leftovers
from ..files.llama_cpp import has_no_vision
from ..stream import no_head, no_vision
from ..stream.blocks import Block, blocks_of, found_in
from ..stream.embedding import FileEmbedding
from ..weights.meta_tensor import META, StandIn, tensors_of
from ..weights.paged import Paged
from ..weights.storage import storage_of, stored
from . import filling
from .missing import names_of, require_streamable
from .request import LoadRequest

# Bytes of a new module's parameter up to which it keeps its values, because some are never in the
# file.
KEPT = 1 << 16


@dataclass(frozen=True)
class Skeleton:
    """A model without its blocks' weights.

    model           stock's, which a patcher holds
    blocks, layers  the same things, for the model and for the pager
    left            weights outside of blocks that stay in the file
    heads           networks that can write, each with the number of the block of its output matrix.
                    These blocks come last
    stocks_type     the type in which stock would compute a diffusion model, if it is another one
    """

    model: Any
    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...]
    left: tuple[Paged, ...] = ()
    heads: tuple[tuple[nn.Module, int], ...] = ()
    stocks_type: torch.dtype | None = None


# ------------------------------------------------------------------------------------------------------ diffusion model


def diffusion_model(
    source: Checkpoint,
    request: LoadRequest,
    family: Family | None = None,
    preferred: Container[torch.dtype] | None = None,
) -> Skeleton:
    """The diffusion model in `source`, as `comfy.sd.load_diffusion_model` would make it.

    family     the family that knows the file, or None; a sound file of a known family has every
               weight
    preferred  types in which it should compute, if stock allows one of them; None: as stock chooses
    """
    path = source.files[0].path
    with _naming(source):
        with naming(path):
            every = tensors_of(source)
            tensors, metadata = _plain(every, dict(source.files[0].metadata))
            config, tensors, stocks_type = _configured(tensors, metadata, request, preferred)
            with _dropping_bytes():
                # In a whole checkpoint, tensors outside of the model tell how it predicts.
                model = config.get_model({**every, **tensors} if request.is_checkpoint else tensors, "")
            model.device = comfy.model_management.unet_offload_device()
            net = model.diffusion_model
            types = filling.types_of(net)
            tensors = config.process_unet_state_dict(tensors)
            missing, unexpected = net.load_state_dict(tensors, strict=False, assign=True)
        if unexpected:
            logging.warning("unet unexpected: %s", unexpected)  # stock's words
        if family is not None:
            say_leftovers(path, unexpected, names_of(net))
        was_asked = filling.is_wide(tensors)
        filling.cast(net, types, exactly=request.dtype is not None)
        named = found_in(net) if family is None or family.blocks is None else family.blocks(net)
        if was_asked:
            filling.cast_blocks(named, types)
        filling.keep_packed(named)
        blocks = blocks_of("diffusion_model.", named)
        blocks, layers, _ = _filled(net, blocks, missing, source, is_known=family is not None)
        for part in model.children():
            if part is not net:  # as a projection of the prompt
                filling.read_rest(part, ())
    return Skeleton(model, blocks, layers, stocks_type=stocks_type)


def _plain(tensors: Tensors, metadata: Any) -> tuple[Tensors, Any]:
    """A diffusion model's tensors in the present form and without the prefix of whole
    checkpoints."""
    tensors, metadata = comfy.utils.convert_old_quants(tensors, "", metadata=metadata)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    inner = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True)
    if inner:
        tensors, metadata = comfy.utils.convert_old_quants(inner, "", metadata=metadata)
    return tensors, metadata


def _configured(
    tensors: Tensors, metadata: Any, request: LoadRequest, preferred: Container[torch.dtype] | None
) -> tuple[Any, Tensors, torch.dtype | None]:
    """Stock's configuration of the model, its tensors under stock's names, and
    `Skeleton.stocks_type`."""
    parameters, kind = comfy.utils.calculate_parameters(tensors), comfy.utils.weight_dtype(tensors)
    detection = comfy.model_detection
    config = detection.model_config_from_unet(tensors, "", metadata=metadata)
    if config is None and (renamed := detection.convert_diffusers_mmdit(tensors, "")) is not None:
        config, tensors = detection.model_config_from_unet(renamed, ""), renamed
    elif config is None:
        config = detection.model_config_from_diffusers_unet(tensors)
        if config is not None:
            names = comfy.utils.unet_to_diffusers(config.unet_config)
            tensors = {ours: tensors[theirs] for theirs, ours in names.items() if theirs in tensors}
    if config is None:
        raise NotStreamable(
            f"{request.path} is in no layout that can be streamed: of no diffusion model that ComfyUI knows. "
            + without_streaming(request.path)
        )
    known: list[torch.dtype] = list(config.supported_inference_dtypes)
    own = [one for one in known if preferred is None or one in preferred]
    quantised = config.quant_config is not None
    held, computed = _chosen(own or known, parameters, kind, request.dtype, quantised=quantised)
    stocks = _computing(*_chosen(known, parameters, kind, request.dtype, quantised=quantised))
    config.set_inference_dtype(held, computed, device=comfy.model_management.get_torch_device())
    return config, tensors, None if stocks is _computing(held, computed) else stocks


def _chosen(
    known: list[torch.dtype], parameters: int, kind: torch.dtype | None, dtype: torch.dtype | None, *, quantised: bool
) -> tuple[torch.dtype, torch.dtype | None]:
    """Stock's choice among these types: the one to hold weights in, and the one to compute in if it
    differs."""
    mm = comfy.model_management
    held: torch.dtype = dtype or mm.unet_dtype(
        model_params=parameters, supported_dtypes=known, weight_dtype=None if quantised else kind
    )
    return held, mm.unet_manual_cast(None if quantised else held, mm.get_torch_device(), known)


def _computing(held: torch.dtype, computed: torch.dtype | None) -> torch.dtype:
    return held if computed is None else computed


# --------------------------------------------------------------------------------------------------------- text encoder


def text_encoder(
    source: Checkpoint,
    request: LoadRequest,
    kind: Any,
    options: Mapping[str, Any],
    borrowed: Mapping[str, torch.Tensor],
    *,
    is_known: bool,
) -> tuple[Any, Skeleton]:
    """The text encoder in `source` as a stock CLIP, as `comfy.sd.load_clip` would make it, and its
    parts.

    kind      stock's CLIPType
    options   stock's model_options
    borrowed  tensors that the file lacks, from another one
    is_known  whether a sound file has every weight of such a model
    """
    path = source.files[0].path
    quietly = no_vision.unheard() if has_no_vision(source.files[0]) else contextlib.nullcontext()
    with _naming(source):
        with naming(path):
            tensors = {**tensors_of(source), **borrowed}
            metadata = dict(source.files[0].metadata)
            tensors = comfy.utils.convert_old_quants(tensors, model_prefix="", metadata=metadata)[0]
        was_asked = filling.is_wide(tensors)
        given = [tensors]  # stock renames the tensors in this list
        with naming(path), _dropping_bytes(), quietly:
            clip: Any = comfy.sd.load_text_encoder_state_dicts(
                given, request.embedding_folders, kind, model_options={**options, **_where()}, disable_dynamic=True
            )
        loads = partial(clip.cond_stage_model.load_sd, given[0])
        return clip, _text_parts(source, clip.cond_stage_model, loads, was_asked=was_asked, is_known=is_known)


def text_of_checkpoint(
    source: Checkpoint, request: LoadRequest, parts: CheckpointParts, *, is_known: bool
) -> tuple[Any, Skeleton]:
    """The text encoders of a whole checkpoint as a stock CLIP, and their parts. parts: of
    `source`."""
    tensors, options = parts.text, {**request.options, **_where()}
    with _naming(source):
        was_asked = filling.is_wide(tensors)
        with naming(source.files[0].path), _dropping_bytes():
            clip = parts.clip(dict(tensors), request.embedding_folders, options, disable_dynamic=True)
        model = clip.cond_stage_model
        loads = partial(model.load_state_dict, tensors, strict=False, assign=True)
        return clip, _text_parts(source, model, loads, was_asked=was_asked, is_known=is_known)


def _where() -> Mapping[str, torch.device]:
    """Stock's options for a text encoder that will stream."""
    return {
        "load_device": comfy.model_management.get_torch_device(),  # whose VRAM the budget counts
        # The CPU, in a spelling that stock does not take for the load device: it loads a text
        # encoder at once that is made on its load device.
        "initial_device": torch.device("cpu", 0),
    }


def _text_parts(
    source: Checkpoint, model: Any, loads: Callable[[], Any], *, was_asked: bool, is_known: bool
) -> Skeleton:
    """Divide a text encoder that stock has made into blocks. loads: gives it the file's tensors,
    and returns the missing and unexpected names as torch does."""
    path = source.files[0].path
    types = filling.types_of(model)
    for module in model.modules():
        module.can_assign_sd = True  # lets stock's encoders keep the tensors that they are given
    with naming(path):
        missing, unexpected = loads()
    if has_no_vision(source.files[0]):
        no_vision.take_out(model, path)
    no_head.take_out(model, missing, path)
    if unexpected:
        logging.debug("clip unexpected: %s", unexpected)  # stock's words
    if is_known:
        inner = (name.rpartition(NETWORK)[2] for name in unexpected)  # a checkpoint has whole names
        say_leftovers(path, inner, (name.partition(NETWORK)[2] for name in names_of(model)))
    filling.cast(model, types, exactly=False)
    named = found_in(model)
    if was_asked:
        filling.cast_blocks(named, types)
    root = _root_of([name for name, _ in named])
    heads = list(_heads(model))
    named += [(name, head) for name, head, _ in heads]
    tables = [head for _, head, _ in heads]
    filling.keep_packed(named, tables)
    if any(extent.is_packed for extent in source.extents.values()):
        filling.keep_narrow(named, tables)
    blocks = blocks_of(root, [(name.removeprefix(root), module) for name, module in named])
    blocks, layers, left = _filled(model, blocks, missing, source, is_known=is_known, tables=_tables(model, source))
    first = len(blocks) - len(heads)
    return Skeleton(model, blocks, layers, left, tuple((net, first + i) for i, (*_, net) in enumerate(heads)))


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
                f"{source.files[0].path}: its token embedding is quantised, of which no rows can be read. "
                + without_streaming(source.files[0].path)
            )
        if isinstance(data, StandIn) and data.extent is not None:
            mix(table, FileEmbedding, fusestream_source=source, fusestream_extent=data.extent)
            name = names[id(table)]
            yield Paged(f"{name}.weight", f"{name}.weight", table, "weight", table.weight)


# ----------------------------------------------------------------------------------------------------------------- both


def _filled(
    net: nn.Module,
    blocks: Sequence[Block],
    missing: Iterable[str],
    source: Checkpoint,
    *,
    is_known: bool,
    tables: Iterable[Paged] = (),
) -> tuple[tuple[Block, ...], tuple[Layer, ...], tuple[Paged, ...]]:
    """Check that a network can stream, and read the tensors that do not. Returns its blocks, its
    layers, and the tables.

    missing, is_known  as in `require_streamable`
    tables             stay in the file beside the blocks
    """
    require_streamable(net, blocks, missing, source, is_known=is_known)
    layers = tuple(block.layer() for block in blocks)
    looked_up = list(tables)  # one of them may also be a head, and is emptied with the blocks
    blocks = tuple(dataclasses.replace(block, paged=filling.emptied(block.paged)) for block in blocks)
    left = filling.emptied(looked_up)
    filling.read_rest(net, (*(one for block in blocks for one in block.paged), *left))
    net.requires_grad_(False)
    return blocks, layers, left


@contextlib.contextmanager
def _naming(source: Checkpoint) -> Iterator[None]:
    """Add the file's name to a `NotStreamable` about its tensors."""
    path = str(source.files[0].path)
    try:
        yield
    except NotStreamable as error:
        if path in str(error):
            raise
        raise NotStreamable(f"{path}: {error}. {without_streaming(path)}") from error


@contextlib.contextmanager
def _dropping_bytes() -> Iterator[None]:
    """Give large parameters of networks that this thread makes meanwhile no bytes. Small parameters
    stay as stock makes them, and those of modules that a model makes beside its finished network,
    because stock fills these at once."""
    thread, finished = threading.get_ident(), False

    def noted(_module: Any, name: str, _part: Any) -> None:
        nonlocal finished
        finished |= name == "diffusion_model" and threading.get_ident() == thread

    def dropped(_module: Any, _name: str, parameter: Any) -> Any:
        built_here = parameter is not None and threading.get_ident() == thread and not finished
        if not built_here or type(parameter) is not nn.Parameter or parameter.is_meta or parameter.nbytes <= KEPT:
            return None
        return nn.Parameter(torch.empty_like(parameter, device=META), requires_grad=parameter.requires_grad)

    modules = torch.nn.modules.module
    hooks = (
        modules.register_module_parameter_registration_hook(dropped),
        modules.register_module_module_registration_hook(noted),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
