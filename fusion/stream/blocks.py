"""The blocks of a model that stream, and the parameters of each that are paged.

No table names the blocks. A deep network has one class of block many times in a list; such lists
hold most of its bytes, and their members are called one after the other. So the classes are found
in the network that ComfyUI built:

    kinds      classes that some list consists of: blocks, but also the parts of which blocks are made
    inner      of two kinds, one inside the other, the inner one streams if it holds nearly all of the bytes: smaller
               pieces page better, and what surrounds them stays on the device
    members    all modules of a kind, in a list or not: a U-Net's middle block is in no list

The parameters of ComfyUI's operations inside a block are paged (`weight` and `bias` of Linears,
convolutions, norms). Parameters of no operation, such as Wan's `blocks.i.modulation`, are small and
stay with the rest of the model; so do the scales of quantised weights that are not of groups
(`weights/scales.py`).
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
from ..weights.scales import of_groups
from ..weights.storage import stored

WORTH = 0.25  # least share of a network's bytes in its blocks, for which it streams
INNER = 0.8  # least share of a block's bytes in its parts, for which the parts stream
LEAST = 0.01  # least share of a network's bytes in a kind, for which it is paged
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


Parameters = Sequence[nn.Parameter]  # a block's, in the order in which they are paged


@dataclass(frozen=True)
class Block:
    """One layer of the pager: a block of the network or a part of one, and its paged parameters.

    name   within the network
    doors  of a part: the modules that are called when it is needed
    """

    name: str
    module: nn.Module
    paged: tuple[Paged, ...]
    doors: tuple[nn.Module, ...] = ()

    @cached_property
    def _homes(self) -> tuple[tuple[dict[str, nn.Parameter | None], str], ...]:
        """The dictionaries and names of its parameters; used twice a call, for some dozens each."""
        return tuple((one.module._parameters, one.attribute) for one in self.paged)

    def held(self) -> Parameters:
        """The parameters that its operations hold now, in the order of `paged`."""
        return [home[attribute] for home, attribute in self._homes]  # type: ignore[misc]

    def hold(self, parameters: Parameters) -> None:
        """Let its operations hold these parameters, in the order of `paged`."""
        for (home, attribute), parameter in zip(self._homes, parameters, strict=True):
            home[attribute] = parameter

    def layer(self) -> Layer:
        """The pager's layer of this block. Asked while its parameters still know their place in the
        file."""
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
        for paged in self.paged:
            for scale in paged.scales:
                held: Any = scale.stand_in
                weights.append(Weight(scale.name, held.extent, held.dtype))
        return Layer(self.name, tuple(weights))

    def weights_in(self, layer: Layer) -> tuple[Weight, ...]:
        """The weights of this block, or part of one, among those of a layer."""
        own = {name for paged in self.paged for name in paged.names}
        return tuple(weight for weight in layer.weights if weight.name in own)


def is_operation(module: nn.Module) -> bool:
    """Whether a module is one of ComfyUI's operations, which compute with the weight that they hold
    when they are called."""
    return hasattr(module, "comfy_cast_weights")


def operations(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The operations within a module, with their names in it; its own name is empty."""
    return ((name, one) for name, one in module.named_modules() if is_operation(one))


def weights_of(operation: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of an operation that can be paged."""
    for attribute, parameter in operation.named_parameters(recurse=False):
        if attribute in ("weight", "bias"):
            yield attribute, parameter


def size(module: nn.Module) -> int:
    """Bytes of a module's weights that can be paged. Embedding tables do not count, because only
    rows of them are read."""
    computing = (one for _, one in operations(module) if not isinstance(one, nn.Embedding))
    return sum(stored(weight).nbytes for operation in computing for _, weight in weights_of(operation))


# ------------------------------------------------------------------------------------------------------------- finding


def found_in(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a network with their names in it, in the order in which it was built; none if
    blocks do not hold `WORTH` of its bytes."""
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
    """The classes that some list of the network consists of."""
    found: set[type[nn.Module]] = set()
    for module in net.modules():
        if isinstance(module, CONTAINERS):
            kinds = {type(one) for one in module.children()}
            if len(kinds) == 1:
                found |= kinds
    return {kind for kind in found if not hasattr(kind, "comfy_cast_weights") and kind not in CONTAINERS}


def _outermost(net: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    """All modules of exactly this class that are not inside another one of it."""
    if type(net) is kind:
        return [net]
    return [one for child in net.children() for one in _outermost(child, kind)]


def _parts(module: nn.Module, kinds: Collection[type[nn.Module]]) -> Iterator[nn.Module]:
    """The outermost modules of these classes inside a module."""
    for child in module.children():
        if type(child) in kinds:
            yield child
        else:
            yield from _parts(child, kinds)


# -------------------------------------------------------------------------------------------------------------- paging


def blocks_of(root: str, named: Iterable[tuple[str, nn.Module]]) -> tuple[Block, ...]:
    """Blocks of these modules of a network, in this order. root: the network's prefix in its model,
    with a dot."""
    return tuple(_block(root, name, module) for name, module in named)


def _block(root: str, name: str, module: nn.Module) -> Block:
    paged = [
        Paged(
            _joined(inner, attribute),
            root + _joined(name, inner, attribute),
            operation,
            attribute,
            parameter,
            of_groups(_joined(inner, attribute), parameter),
        )
        for inner, operation in operations(module)
        for attribute, parameter in weights_of(operation)
        if isinstance(stored(parameter), StandIn)
    ]
    # Matrices first, so that q, k and v lie side by side and are one packed weight to whoever wants
    # it.
    return Block(name, module, tuple(sorted(paged, key=lambda one: one.storage.ndim < 2)))


def lay_out_layers(blocks: Sequence[Block], layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """These blocks' layers, for the pager to lay weights out channels-last as it copies them
    (`weights/channels_last.py`)."""
    return tuple(_laid_out(block, layer) for block, layer in zip(blocks, layers, strict=True))


def _laid_out(block: Block, layer: Layer) -> Layer:
    laid_out = {
        paged.name for paged in block.paged if paged.attribute == "weight" and isinstance(paged.module, LaidOut)
    }
    weights = (replace(weight, channels_last=weight.name in laid_out) for weight in layer.weights)
    return replace(layer, weights=tuple(weights))


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)
