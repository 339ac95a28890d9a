"""A stock diffusion model whose blocks' weights stay in the file.

It is built the way `comfy.sd.load_diffusion_model` builds one: the same conversions of old layouts, the same detection, the
same choice of dtypes and operations. The difference is in what the tensors are. Those of the blocks are stand-ins on the
meta device, so that a model of 28 GB is built in the memory of its embeddings; the others are read from the file. Stock
would copy all of them into RAM, and with its own operations handed in it would not convert scaled fp8.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.utils
import torch

from ..memory import Checkpoint, Extent, Layer, WeightFile
from ..memory.layer import DTYPES
from . import progress
from .blocks import ROOT, Block, blocks_of, is_paged, stored
from .recognise import WrongFile

META = torch.device("meta")
Tensors = dict[str, torch.Tensor]


class NotStreamable(WrongFile):
    """A model that stock may well run, but whose weights cannot be streamed."""

    __module__ = "fusestream"


@dataclass(frozen=True)
class Skeleton:
    """model: a stock BaseModel. blocks and layers are the same things, to the model and to the pager."""

    model: Any
    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...]


def build(source: Checkpoint, dtype: torch.dtype | None = None) -> Skeleton:
    """The model in `source`. dtype: in which to hold its weights; None: as stock chooses."""
    header = source.files[0]
    tensors, homes = read(source, is_paged)
    config, tensors = _configure(tensors, dict(header.metadata), dtype, header)
    model = config.get_model(tensors, "", device=META)
    model.device = comfy.model_management.unet_offload_device()
    net = model.diffusion_model
    for module in net.modules():
        if hasattr(module, "factory_kwargs"):  # operations that make their weights as they load them
            module.factory_kwargs["device"] = None
    tensors = config.process_unet_state_dict(tensors)
    extents = {name: homes[id(tensor)][0] for name, tensor in tensors.items() if id(tensor) in homes}
    typed = in_model_dtypes(net, tensors, exactly=dtype is not None)
    _, unexpected = net.load_state_dict(typed, strict=False, assign=True)
    if unexpected:
        logging.warning("unet unexpected: %s", unexpected)  # in stock's words
    net.requires_grad_(False)
    blocks = blocks_of(net)
    require_streamable(net, {one.key.removeprefix(ROOT) for block in blocks for one in block.paged}, extents, header)
    return Skeleton(model, blocks, tuple(block.layer(extents) for block in blocks))


def read(
    source: Checkpoint, stays_in_file: Callable[[str], bool]
) -> tuple[Tensors, dict[int, tuple[Extent, torch.Tensor]]]:
    """Every tensor by name: of those that stay in the file stand-ins, and which extent each of these, by its id, stands
    for."""
    tensors: Tensors = {}
    homes = {}
    bar = progress.Bar(sum(extent.nbytes for name, extent in source.extents.items() if not stays_in_file(name)))
    for name, extent in source.extents.items():
        if extent.dtype not in DTYPES:
            raise NotStreamable(
                f"{source.file_of(extent).path}: {name} is of type {extent.dtype}, which torch does not know."
            )
        kind = DTYPES[extent.dtype]
        if stays_in_file(name):
            tensors[name] = torch.empty(extent.shape, dtype=kind, device=META)
            homes[id(tensors[name])] = (extent, tensors[name])  # kept, or its id could become another's
        else:
            bytes_ = torch.empty(extent.nbytes, dtype=torch.uint8)
            source.read_into(extent, bytes_)
            bar.add(extent.nbytes)
            tensors[name] = bytes_.view(kind).view(extent.shape)
    return tensors, homes


def _configure(tensors: Tensors, metadata: Any, dtype: torch.dtype | None, header: WeightFile) -> tuple[Any, Tensors]:
    """Stock's configuration of the model, and its tensors under the names of today."""
    tensors, metadata = comfy.utils.convert_old_quants(tensors, "", metadata=metadata)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    inner = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True)
    if inner:
        tensors, metadata = comfy.utils.convert_old_quants(inner, "", metadata=metadata)
    parameters, kind = comfy.utils.calculate_parameters(tensors), comfy.utils.weight_dtype(tensors)
    config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=metadata)
    if config is None:
        raise NotStreamable(
            f"{header.path} is in no layout that can be streamed. Set vram_budget to 0 to load it as stock does."
        )
    mm, known = comfy.model_management, list(config.supported_inference_dtypes)
    device = mm.get_torch_device()
    quantised = config.quant_config is not None
    held = dtype or mm.unet_dtype(
        model_params=parameters, supported_dtypes=known, weight_dtype=None if quantised else kind
    )
    computed = mm.unet_manual_cast(None if quantised else held, device, known)
    config.set_inference_dtype(held, computed, device=device)
    return config, tensors


def in_model_dtypes(net: torch.nn.Module, tensors: Tensors, exactly: bool = False) -> Tensors:
    """The tensors in the types that the model's parameters were made with: stock copies them into these.

    Where that is fp8, because most of the file is, what the file has in more precise types stays as it is unless `exactly`:
    stock rounds norms, biases and modulations to fp8 too, or with its dynamic memory those of them that are not tiny.
    """
    wanted = {}
    for path, module in net.named_modules():
        for name in ("weight", "bias", *(own for own, _ in module.named_parameters(recurse=False))):
            # Operations that make their weights as they load them have no parameter yet, and may note its type.
            made = module._parameters.get(name)
            noted = getattr(module, f"{name}_comfy_model_dtype", None) or (None if made is None else made.dtype)
            key = f"{path}.{name}" if path else name
            if noted is not None and key in tensors and (exactly or not _rounds(tensors[key].dtype, noted)):
                wanted[key] = noted
    return {name: tensor.to(wanted.get(name, tensor.dtype)) for name, tensor in tensors.items()}


def _rounds(stored: torch.dtype, held: torch.dtype) -> bool:
    """Whether numbers would be rounded to fp8."""
    return stored.is_floating_point and held.is_floating_point and held.itemsize == 1 < stored.itemsize


def require_streamable(net: torch.nn.Module, paged: set[str], extents: dict[str, Extent], header: WeightFile) -> None:
    """Every weight is in RAM, or of those that stay in the file: `paged`, by their names in the network."""
    if not paged:
        raise NotStreamable(
            f"{header.path} is a model without transformer blocks. Set vram_budget to 0 to load it as stock does."
        )
    bare = [name for name, tensor in (*net.named_parameters(), *net.named_buffers()) if stored(tensor).is_meta]
    # Operations that make their weights as they load them have none where the file has none.
    bare += [
        f"{path}.weight"
        for path, module in net.named_modules()
        if hasattr(module, "factory_kwargs") and module.weight is None
    ]
    missing = sorted({name for name in bare if name not in paged} | (paged - extents.keys()))
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise WrongFile(f"{header.path} lacks {len(missing)} of the model's weights: {shown}. Download it again.")
