"""How finely a model is paged: by blocks, or by the parts of blocks that are used one after another; and without what texts alone
need, where its results are kept.

Blocks as a whole are the fewest copies and the least work for the host. Parts pass through two places of the size of the largest:
of Wan's block self-attention, attention to the text and feed-forward, so that 14B in fp16 passes through 0.53 GiB instead of 1.31,
and of 6 GiB 0.78 more are for what stays. Where most of a model crosses the bus in each pass, the bus takes the time: then it is
paged in parts, as where two blocks do not fit at all (`chosen`). Where less does, computing hides it, and parts only cost: klein
4B, of which a quarter passes, was 2 to 8 % slower so, and came half as fast (H200). A part is a block of its own to everything
here, with a place in the order and patches of its own.

It is the family that takes a block apart (`FusedBlock.fusestream_in_parts`): by the modules through which a part is entered, its
doors. A door that is called brings the part's weights, so stock's own forward finds them too; who computes past its doors says
so (`block_hooks.within`). What has no parts stays whole among them.

Either way a grain has a twin (`without_texts`). What a block makes of a text is the same at every
step, and may be kept (`text_kv.py`): of Wan 14B 0.4 GiB for a text, made by weights of 3.9 GiB in
fp16 and 2.0 in int8. The twin has these weights, of each block, as a layer of their own that passes
do without once a text is known. It is taken where fewer bytes pass so with room for two texts,
which residents have less then. Where all stays anyway, or a text is as large as what it saves, of
few bits a weight, it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...memory import Layer, OverBudget, bounds, plan_of
from ..base.hooks import IN_PARTS, OF_TEXT
from ..weights.paged import Paged
from .block_order import Order
from .blocks import Block, size
from .patched_weights import Patching
from .text_kv import OfText, room_for

WORTH_IT = 0.03  # of the bytes: twice as many copies to ask for
MOST = 0.5  # of a model, that passes
TEXTS = 2  # that there is to be room for: a prompt, and what it is guided away from


@dataclass(frozen=True)
class Grain:
    """One way to page a model. layers: of the blocks, one each. called: so many of the first are entered by a call.

    of    the same grain, for whose twin texts are kept; then kept are bytes of the device beside the layers, for so much of texts
    kept  as their blocks say
    """

    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...]
    called: int
    order: Order
    patching: Patching
    of: Grain | None = None
    kept: int = 0

    @property
    def paged(self) -> tuple[Layer, ...]:
        """What the pager has, in its order."""
        return tuple(self.layers[i] for i in self.order.paged)

    def bounds(self, device: torch.device) -> tuple[int, int]:
        """Bytes of the device in which the blocks pass through, and in which all of them stay: without what is kept."""
        return bounds(self.paged, device)

    def passing(self, device: torch.device, budget: int) -> int | None:
        """Bytes that come over the bus in each pass, within this budget; None: it is too small."""
        try:
            return plan_of(self.paged, device, budget - self.kept).bytes_per_pass
        except OverBudget:
            return None

    def doors(self) -> Iterator[tuple[nn.Module, int]]:
        """What is called when a block is needed, with the block's number."""
        for i, block in enumerate(self.blocks[: self.called]):
            for door in block.doors or (block.module,):
                yield door, i

    def texts(self) -> Iterator[tuple[OfText, int]]:
        """What of the blocks keeps texts, with the number of the block that its weights are."""
        for i, (block, layer) in enumerate(zip(self.blocks, self.layers, strict=True)):
            if layer.rare and (own := of_text(block)) is not None:
                yield own, i


def chosen(grains: Sequence[Grain], device: torch.device, budget: int) -> Grain:
    """The one of these to page a model by, within this budget: the finer one where the other cannot pass, or where most of the
    model passes and that saves `WORTH_IT` of it; and its twin, where that saves as much."""
    plain = [one for one in grains if one.of is None] or list(grains)
    best = _chosen(plain, device, budget)
    twin = next((one for one in grains if one.of is best), None)
    if twin is None:
        return best
    most, least = best.passing(device, budget), twin.passing(device, budget)
    return best if most is None or least is None or least >= (1 - WORTH_IT) * most else twin


def _chosen(grains: Sequence[Grain], device: torch.device, budget: int) -> Grain:
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
    return _divided(of, left, _parts)


def _divided(
    of: Grain, left: Sequence[Paged], apart: Callable[[Block, Layer], Iterator[tuple[Block, Layer]]]
) -> Grain | None:
    """The same with each block as what `apart` makes of it, or whole where that is nothing; None where all of them are."""
    numbers: list[range] = []
    blocks: list[Block] = []
    layers: list[Layer] = []
    for block, layer in zip(of.blocks, of.layers, strict=True):
        found = list(apart(block, layer)) or [(block, layer)]
        numbers.append(range(len(blocks), len(blocks) + len(found)))
        blocks += [part for part, _ in found]
        layers += [part for _, part in found]
    if len(blocks) == len(of.blocks):
        return None
    called = sum(len(parts) for parts in numbers[: of.called])
    order = Order(len(blocks), len(blocks) - called)
    order.become([part for i in of.order.paged for part in numbers[i]])
    return Grain(tuple(blocks), tuple(layers), called, order, Patching(blocks, left))


def _parts(block: Block, layer: Layer) -> Iterator[tuple[Block, Layer]]:
    """A block's parts in order, where they have all that is paged of it."""
    taken_apart = getattr(block.module, IN_PARTS, None)
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


# --------------------------------------------------------------------------------------------------------------- texts


def of_text(block: Block) -> OfText | None:
    """What of a block, or of the block that it is a part of, sees texts alone."""
    asked = getattr(block.module, OF_TEXT, None)
    found: OfText | None = None if asked is None else asked()
    return found


def without_texts(of: Grain, left: Sequence[Paged]) -> Grain | None:
    """The same blocks or parts, with what sees texts alone behind the one that it is of; None where there is nothing."""
    twin = _divided(of, left, _apart)
    if twin is None:
        return None
    kept = [own.nbytes for own, _ in twin.texts()]
    return replace(twin, of=of, kept=TEXTS * room_for(max(kept), len(kept)))


def _apart(block: Block, layer: Layer) -> Iterator[tuple[Block, Layer]]:
    """A block without what sees texts alone, and that; nothing where it has nothing of it."""
    own = of_text(block)
    inside = set() if own is None else set(_behind(own.modules, block))
    if own is None or not inside:
        return
    for name, doors, is_texts in ((block.name, block.doors, False), (f"{block.name}.text", own.modules, True)):
        places = [i for i in range(len(block.paged)) if (i in inside) is is_texts]
        weights = tuple(layer.weights[i] for i in places)
        part = replace(block, name=name, paged=tuple(block.paged[i] for i in places), doors=tuple(doors))
        yield part, replace(layer, name=name, weights=weights, rare=is_texts)
