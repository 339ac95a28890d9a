"""The ways to divide a model into what is paged: by blocks, by parts of blocks, and without the
weights that only texts need.

Whole blocks are the fewest copies and the least work for the host. Parts pass through two places of
the size of the largest part. Wan's block is divided into self-attention, attention to the text and
feed-forward, so 14B in fp16 passes through 0.53 GiB instead of 1.31, and of 6 GiB there are 0.78
more for residents. Parts are used where two blocks do not fit, and where most of the model crosses
the bus in each pass, because the bus takes the time then (`chosen`). Otherwise computing hides the
copies and parts only cost: klein 4B, of which a quarter passes, was 2 to 8 % slower by parts, and
loaded half as fast (H200). So segments are not always the finest ones. A part is a block of its own
to everything else, with a place in the order and its own patches.

The family divides a block (`FusedBlock.fusestream_in_parts`): by the modules through which a part
is entered, its doors. A call of a door brings the part's weights, so ComfyUI's own forward finds
them too; code that computes without calling a door says so (`block_hooks.within`). A block without
parts stays whole.

Either way there is a variant without text weights (`without_texts`). What a block makes of a text
is the same at every step and may be kept (`text_kv.py`): 0.4 GiB for a text of Wan 14B, made by
weights of 3.9 GiB in fp16 and 2.0 in int8. The variant has these weights of each block as a layer
of their own, which passes skip once a text is known. It is used where fewer bytes pass although
residents lose the room of two texts; not where all weights stay anyway, or where a text is as large
as what it saves (few bits a weight).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...memory import Layer, OverBudget, bounds, plan_of
from ..base.hooks import IN_PARTS, OF_TEXT
from ..weights.paged import Paged
from .block_order import Order
from .blocks import Block, size
from .patched_weights import PatchedWeights
from .text_kv import OfText, room_for

WORTH_IT = 0.03  # least saving, as a share of the bytes of a pass: parts are twice as many copies
MOST = 0.5  # share of a model that passes, above which the bus takes the time
TEXTS = 2  # texts that there is room for: the prompt and the negative prompt


@dataclass(frozen=True)
class Segmentation:
    """One way to divide a model.

    blocks      what is paged: blocks, or parts of blocks
    layers      the pager's layer of each
    called      number of the first blocks that are entered by a call
    base        of a variant without text weights: the same segmentation with them
    text_bytes  of such a variant: device bytes beside the layers for kept texts
    """

    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...]
    called: int
    order: Order
    patching: PatchedWeights
    base: Segmentation | None = None
    text_bytes: int = 0

    @property
    def paged(self) -> tuple[Layer, ...]:
        """The pager's layers, in its order."""
        return tuple(self.layers[i] for i in self.order.paged)

    @property
    def with_texts(self) -> Segmentation:
        """The same segmentation with text weights in their blocks."""
        return self.base or self

    def bounds(self, device: torch.device) -> tuple[int, int]:
        """Least device bytes in which the blocks pass through, and bytes in which all of them stay,
        both without texts."""
        return bounds(self.paged, device)

    def passing(self, device: torch.device, budget: int) -> int | None:
        """Bytes that cross the bus in each pass within this budget; None: the budget is too small."""
        try:
            return plan_of(self.paged, device, budget - self.text_bytes).bytes_per_pass
        except OverBudget:
            return None

    def doors(self) -> Iterator[tuple[nn.Module, int]]:
        """The modules that are called when a block is needed, each with the block's number."""
        for i, block in enumerate(self.blocks[: self.called]):
            for door in block.doors or (block.module,):
                yield door, i

    def texts(self) -> Iterator[tuple[OfText, int]]:
        """The parts of blocks that make kept texts, each with the number of the layer that has its
        weights."""
        for i, (block, layer) in enumerate(zip(self.blocks, self.layers, strict=True)):
            if layer.rare and (own := of_text(block)) is not None:
                yield own, i


def all_of(
    blocks: Sequence[Block],
    layers: Sequence[Layer],
    left: Sequence[Paged],
    *,
    spare: int = 0,
    idle: Collection[int] = (),
    keeps_texts: bool = False,
) -> tuple[Segmentation, ...]:
    """Every way to divide these blocks, by blocks first. Arguments as of `BlockStream`."""
    whole = by_blocks(blocks, layers, left, spare, idle)
    parts = by_parts(whole, left)
    plain = [whole] if parts is None else [whole, parts]
    variants = [without_texts(one, left) for one in plain] if keeps_texts else []
    return (*plain, *(one for one in variants if one is not None))


def chosen(segmentations: Sequence[Segmentation], device: torch.device, budget: int) -> Segmentation:
    """The best of these within the budget. Parts: where blocks do not fit, or where most of the
    model passes and parts save `WORTH_IT` of that. The variant without text weights: where it saves
    as much."""
    plain = [one for one in segmentations if one.base is None] or list(segmentations)
    best = _chosen(plain, device, budget)
    variant = next((one for one in segmentations if one.base is best), None)
    if variant is None:
        return best
    most, least = best.passing(device, budget), variant.passing(device, budget)
    return best if most is None or least is None or least >= (1 - WORTH_IT) * most else variant


def _chosen(segmentations: Sequence[Segmentation], device: torch.device, budget: int) -> Segmentation:
    best, least = segmentations[-1], segmentations[-1].passing(device, budget)
    for one in reversed(segmentations[:-1]):
        bytes_ = one.passing(device, budget)
        if bytes_ is None:
            continue
        pays = bytes_ > MOST * one.bounds(device)[1] and least is not None and least < (1 - WORTH_IT) * bytes_
        if not pays:
            best, least = one, bytes_
    return best


def by_blocks(
    blocks: Sequence[Block], layers: Sequence[Layer], left: Sequence[Paged], spare: int, idle: Collection[int]
) -> Segmentation:
    """Whole blocks. Arguments as of `BlockStream`."""
    order = Order(len(blocks), spare, idle)
    return Segmentation(tuple(blocks), tuple(layers), len(blocks) - spare, order, PatchedWeights(blocks, left))


def by_parts(whole: Segmentation, left: Sequence[Paged]) -> Segmentation | None:
    """The parts of these blocks; None: no block has any."""
    return _divided(whole, left, _parts)


def _divided(
    base: Segmentation, left: Sequence[Paged], divide: Callable[[Block, Layer], Iterator[tuple[Block, Layer]]]
) -> Segmentation | None:
    """The same model with each block divided by `divide`, or whole where that yields nothing; None:
    no block is divided."""
    numbers: list[range] = []
    blocks: list[Block] = []
    layers: list[Layer] = []
    for block, layer in zip(base.blocks, base.layers, strict=True):
        found = list(divide(block, layer)) or [(block, layer)]
        numbers.append(range(len(blocks), len(blocks) + len(found)))
        blocks += [part for part, _ in found]
        layers += [part for _, part in found]
    if len(blocks) == len(base.blocks):
        return None
    called = sum(len(parts) for parts in numbers[: base.called])
    order = Order(len(blocks), len(blocks) - called)
    order.become([part for i in base.order.paged for part in numbers[i]])
    return Segmentation(tuple(blocks), tuple(layers), called, order, PatchedWeights(blocks, left))


def _parts(block: Block, layer: Layer) -> Iterator[tuple[Block, Layer]]:
    """A block's parts in order; nothing where they do not have all weights that are paged of it."""
    in_parts = getattr(block.module, IN_PARTS, None)
    groups: Sequence[Sequence[nn.Module]] = () if in_parts is None else in_parts()
    found = [(tuple(doors), _behind(doors, block)) for doors in groups]
    if sorted(i for _, places in found for i in places) != list(range(len(block.paged))):
        return
    names = {id(child): name for name, child in block.module.named_modules()}
    for doors, places in found:
        name = f"{block.name}.{names[id(max(doors, key=size))]}"
        part = Block(name, block.module, tuple(block.paged[i] for i in places), doors)
        yield part, Layer(name, part.weights_in(layer))


def _behind(doors: Sequence[nn.Module], block: Block) -> list[int]:
    """The places, in the block's `paged`, of the weights in these modules."""
    inside = {id(module) for door in doors for module in door.modules()}
    return [i for i, paged in enumerate(block.paged) if id(paged.module) in inside]


# --------------------------------------------------------------------------------------------------------------- texts


def of_text(block: Block) -> OfText | None:
    """The part of a block that sees texts alone; None: there is none."""
    asked = getattr(block.module, OF_TEXT, None)
    found: OfText | None = None if asked is None else asked()
    return found


def without_texts(base: Segmentation, left: Sequence[Paged]) -> Segmentation | None:
    """The same segmentation with text weights as layers of their own, each behind its block; None:
    there are none."""
    variant = _divided(base, left, _apart)
    if variant is None:
        return None
    kept = [own.nbytes for own, _ in variant.texts()]
    return replace(variant, base=base, text_bytes=TEXTS * room_for(max(kept), len(kept)))


def _apart(block: Block, layer: Layer) -> Iterator[tuple[Block, Layer]]:
    """A block without its text weights, and these; nothing where it has none."""
    own = of_text(block)
    inside = set() if own is None else set(_behind(own.modules, block))
    if own is None or not inside:
        return
    for name, doors, is_texts in ((block.name, block.doors, False), (f"{block.name}.text", own.modules, True)):
        places = [i for i in range(len(block.paged)) if (i in inside) is is_texts]
        part = replace(block, name=name, paged=tuple(block.paged[i] for i in places), doors=tuple(doors))
        yield part, replace(layer, name=name, weights=part.weights_in(layer), rare=is_texts)
