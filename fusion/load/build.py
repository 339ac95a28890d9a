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
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from ..base.trained_sparse import TrainedSparse
from ..files.checkpoint_parts import Tensors
from ..files.completeness import naming, say_leftovers
from ..stream.blocks import Block, blocks_of, found_in
from ..weights.meta_tensor import META, tensors_of
from ..weights.paged import Paged
from . import filling
from .missing import Missing, names_of, require_streamable
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
    learned         the sparse attention that a diffusion model was trained with
    stocks_type     the type in which stock would compute a diffusion model, if it is another one
    """

    model: Any
    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...]
    left: tuple[Paged, ...] = ()
    heads: tuple[tuple[nn.Module, int], ...] = ()
    stocks_type: torch.dtype | None = None
    learned: TrainedSparse | None = None


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
    with naming_files(source):
        with naming(path):
            every = _in_stocks_shapes(tensors_of(source), source, family)
            tensors, metadata = _plain(every, dict(source.files[0].metadata))
            config, tensors, stocks_type = _configured(tensors, metadata, request, preferred)
            with dropping_bytes():
                # In a whole checkpoint, tensors outside of the model tell how it predicts.
                model = config.get_model({**every, **tensors} if request.is_checkpoint else tensors, "")
            model.device = comfy.model_management.unet_offload_device()
            net = model.diffusion_model
            tensors = config.process_unet_state_dict(tensors)
            learned = _grown(family, net, tensors)
            types = filling.types_of(net)
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
        lacking = [Missing(path, missing, family is not None)]
        blocks, layers, _ = filled(net, blocks, lacking, source)
        for part in model.children():
            if part is not net:  # as a projection of the prompt
                filling.read_rest(part, ())
    return Skeleton(model, blocks, layers, stocks_type=stocks_type, learned=learned)


def _grown(family: Family | None, net: Any, names: Collection[str]) -> TrainedSparse | None:
    """The sparse attention that the network was trained with. Its blocks get the modules for it."""
    if family is None or family.learned is None or family.grow is None:
        return None
    learned = family.learned(names, net.dim)
    if learned is not None:
        with dropping_bytes():
            family.grow(net, names)
    return learned


def _in_stocks_shapes(tensors: Tensors, source: Checkpoint, family: Family | None) -> Tensors:
    """A file's tensors in the shapes that stock knows."""
    shapes = {} if family is None or family.reshapes is None else family.reshapes(source.files[0])
    return {**tensors, **{name: tensors[name].reshape(shape) for name, shape in shapes.items()}}


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


# --------------------------------------------------------------------------------------------------- any network


def filled(
    net: nn.Module,
    blocks: Sequence[Block],
    missing: Sequence[Missing],
    source: Checkpoint,
    *,
    tables: Iterable[Paged] = (),
) -> tuple[tuple[Block, ...], tuple[Layer, ...], tuple[Paged, ...]]:
    """Check that a network can stream, and read the tensors that do not. Returns its blocks, its
    layers, and the tables.

    missing  of each file
    tables   stay in the file beside the blocks
    """
    require_streamable(net, blocks, missing, source)
    layers = tuple(block.layer() for block in blocks)
    looked_up = list(tables)  # one of them may also be a head, and is emptied with the blocks
    blocks = tuple(dataclasses.replace(block, paged=filling.emptied(block.paged)) for block in blocks)
    left = filling.emptied(looked_up)
    filling.read_rest(net, (*(one for block in blocks for one in block.paged), *left))
    net.requires_grad_(False)
    return blocks, layers, left


@contextlib.contextmanager
def naming_files(source: Checkpoint) -> Iterator[None]:
    """Add the files' names to a `NotStreamable` about their tensors."""
    paths = [file.path for file in source.files]
    try:
        yield
    except NotStreamable as error:
        if any(str(path) in str(error) for path in paths):
            raise
        raise NotStreamable(f"{source.label}: {error}. {without_streaming(*paths)}") from error


@contextlib.contextmanager
def dropping_bytes() -> Iterator[None]:
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
