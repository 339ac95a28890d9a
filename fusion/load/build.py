"""A stock model whose blocks' weights stay in the file.

It is built by stock's own functions, out of stand-ins (`weights/meta_tensor.py`): the same
conversions of old layouts, the same detection, the same choice of types and operations. Then the
network itself is asked what its blocks are (`blocks.py`) and which of their operations' weights are
tensors of the file; these are paged. Everything else is read. So a model of 28 GB is built in the
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
from types import MappingProxyType
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from torch import nn

from ...memory import Checkpoint, Extent, Layer
from ..base.errors import NotStreamable
from ..base.file_formats import without_streaming
from ..base.subclassing import mix
from ..files import checkpoint_parts
from ..files.completeness import (
    naming,
    odd_layers,
    refuse_lacking,
    refuse_misfits,
    say_leftovers,
)
from ..files.llama_cpp import has_no_vision
from ..stream import no_head, no_vision, progress
from ..stream.blocks import Block, blocks_of, found_in, operations, weights_of
from ..stream.embedding import FileEmbedding
from ..weights import ggml_blocks, ggml_tensor
from ..weights.meta_tensor import META, StandIn, tensors_of
from ..weights.paged import Paged
from ..weights.storage import FP8, is_quantised, stored

Tensors = dict[str, torch.Tensor]
Named = Sequence[tuple[str, nn.Module]]
FindBlocks = Callable[[nn.Module], Named]

KEPT = (
    1 << 16
)  # bytes of a new module's parameter that it keeps: some are never in the file, and start as what they are
# What stock too does without: of CLIP, the scale of its training and the identity, which start as what they are; of a language
# model that writes nothing, the words' matrix.
MAY_LACK = (".logit_scale", "logit_scale", "text_projection.weight", no_head.WEIGHT)
HALVES = (torch.float16, torch.bfloat16)
NETWORK = "transformer."  # of a text encoder model: where its network is


@dataclass(frozen=True)
class Skeleton:
    """
    model           what a patcher holds
    blocks, layers  the same things, to the model and to the pager
    left            what stays in the file
    heads           networks that can write, and the number of the block that their words come from. These come last
    stocks_type     of a diffusion model that computes in another type than stock would have it, stock's
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
    dtype: torch.dtype | None = None,
    find: FindBlocks = found_in,
    *,
    is_known: bool = False,
    preferred: Container[torch.dtype] | None = None,
    is_checkpoint: bool = False,
) -> Skeleton:
    """The diffusion model in `source`, as `comfy.sd.load_diffusion_model` would make it.

    dtype     in which to hold its weights; None: as stock chooses
    find      its blocks
    is_known  whether every weight of such a model is in a sound file
    preferred types in which it should compute, where stock knows it to be sound in one; None: as stock chooses
    is_checkpoint  whether stock would be asked for a whole checkpoint, of which marks beside the model tell how it predicts
    """
    path = source.files[0].path
    with _naming(source):
        with naming(path):
            every = tensors_of(source)
            tensors, metadata = _plain(every, dict(source.files[0].metadata))
            config, tensors, stocks_type = _configured(tensors, metadata, dtype, source, preferred)
            with _dropping_bytes():
                model = config.get_model({**every, **tensors} if is_checkpoint else tensors, "")
            model.device = comfy.model_management.unet_offload_device()
            net = model.diffusion_model
            types = _types(net)
            tensors = config.process_unet_state_dict(tensors)
            missing, unexpected = net.load_state_dict(tensors, strict=False, assign=True)
        if unexpected:
            logging.warning("unet unexpected: %s", unexpected)  # in stock's words
        if is_known:
            say_leftovers(path, unexpected, _names(net))
        was_asked = _is_wide(tensors)
        _cast(net, types, exactly=dtype is not None)
        named = find(net)
        if was_asked:
            _cast_blocks(named, types)
        _keep_packed(named)
        blocks = blocks_of("diffusion_model.", named)
        _require(net, blocks, missing, source, is_known=is_known)
        layers = tuple(block.layer() for block in blocks)
        blocks = tuple(dataclasses.replace(block, paged=_emptied(block.paged)) for block in blocks)
        _read_rest(net, (one for block in blocks for one in block.paged))
        net.requires_grad_(False)
    return Skeleton(model, blocks, layers, stocks_type=stocks_type)


def _plain(tensors: Tensors, metadata: Any) -> tuple[Tensors, Any]:
    """A diffusion model's tensors without what older files and whole checkpoints put around them."""
    tensors, metadata = comfy.utils.convert_old_quants(tensors, "", metadata=metadata)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    inner = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True)
    if inner:
        tensors, metadata = comfy.utils.convert_old_quants(inner, "", metadata=metadata)
    return tensors, metadata


def _configured(
    tensors: Tensors,
    metadata: Any,
    dtype: torch.dtype | None,
    source: Checkpoint,
    preferred: Container[torch.dtype] | None,
) -> tuple[Any, Tensors, torch.dtype | None]:
    """Stock's configuration of the model, its tensors under stock's own names, and `Skeleton.stocks_type`."""
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
            f"{source.files[0].path} is in no layout that can be streamed: of no diffusion model that ComfyUI knows. "
            + without_streaming(source.files[0].path)
        )
    known: list[torch.dtype] = list(config.supported_inference_dtypes)
    own = [one for one in known if preferred is None or one in preferred]
    quantised = config.quant_config is not None
    held, computed = _chosen(own or known, parameters, kind, dtype, quantised=quantised)
    stocks = _computing(*_chosen(known, parameters, kind, dtype, quantised=quantised))
    config.set_inference_dtype(held, computed, device=comfy.model_management.get_torch_device())
    return config, tensors, None if stocks is _computing(held, computed) else stocks


def _chosen(
    known: list[torch.dtype], parameters: int, kind: torch.dtype | None, dtype: torch.dtype | None, *, quantised: bool
) -> tuple[torch.dtype, torch.dtype | None]:
    """Stock's choice among these types: to hold weights in, and to compute in if that is another."""
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
    kind: Any,
    embedding_folders: Sequence[str],
    options: Mapping[str, Any],
    borrowed: Mapping[str, torch.Tensor] = MappingProxyType({}),
    *,
    is_known: bool = False,
) -> tuple[Any, Skeleton]:
    """The text encoder in `source` as a stock CLIP, as `comfy.sd.load_clip` would make it, and its parts.

    kind      stock's CLIPType
    options   stock's model_options
    borrowed  what the file lacks, out of another one
    is_known  whether every weight of such a model is in a sound file
    """
    path = source.files[0].path
    is_blind = has_no_vision(source.files[0])
    with _naming(source):
        metadata = dict(source.files[0].metadata)
        with naming(path):
            tensors = {**tensors_of(source), **borrowed}
            tensors = comfy.utils.convert_old_quants(tensors, model_prefix="", metadata=metadata)[0]
        was_asked = _is_wide(tensors)
        given = [tensors]  # stock renames them in here
        with naming(path), _dropping_bytes(), no_vision.unheard() if is_blind else contextlib.nullcontext():
            clip: Any = comfy.sd.load_text_encoder_state_dicts(
                given, embedding_folders, kind, model_options={**options, **_where()}, disable_dynamic=True
            )
        loads = partial(clip.cond_stage_model.load_sd, given[0])
        return clip, _text_parts(source, clip.cond_stage_model, loads, was_asked=was_asked, is_known=is_known)


def text_of_checkpoint(
    source: Checkpoint,
    config: Any,
    embedding_folders: Sequence[str],
    options: Mapping[str, Any],
    *,
    is_known: bool = False,
) -> tuple[Any, Skeleton]:
    """The same for the text encoders of a whole checkpoint. config: stock's, of the checkpoint."""
    path = source.files[0].path
    with _naming(source):
        with naming(path):
            every = tensors_of(source)
            tensors = checkpoint_parts.text_tensors(every, config)
        was_asked = _is_wide(tensors)
        with naming(path), _dropping_bytes():
            clip = checkpoint_parts.clip_of(
                dict(tensors), config, every, embedding_folders, {**options, **_where()}, disable_dynamic=True
            )
        model = clip.cond_stage_model
        loads = partial(model.load_state_dict, tensors, strict=False, assign=True)
        return clip, _text_parts(source, model, loads, was_asked=was_asked, is_known=is_known)


def _where() -> Mapping[str, torch.device]:
    """Stock's options for a text encoder that will stream."""
    return {
        "load_device": comfy.model_management.get_torch_device(),  # what the budget is of
        # The CPU, though not the same to stock: a text encoder that is made where it runs, stock loads at once.
        "initial_device": torch.device("cpu", 0),
    }


def _text_parts(
    source: Checkpoint, model: Any, loads: Callable[[], Any], *, was_asked: bool, is_known: bool
) -> Skeleton:
    """A text encoder that stock has made, in blocks. loads: gives it the file's tensors, and tells as torch which are missing."""
    path = source.files[0].path
    types = _types(model)
    for module in model.modules():
        module.can_assign_sd = True  # by which stock's encoders keep the tensors that they are given
    with naming(path):
        missing, unexpected = loads()
    if has_no_vision(source.files[0]):
        no_vision.take_out(model, path)
    no_head.take_out(model, missing, path)
    if unexpected:
        logging.debug("clip unexpected: %s", unexpected)  # in stock's words
    if is_known:
        inner = (name.rpartition(NETWORK)[2] for name in unexpected)  # of a checkpoint's, which are whole names
        say_leftovers(path, inner, (name.partition(NETWORK)[2] for name in _names(model)))
    _cast(model, types, exactly=False)
    named = found_in(model)
    if was_asked:
        _cast_blocks(named, types)
    root = _root_of([name for name, _ in named])
    heads = list(_heads(model))
    named += [(name, head) for name, head, _ in heads]
    tables = [head for _, head, _ in heads]
    _keep_packed(named, tables)
    if any(extent.is_packed for extent in source.extents.values()):
        _keep_narrow(named, tables)
    blocks = blocks_of(root, [(name.removeprefix(root), module) for name, module in named])
    _require(model, blocks, missing, source, is_known=is_known)
    layers = tuple(block.layer() for block in blocks)
    looked_up = list(_tables(model, source))  # of which one may be a head as well
    blocks = tuple(dataclasses.replace(block, paged=_emptied(block.paged)) for block in blocks)
    left = _emptied(looked_up)
    _read_rest(model, (*(one for block in blocks for one in block.paged), *left))
    model.requires_grad_(False)
    first = len(blocks) - len(heads)
    return Skeleton(model, blocks, layers, left, tuple((net, first + i) for i, (*_, net) in enumerate(heads)))


def _root_of(names: Sequence[str]) -> str:
    """What all of a text encoder model's blocks are below, up to its one network; nothing where it has several."""
    roots = {name.partition(NETWORK)[0] + NETWORK for name in names if NETWORK in name}
    return roots.pop() if len(roots) == 1 and all(NETWORK in name for name in names) else ""


def _heads(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """The matrices that a language model's words come from, with their networks: of their own, or the token embedding's."""
    names = {id(module): name for name, module in model.named_modules()}
    for network in model.modules():
        if hasattr(network, "logits"):
            inner: Any = getattr(network, "model", None)
            head = getattr(inner, "lm_head", None) or getattr(inner, "embed_tokens", None)
            if head is not None and isinstance(getattr(head, "weight", None), StandIn):
                yield names[id(head)], head, network


def _tables(model: nn.Module, source: Checkpoint) -> Iterator[Paged]:
    """The token embeddings: their rows are read from the file as they are asked for."""
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
        if is_quantised(weight) and not ggml_tensor.is_held(weight):
            raise NotStreamable(
                f"{source.files[0].path}: its token embedding is quantised, of which no rows can be read. "
                + without_streaming(source.files[0].path)
            )
        if isinstance(data, StandIn) and data.extent is not None:
            mix(table, FileEmbedding, fusestream_source=source, fusestream_extent=data.extent)
            name = names[id(table)]
            yield Paged(f"{name}.weight", f"{name}.weight", table, "weight", table.weight)


# ----------------------------------------------------------------------------------------------------------------- both


@contextlib.contextmanager
def _naming(source: Checkpoint) -> Iterator[None]:
    """What stands in the way of a file's tensors names the file."""
    path = str(source.files[0].path)
    try:
        yield
    except NotStreamable as error:
        if path in str(error):
            raise
        raise NotStreamable(f"{path}: {error}. {without_streaming(path)}") from error


@contextlib.contextmanager
def _dropping_bytes() -> Iterator[None]:
    """A network that is made meanwhile, in this thread, has large parameters without bytes; its tables and what it starts with are
    as stock makes them."""
    thread = threading.get_ident()

    def dropped(_module: Any, _name: str, parameter: Any) -> Any:
        built_here = parameter is not None and threading.get_ident() == thread
        if not built_here or type(parameter) is not nn.Parameter or parameter.is_meta or parameter.nbytes <= KEPT:
            return None
        return nn.Parameter(torch.empty_like(parameter, device=META), requires_grad=parameter.requires_grad)

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(dropped)
    try:
        yield
    finally:
        hook.remove()


Types = dict[tuple[int, str], torch.dtype]


def _types(net: nn.Module) -> Types:
    """The types that the model's parameters were made with: stock copies the file's tensors into these."""
    found = {}
    for module in net.modules():
        for name in {"weight", "bias", *module._parameters}:
            # Operations that make their weights as they load them have no parameter yet, and may note its type.
            made = module._parameters.get(name)
            noted = getattr(module, f"{name}_comfy_model_dtype", None) or (None if made is None else made.dtype)
            if noted is not None:
                found[id(module), name] = noted
    return found


def _cast(net: nn.Module, types: Types, *, exactly: bool) -> None:
    """The file's tensors in the model's types.

    Where these are fp8, because most of the file is or ComfyUI was asked for it, what the file has in more precise types stays as
    it is unless `exactly`: stock rounds norms, biases and modulations to fp8 too, or with its dynamic memory those of them that are
    not tiny.
    """
    for module in net.modules():
        for name, parameter in module._parameters.items():
            wanted = types.get((id(module), name))
            if parameter is None or is_quantised(parameter) or wanted is None or wanted is parameter.dtype:
                continue
            if exactly or not _rounds(parameter.dtype, wanted):
                module._parameters[name] = nn.Parameter(parameter.to(wanted), requires_grad=False)


def _is_wide(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether most of the file is in a type wider than fp8: a model that is made in fp8 all the same was asked for so, by
    `--fp8_e4m3fn-unet` or its like."""
    kind = comfy.utils.weight_dtype(tensors)
    return kind is not None and kind.itemsize > 1


def _cast_blocks(blocks: Named, types: Types) -> None:
    """The matrices in the model's blocks, in fp8 where ComfyUI was asked for it: the pager converts them as they arrive. What
    else is in them, norms and biases and modulations, is small and stays as it is."""
    for _, block in blocks:
        for _, operation in operations(block):
            for name, parameter in weights_of(operation):
                wanted = types.get((id(operation), name))
                if wanted in FP8 and parameter.ndim > 1 and not is_quantised(parameter):
                    operation._parameters[name] = nn.Parameter(parameter.to(wanted), requires_grad=False)


def _keep_packed(blocks: Named, tables: Sequence[nn.Module] = ()) -> None:
    """The matrices in the model's blocks that the file holds in ggml's blocks stay so on the device too. Others of that kind, of
    convolutions for one, are unpacked as they arrive. tables: of tokens, with which words are multiplied."""
    for operation, weight, extent in _matrices(blocks, tables) if ggml_tensor.CAN_HOLD else ():
        if extent.is_packed and weight.dtype not in FP8:
            kept = ggml_tensor.held(weight.as_stored(), extent, weight.dtype)
            operation._parameters["weight"] = nn.Parameter(kept, requires_grad=False)


def _keep_narrow(blocks: Named, tables: Sequence[nn.Module] = ()) -> None:
    """The matrices that a packed file leaves in halves stay so on the device: stock takes a text encoder's type from a norm, which
    such a file has in fp32, and what computes with them widens them as it does all others. A table of words would take twice its
    room, and be made half for each word."""
    for operation, weight, extent in _matrices(blocks, tables):
        if ggml_blocks.type_of(extent) in HALVES and weight.dtype is torch.float32:
            operation._parameters["weight"] = nn.Parameter(weight.in_the_files_type(), requires_grad=False)


def _matrices(blocks: Named, tables: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, StandIn, Extent]]:
    """What stands in for a tensor of the file that an operation in these blocks, or one of these tables, multiplies with."""
    for _, block in blocks:
        for _, operation in operations(block):
            weight: Any = operation._parameters.get("weight")
            is_matrix = isinstance(operation, nn.Linear) or any(operation is table for table in tables)
            if is_matrix and isinstance(weight, StandIn) and weight.extent is not None:
                yield operation, weight, weight.extent


def _rounds(stored: torch.dtype, held: torch.dtype) -> bool:
    """Whether numbers would be rounded to fp8."""
    return stored.is_floating_point and held.is_floating_point and held.itemsize == 1 < stored.itemsize


def _require(
    net: nn.Module, blocks: Sequence[Block], missing: Iterable[str], source: Checkpoint, *, is_known: bool
) -> None:
    """Every weight is in the file, and those of the blocks are tensors of it."""
    path = source.files[0].path
    if not blocks:
        raise NotStreamable(f"{path} is a model without transformer blocks. {without_streaming(path)}")
    for block in blocks:
        for paged in block.paged:
            data: Any = paged.storage
            if data.extent is None:
                raise NotStreamable(
                    f"{path}: ComfyUI makes {paged.key} of {', '.join(sorted(data.sources))} when it loads the file, so "
                    f"that it cannot stream. {without_streaming(path)}"
                )
    lacking = sorted(set(_named_in(net, missing)) | set(_bare(net)))
    if not is_known:
        starts = dict(net.named_parameters())
        lacking = [name for name in lacking if name not in starts or stored(starts[name]).is_meta]
    refuse_lacking(path, lacking)
    refuse_misfits(path, odd_layers(net))


def _names(net: nn.Module) -> Iterator[str]:
    """Of whatever a file can give it."""
    yield from (name for name, _ in net.named_parameters())
    yield from (name for name, _ in net.named_buffers())


def _named_in(net: nn.Module, missing: Iterable[str]) -> Iterator[str]:
    """The parameters that stock found no tensor for. A text encoder's are told by their names in a part of it."""
    ends = tuple(f".{name}" for name in missing)
    for name, _ in net.named_parameters():
        if f".{name}".endswith(ends) and not name.endswith(MAY_LACK):
            yield name


def _bare(net: nn.Module) -> Iterator[str]:
    """What has no bytes and stands for none, and operations that have no weight where the file has none."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        data = stored(tensor)
        if data.is_meta and not isinstance(data, StandIn) and not name.endswith(MAY_LACK):
            yield name
    for path, module in net.named_modules():
        if hasattr(module, "factory_kwargs") and module.weight is None:
            yield f"{path}.weight"


def _emptied(paged: Iterable[Paged]) -> tuple[Paged, ...]:
    """The same, from now on without a way to the file: the pager has one. What looks at a module sees a parameter without bytes."""
    found = []
    for one in paged:
        weight: Any = one.stand_in
        bare = torch.empty_like(one.storage.as_subclass(torch.Tensor), device=META)
        if is_quantised(weight):
            bare = type(weight)(bare, weight._layout_cls, _real_scales(weight._params))
        empty = nn.Parameter(bare, requires_grad=False)
        one.module._parameters[one.attribute] = empty
        found.append(dataclasses.replace(one, stand_in=empty))
    return tuple(found)


def _read_rest(net: nn.Module, in_file: Iterable[Paged]) -> None:
    """What does not stay in the file is read. What does is from now on a stand-in like any other tensor without bytes."""
    stays = {(id(one.module), one.attribute) for one in in_file}
    homes: list[tuple[Any, str]] = []
    for module in net.modules():
        for table in (module._parameters, module._buffers):
            homes += [
                (table, name)
                for name, tensor in table.items()
                if tensor is not None and (id(module), name) not in stays and stored(tensor).is_meta
            ]
    bar = progress.Bar(sum(stored(table[name]).nbytes for table, name in homes))
    for table, name in homes:
        tensor = table[name]
        found = _real(tensor)
        bar.add(stored(tensor).nbytes)
        table[name] = nn.Parameter(found, requires_grad=False) if isinstance(tensor, nn.Parameter) else found


def _real(tensor: Any) -> torch.Tensor:
    """With the bytes that it stands for."""
    if is_quantised(tensor):
        quantised: torch.Tensor = type(tensor)(_real(tensor._qdata), tensor._layout_cls, _real_scales(tensor._params))
        return quantised
    if isinstance(tensor, StandIn):
        return tensor.read()
    # Not in the file, and stock does without: CLIP's last projection, which starts as the identity.
    return torch.eye(*tensor.shape, dtype=tensor.dtype)


def _real_scales(params: Any) -> Any:
    """Of a quantised weight."""
    changed = {
        field.name: value.read()
        for field in dataclasses.fields(params)
        if isinstance(value := getattr(params, field.name), StandIn)
    }
    return dataclasses.replace(params, **changed)
