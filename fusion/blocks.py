"""Which parts of a model stream: its repeated blocks, in the order in which they run, and what is paged of each.

Paged are the parameters of stock's operations inside a block (`weight` and `bias` of Linears and norms). What belongs to no
operation, such as `blocks.i.modulation`, is small and stays with the rest of the model, as do the scales of quantised
weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor

from ..memory import Extent, Layer, Weight

# Lists of blocks by their name in the network. VACE has its side branch in a list of its own.
LISTS = ("blocks", "vace_blocks")
PAGED = re.compile(r"(?:^|\.)(?:vace_)?blocks\.\d+\..+\.(?:weight|bias)$")
ROOT = "diffusion_model."
# A text encoder's norms and T5's embedding are no paged operations: what is paged is named after its part.
PAGED_OF_T5 = re.compile(r"^encoder\.block\.\d+\.layer\.\d+\.(?:SelfAttention|DenseReluDense)\..+\.weight$")


@dataclass(frozen=True)
class Paged:
    """One parameter that lives in the pager. `key` is its name in the model's state_dict, `name` the one within its block.

    stand_in: what the module holds while the block is not running; right in shape and dtype, without bytes (meta).
    """

    name: str
    key: str
    module: torch.nn.Module
    attribute: str
    stand_in: torch.nn.Parameter

    @property
    def storage(self) -> torch.Tensor:
        """The tensor whose bytes are paged: of a quantised weight its data."""
        return stored(self.stand_in)

    def hold(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Let the module compute with this parameter. Returns what it held before."""
        before = self.module._parameters[self.attribute]
        assert before is not None
        self.module._parameters[self.attribute] = parameter
        return before


@dataclass(frozen=True)
class Block:
    """One layer of the pager: a block of the network and what is paged of it. root: of the network's names in its model."""

    name: str
    module: torch.nn.Module
    paged: tuple[Paged, ...]
    root: str = ROOT

    def layer(self, extents: dict[str, Extent]) -> Layer:
        """How it lies in the pager. extents: where the bytes of each key of the network are."""
        weights = []
        for paged in self.paged:
            data, extent = paged.storage, extents[paged.key.removeprefix(self.root)]
            if tuple(data.shape) != extent.shape:
                raise ValueError(
                    f"{paged.key} has the shape {list(extent.shape)} in the file, {list(data.shape)} in the model"
                )
            weights.append(Weight(paged.name, extent, data.dtype))
        return Layer(self.name, tuple(weights))


def is_paged(name: str) -> bool:
    """Whether a tensor of this name, in a file or a network, is a block's weight that can be paged."""
    return PAGED.search(name) is not None


def is_paged_of_t5(name: str) -> bool:
    """The same of a T5 text encoder."""
    return PAGED_OF_T5.search(name) is not None


def is_quantised(parameter: torch.Tensor) -> bool:
    """Whether the parameter is data and scales rather than numbers."""
    return isinstance(parameter, QuantizedTensor)


def stored(tensor: Any) -> torch.Tensor:
    """The tensor itself, or of a quantised one its data."""
    data: torch.Tensor = tensor._qdata if is_quantised(tensor) else tensor
    return data


def is_operation(module: torch.nn.Module) -> bool:
    """Whether it is one of stock's operations, which compute with whatever weight they hold when they are called."""
    return hasattr(module, "comfy_cast_weights")


def blocks_of(net: torch.nn.Module) -> tuple[Block, ...]:
    """The blocks of a diffusion model's network in the order in which they run."""
    return tuple(_block(name, module, ROOT) for name, module in _in_order(net))


def blocks_of_t5(net: Any, root: str) -> tuple[Block, ...]:
    """The blocks of stock's T5, which its text encoder model knows under the name `root`."""
    return tuple(_block(f"encoder.block.{i}", module, root) for i, module in enumerate(net.encoder.block))


def _in_order(net: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    lists = {name: found for name in LISTS if isinstance(found := getattr(net, name, None), torch.nn.ModuleList)}
    side = lists.get("vace_blocks", ())
    after = getattr(net, "vace_layers_mapping", None) or {}  # main block -> block of the side branch that follows it
    for i, module in enumerate(lists.get("blocks", ())):
        yield f"blocks.{i}", module
        if i in after:
            yield f"vace_blocks.{after[i]}", side[after[i]]


def _block(name: str, module: torch.nn.Module, root: str) -> Block:
    paged = [
        Paged(f"{inner}.{attribute}", f"{root}{name}.{inner}.{attribute}", operation, attribute, parameter)
        for inner, operation in module.named_modules()
        if inner and is_operation(operation)
        for attribute, parameter in operation.named_parameters(recurse=False)
        if attribute in ("weight", "bias")
    ]
    # Matrices first, so that q, k and v lie side by side and are one packed weight to whoever wants it.
    return Block(name, module, tuple(sorted(paged, key=lambda one: one.storage.ndim < 2)), root)
