"""How finely a model is paged: by blocks, or by the parts of blocks that are used one after another.

Blocks as a whole are the fewest copies and the least work for the host. Parts pass through two places of the size of the largest:
of Wan's block self-attention, attention to the text and feed-forward, so that 14B in fp16 passes through 0.53 GiB instead of 1.31,
and of 6 GiB 0.78 more are for what stays. Where most of a model crosses the bus in each pass, the bus takes the time: then it is
paged in parts, as where two blocks do not fit at all (`chosen`). Where less does, computing hides it, and parts only cost: klein
4B, of which a quarter passes, was 2 to 8 % slower so, and came half as fast (H200). A part is a block of its own to everything
here, with a place in the order and patches of its own.

It is the family that takes a block apart (`FusedBlock.fusestream_in_parts`): by the modules through which a part is entered, its
doors. A door that is called brings the part's weights, so stock's own forward finds them too; who computes past its doors says
so (`doors.within`). What has no parts stays whole among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...memory import Layer, OverBudget, bounds, plan_of
from .blocks import Block, Paged, size
from .order import Order
from .patching import Patching

WORTH_IT = 0.03  # of the bytes: twice as many copies to ask for
MOST = 0.5  # of a model, that passes


@dataclass(frozen=True)
class Grain:
    """One way to page a model. layers: of the blocks, one each. called: so many of the first are entered by a call."""

    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...]
    called: int
    order: Order
    patching: Patching

    @property
    def paged(self) -> tuple[Layer, ...]:
        """What the pager has, in its order."""
        return tuple(self.layers[i] for i in self.order.paged)

    def bounds(self, device: torch.device) -> tuple[int, int]:
        """Bytes of the device in which the blocks pass through, and in which all of them stay."""
        return bounds(self.paged, device)

    def passing(self, device: torch.device, budget: int) -> int | None:
        """Bytes that come over the bus in each pass, within this budget; None: it is too small."""
        try:
            return plan_of(self.paged, device, budget).bytes_per_pass
        except OverBudget:
            return None

    def doors(self) -> Iterator[tuple[nn.Module, int]]:
        """What is called when a block is needed, with the block's number."""
        for i, block in enumerate(self.blocks[: self.called]):
            for door in block.doors or (block.module,):
                yield door, i


def chosen(grains: Sequence[Grain], device: torch.device, budget: int) -> Grain:
    """The one of these to page a model by, within this budget: the finer one where the other cannot pass, or where most of the
    model passes and that saves `WORTH_IT` of it."""
    best, least = grains[-1], grains[-1].passing(device, budget)
    for one in reversed(grains[:-1]):
        bytes_ = one.passing(device, budget)
        if bytes_ is None:
            continue
        pays = bytes_ > MOST * one.bounds(device)[1] and least is not None and least < (1 - WORTH_IT) * bytes_
        if not pays:
            best, least = one, bytes_
    return best


def whole(blocks: Sequence[Block], layers: Sequence[Layer], left: Sequence[Paged], spare: int, idle: int) -> Grain:
    """By blocks. left, spare, idle: as of `Stream`."""
    order = Order(len(blocks), spare, idle)
    return Grain(tuple(blocks), tuple(layers), len(blocks) - spare, order, Patching(blocks, left))


def in_parts(of: Grain, left: Sequence[Paged]) -> Grain | None:
    """By the parts of these blocks; None where none of them has any."""
    numbers: list[range] = []
    blocks: list[Block] = []
    layers: list[Layer] = []
    for block, layer in zip(of.blocks, of.layers, strict=True):
        found = list(_parts(block, layer)) or [(block, layer)]
        numbers.append(range(len(blocks), len(blocks) + len(found)))
        blocks += [part for part, _ in found]
        layers += [part for _, part in found]
    if len(blocks) == len(of.blocks):
        return None
    called = sum(len(parts) for parts in numbers[: of.called])
    order = Order(len(blocks), len(blocks) - called)
    grain = Grain(tuple(blocks), tuple(layers), called, order, Patching(blocks, left))
    order.become([part for i in of.order.paged for part in numbers[i]])
    return grain


def _parts(block: Block, layer: Layer) -> Iterator[tuple[Block, Layer]]:
    """A block's parts in order, where they have all that is paged of it."""
    taken_apart = getattr(block.module, "fusestream_in_parts", None)
    groups: Sequence[Sequence[nn.Module]] = () if taken_apart is None else taken_apart()
    found = [(tuple(doors), _behind(doors, block)) for doors in groups]
    if sorted(i for _, places in found for i in places) != list(range(len(block.paged))):
        return
    names = {id(child): name for name, child in block.module.named_modules()}
    for doors, places in found:
        name = f"{block.name}.{names[id(max(doors, key=size))]}"
        part = Block(name, block.module, tuple(block.paged[i] for i in places), doors)
        yield part, Layer(name, tuple(layer.weights[i] for i in places))


def _behind(doors: Sequence[nn.Module], block: Block) -> list[int]:
    """The places, among what is paged of a block, of what is in these modules."""
    inside = {id(module) for door in doors for module in door.modules()}
    return [i for i, paged in enumerate(block.paged) if id(paged.module) in inside]
