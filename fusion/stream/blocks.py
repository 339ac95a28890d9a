"""Which parts of a model stream: its repeated blocks, and what is paged of each.

Nobody tells which they are. A network is deep because it has one kind of block many times, in a list; these lists hold most of its
bytes, and their members are called one after the other. So the kinds are looked for in the network that stock built:

    kinds      classes of modules of which some list has nothing else: blocks, but also the parts of which blocks are made
    the inner  of two kinds, one inside the other, if it holds nearly all of the other's bytes: smaller pieces page better, and
               what stands around them stays
    all of a kind, wherever they are: a U-Net's middle is in no list

Paged are the parameters of stock's operations inside a block (`weight` and `bias` of Linears, convolutions, norms). What belongs to
no operation, such as Wan's `blocks.i.modulation`, is small and stays with the rest of the model, as do the scales of quantised
weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ...memory import Layer, Weight
from ..weights.channels_last import LaidOut
from ..weights.meta_tensor import StandIn
from ..weights.paged import Paged
from ..weights.storage import stored

WORTH = 0.25  # of a network's bytes are in its blocks, or they are not worth streaming
INNER = 0.8  # of a block's bytes are in its parts, or it is the block that streams
LEAST = 0.01  # of the bytes: a kind that holds less is not worth a page
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


Parameters = Sequence[nn.Parameter]  # of a block, in the order in which they are paged


@dataclass(frozen=True)
class Block:
    """One layer of the pager: a block of the network, or a part of one, and what is paged of it. name: within the network.
    doors: of a part, the modules that are called when it is needed."""

    name: str
    module: nn.Module
    paged: tuple[Paged, ...]
    doors: tuple[nn.Module, ...] = ()

    @cached_property
    def _homes(self) -> tuple[tuple[dict[str, nn.Parameter | None], str], ...]:
        """Where its operations have what is paged: asked for twice a call, of some dozens."""
        return tuple((one.module._parameters, one.attribute) for one in self.paged)

    def held(self) -> Parameters:
        """What its operations have now, in the order of `paged`."""
        return [home[attribute] for home, attribute in self._homes]  # type: ignore[misc]

    def hold(self, parameters: Parameters) -> None:
        """Let its operations have these, in the same order."""
        for (home, attribute), parameter in zip(self._homes, parameters, strict=True):
            home[attribute] = parameter

    def layer(self) -> Layer:
        """How it lies in the pager, while its parameters still know where in the file their bytes are."""
        weights = []
        for paged in self.paged:
            data: Any = paged.storage
            assert isinstance(data, StandIn) and data.extent is not None, f"{paged.key} is no tensor of the file"
            weight = Weight(paged.name, data.extent, data.dtype)
            if tuple(data.shape) != weight.device_shape:
                raise ValueError(
                    f"{paged.key} has the shape {list(data.extent.shape)} in the file, {list(data.shape)} in the model"
                )
            weights.append(weight)
        return Layer(self.name, tuple(weights))


def is_operation(module: nn.Module) -> bool:
    """Whether it is one of stock's operations, which compute with whatever weight they hold when they are called."""
    return hasattr(module, "comfy_cast_weights")


def operations(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those within a module, by their names in it; its own name is empty."""
    return ((name, one) for name, one in module.named_modules() if is_operation(one))


def weights_of(operation: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """What can be paged of an operation."""
    for attribute, parameter in operation.named_parameters(recurse=False):
        if attribute in ("weight", "bias"):
            yield attribute, parameter


def size(module: nn.Module) -> int:
    """Bytes that a module computes with and that can be paged. Tables, of which rows are looked up, are no part of it."""
    computing = (one for _, one in operations(module) if not isinstance(one, nn.Embedding))
    return sum(stored(weight).nbytes for operation in computing for _, weight in weights_of(operation))


# ------------------------------------------------------------------------------------------------------------- finding


def found_in(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a network by their names in it, in the order in which it was built; none if it has no blocks that hold most
    of its bytes."""
    sizes = {id(module): size(module) for module in net.modules()}
    whole = sizes[id(net)]
    members = {kind: _outermost(net, kind) for kind in _kinds(net)}
    members = {kind: ones for kind, ones in members.items() if len(ones) > 1}

    def held(modules: Iterable[nn.Module]) -> int:
        return sum(sizes[id(one)] for one in modules)

    blocks: set[int] = set()
    taken: set[int] = set()  # the blocks and all that is in them
    for ones in sorted(members.values(), key=held, reverse=True):
        free = [one for one in ones if id(one) not in taken]
        parts = [part for one in free for part in _parts(one, members)]
        if held(free) < LEAST * whole or held(parts) >= INNER * held(free):
            continue
        blocks |= {id(one) for one in free}
        taken |= {id(part) for one in free for part in one.modules()}
    found = [(name, module) for name, module in net.named_modules() if id(module) in blocks and sizes[id(module)]]
    return found if held(module for _, module in found) >= WORTH * whole else []


def _kinds(net: nn.Module) -> set[type[nn.Module]]:
    """The classes of which some list of the network has nothing else."""
    found: set[type[nn.Module]] = set()
    for module in net.modules():
        if isinstance(module, CONTAINERS):
            kinds = {type(one) for one in module.children()}
            if len(kinds) == 1:
                found |= kinds
    return {kind for kind in found if not hasattr(kind, "comfy_cast_weights") and kind not in CONTAINERS}


def _outermost(net: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    """All modules of exactly this class that are in no other of them."""
    if type(net) is kind:
        return [net]
    return [one for child in net.children() for one in _outermost(child, kind)]


def _parts(module: nn.Module, kinds: Collection[type[nn.Module]]) -> Iterator[nn.Module]:
    """What is inside of a module of these classes, and in nothing else of them."""
    for child in module.children():
        if type(child) in kinds:
            yield child
        else:
            yield from _parts(child, kinds)


# -------------------------------------------------------------------------------------------------------------- paging


def blocks_of(root: str, named: Iterable[tuple[str, nn.Module]]) -> tuple[Block, ...]:
    """Blocks of these modules of a network, in this order. root: of the network's names in its model, with a dot."""
    return tuple(_block(root, name, module) for name, module in named)


def _block(root: str, name: str, module: nn.Module) -> Block:
    paged = [
        Paged(_joined(inner, attribute), root + _joined(name, inner, attribute), operation, attribute, parameter)
        for inner, operation in operations(module)
        for attribute, parameter in weights_of(operation)
        if isinstance(stored(parameter), StandIn)
    ]
    # Matrices first, so that q, k and v lie side by side and are one packed weight to whoever wants it.
    return Block(name, module, tuple(sorted(paged, key=lambda one: one.storage.ndim < 2)))


def lay_out_layers(blocks: Sequence[Block], layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """These blocks' layers, for the pager to lay weights out channels-last as it copies them (`weights/channels_last.py`)."""
    return tuple(_laid_out(block, layer) for block, layer in zip(blocks, layers, strict=True))


def _laid_out(block: Block, layer: Layer) -> Layer:
    weights = (
        replace(weight, channels_last=paged.attribute == "weight" and isinstance(paged.module, LaidOut))
        for paged, weight in zip(block.paged, layer.weights, strict=True)
    )
    return replace(layer, weights=tuple(weights))


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)
