"""The file's tensors in a network that stock has made, in the network's types or as the file has
them.

A network is filled in three steps. First each parameter gets the type that it was made with, unless
this would round it to fp8 or unpack it. Then streamed weights drop their reference to the file,
because the pager reads it. At last all other stand-ins are read (`weights/meta_tensor.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import comfy.utils
import torch
from torch import nn

from ...memory import Extent
from ..stream import progress
from ..stream.blocks import operations, weights_of
from ..weights import ggml_blocks, ggml_tensor, scales
from ..weights.meta_tensor import META, StandIn
from ..weights.paged import Paged
from ..weights.storage import FP8, is_quantised, storage_of, stored

Named = Sequence[tuple[str, nn.Module]]  # a model's blocks, by name
Types = dict[tuple[int, str], torch.dtype]  # by a module's id and a parameter's name
HALVES = (torch.float16, torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------- types


def types_of(net: nn.Module) -> Types:
    """The types that a network's parameters and buffers were made with, which stock copies the file's
    tensors into."""
    found = {
        (id(part), name): made.dtype
        for part in net.modules()
        for name, made in part._buffers.items()
        if made is not None
    }
    for module in net.modules():
        for name in {"weight", "bias", *module._parameters}:
            # Some operations make their weights when they load them. They have no parameter yet,
            # and may note its type.
            made = module._parameters.get(name)
            noted = getattr(module, f"{name}_comfy_model_dtype", None) or (None if made is None else made.dtype)
            if noted is not None:
                found[id(module), name] = noted
    return found


def cast(net: nn.Module, types: Types, *, exactly: bool) -> None:
    """Give the network's parameters these types.

    A type is fp8 if most of the file is, or if ComfyUI was asked for it. Parameters that the file
    has in more precise types then keep those unless `exactly`. Stock rounds norms, biases and
    modulations to fp8, too; with its dynamic memory, those of them that are not tiny.
    """
    for module in net.modules():
        for name, parameter in module._parameters.items():
            wanted = types.get((id(module), name))
            if parameter is None or is_quantised(parameter) or wanted is None or wanted is parameter.dtype:
                continue
            if exactly or not _rounds(parameter.dtype, wanted):
                module._parameters[name] = nn.Parameter(parameter.to(wanted), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and (id(module), name) in types:
                module._buffers[name] = buffer.to(types[id(module), name])


def is_wide(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether most of the file is in a type wider than fp8. If such a model is made in fp8, the
    user asked for it, by `--fp8_e4m3fn-unet` or the like."""
    kind = comfy.utils.weight_dtype(tensors)
    return kind is not None and kind.itemsize > 1


def cast_blocks(blocks: Named, types: Types) -> None:
    """Give the matrices in the model's blocks fp8 if ComfyUI was asked for it. The pager converts
    them as they arrive.

    Norms, biases and modulations in the blocks are small and keep their types.
    """
    for _, block in blocks:
        for _, operation in operations(block):
            for name, parameter in weights_of(operation):
                wanted = types.get((id(operation), name))
                if wanted in FP8 and parameter.ndim > 1 and not is_quantised(parameter):
                    operation._parameters[name] = nn.Parameter(parameter.to(wanted), requires_grad=False)


def of_part(blocks: Named, part: int) -> list[tuple[str, nn.Module]]:
    """Those of the blocks whose weights are in this part of a source in several files."""
    return [(name, block) for name, block in blocks if part in _parts_of(block)]


def _parts_of(block: nn.Module) -> set[int]:
    weights = (stored(weight) for _, operation in operations(block) for _, weight in weights_of(operation))
    return {one.extent.part for one in weights if isinstance(one, StandIn) and one.extent is not None}


def _rounds(stored: torch.dtype, held: torch.dtype) -> bool:
    """Whether numbers would be rounded to fp8."""
    return stored.is_floating_point and held.is_floating_point and held.itemsize == 1 < stored.itemsize


# --------------------------------------------------------------------------------------------------------------- packed


def keep_packed(blocks: Named, tables: Sequence[nn.Module] = ()) -> None:
    """Keep matrices in the model's blocks packed on the device, if the file has them in ggml's
    blocks.

    Other packed weights, such as those of convolutions, are unpacked as they arrive.
    tables: token embeddings that are also output matrices
    """
    for operation, weight, extent in _matrices(blocks, tables) if ggml_tensor.CAN_HOLD else ():
        if extent.is_packed and weight.dtype not in FP8:
            kept = ggml_tensor.held(weight.as_stored(), extent, weight.dtype)
            operation._parameters["weight"] = nn.Parameter(kept, requires_grad=False)


def keep_narrow(blocks: Named, tables: Sequence[nn.Module] = ()) -> None:
    """Keep the matrices that a packed file has in fp16 or bf16 in that type on the device.

    Stock takes a text encoder's type from a norm, which such a file has in fp32. The operation that
    computes with these matrices widens them as it does all others. An output matrix in fp32 would
    take twice the room, and would be converted to halves for each token.
    """
    for operation, weight, extent in _matrices(blocks, tables):
        if ggml_blocks.type_of(extent) in HALVES and weight.dtype is torch.float32:
            operation._parameters["weight"] = nn.Parameter(weight.in_the_files_type(), requires_grad=False)


def _matrices(blocks: Named, tables: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, StandIn, Extent]]:
    """The operations in these blocks, and these tables, that multiply with a tensor of the file:
    operation, stand-in, extent."""
    for _, block in blocks:
        for _, operation in operations(block):
            weight: Any = operation._parameters.get("weight")
            is_matrix = isinstance(operation, nn.Linear) or any(operation is table for table in tables)
            if is_matrix and isinstance(weight, StandIn) and weight.extent is not None:
                yield operation, weight, weight.extent


# -------------------------------------------------------------------------------------------------------------- reading


def emptied(paged: Iterable[Paged]) -> tuple[Paged, ...]:
    """The same weights without their reference to the file, because the pager reads it. The module
    holds a parameter without bytes."""
    found = []
    for one in paged:
        weight: Any = one.stand_in
        bare = torch.empty_like(one.storage.as_subclass(torch.Tensor), device=META)
        if is_quantised(weight):
            bare = storage_of(weight).holding(bare, scales.read(weight._params, one.scales))
        empty = scales.as_parameter(bare)
        one.module._parameters[one.attribute] = empty
        found.append(dataclasses.replace(one, stand_in=empty, scales=scales.without_file(one.scales)))
    return tuple(found)


def read_rest(net: nn.Module, in_file: Iterable[Paged]) -> None:
    """Read all stand-ins except these, which stay in the file."""
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
        table[name] = scales.as_parameter(found) if isinstance(tensor, nn.Parameter) else found


def _real(tensor: Any) -> torch.Tensor:
    """The tensor with its bytes."""
    if is_quantised(tensor):
        quantised: torch.Tensor = storage_of(tensor).holding(_real(stored(tensor)), scales.read(tensor._params))
        return quantised
    if isinstance(tensor, StandIn):
        return tensor.read()
    # Missing in the file, and stock does without: CLIP's last projection, which starts as the
    # identity.
    return torch.eye(*tensor.shape, dtype=tensor.dtype)
