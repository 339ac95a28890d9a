"""The patches of blocks in the form in which they are applied: plain LoRA as pairs of fp16 factors,
on the device.

A patch holds its tensors in ordinary RAM, in the dtype of its file. A streamed block needs them at
every arrival, and ComfyUI's functions would bring them one by one, converted to fp32 by the CPU.
Here a block's tensors are gathered once in pinned RAM, and travel with the copy that brings the
block. ComfyUI's functions get the same patch with its tensors on the device, so the numbers are the
same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from comfy.weight_adapter.base import WeightAdapterBase
from torch import Tensor

from ...memory import Along, Parcels
from ..weights.lora import Pair, halved, pairs_of
from ..weights.paged import Paged
from ..weights.patches import AGAIN, PatchSet
from ..weights.storage import is_quantised, storage_of
from .blocks import Block

# Share of a block's bytes. Larger patches, such as another model's weights (ModelMerge), stay in
# ordinary RAM.
LARGEST = 0.5


class PatchRoute(NamedTuple):
    """How a block's patches are applied.

    one_pass  whether plain LoRA may be added in one pass
    streams   whether the block comes anew for each use
    is_ours   whether our code computes the block, which converts any storage to fp16
    """

    one_pass: bool
    streams: bool = True
    is_ours: bool = True


class Pairs(list[Pair]):
    """A weight's patches where all of them are plain LoRA. on_the_way: add them to the copy that
    each product makes, and leave the weight as it is stored."""

    def __init__(self, pairs: Iterable[Pair], *, on_the_way: bool) -> None:
        super().__init__(pairs)
        self.on_the_way = on_the_way


class Later(tuple[Any, ...]):
    """A weight's patches for ComfyUI's functions, applied to the copy that each product makes. The
    weight stays as it is stored, because a sum could not be written back without another rounding.
    """

    __slots__ = ()


class _Place(NamedTuple):
    """The place of a tensor: its number in the parcel."""

    number: int


class _Form(NamedTuple):
    """One block's patches or `Pairs` by key, with places for their tensors; and the tensors."""

    patches: Mapping[str, Any]
    tensors: list[Tensor]
    route: PatchRoute


class Factors:
    """The patches of one segmentation's blocks. A block whose patches change is dropped (`drop`)."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.parcels: Parcels | None = None  # where there is a GPU
        self._blocks = blocks
        self._forms: dict[int, _Form] = {}

    def along(self, i: int, patches: PatchSet, route: PatchRoute) -> Along | None:
        """The tensors that travel with the copy of block i; None: none. Arguments as of `of`."""
        if self.parcels is None:
            return None
        self._formed(i, patches, route)
        return self.parcels.along(i)

    def ask(self, i: int, patches: PatchSet, route: PatchRoute) -> None:
        """Block i is next: its tensors start to travel unless they do already."""
        if self.parcels is not None:
            self._formed(i, patches, route)
            if i in self.parcels:
                self.parcels.ask(i)

    @contextlib.contextmanager
    def of(self, i: int, patches: PatchSet, route: PatchRoute) -> Iterator[Mapping[str, Any]]:
        """Block i's patches by key: a tuple of patches for ComfyUI's functions, or `Pairs`. The
        tensors are on the device within this context."""
        try:
            yield self.take(i, patches, route)
        finally:
            self.done(i)

    def take(self, i: int, patches: PatchSet, route: PatchRoute) -> Mapping[str, Any]:
        """The same, valid until `done`."""
        form = self._formed(i, patches, route)
        packed = self.parcels is not None and i in self.parcels
        there = self.parcels.take(i) if packed and self.parcels is not None else form.tensors
        return {key: _filled(value, there) for key, value in form.patches.items()}

    def done(self, i: int) -> None:
        """All work that reads block i's tensors has been given to the device."""
        if self.parcels is not None:
            self.parcels.done(i)

    def drop(self, layers: Sequence[int]) -> None:
        """Forget these blocks, because they get other patches."""
        for i in layers:
            self._forms.pop(i, None)
        if self.parcels is not None:
            self.parcels.drop(layers)

    def close(self) -> None:
        """Give everything back that is pinned or on the device."""
        self.drop(list(self._forms))
        self.parcels = None

    def _formed(self, i: int, patches: PatchSet, route: PatchRoute) -> _Form:
        if i in self._forms and self._forms[i].route != route:
            self.drop([i])  # a resident block streams now, or the other way around
        if i not in self._forms:
            form = _form(self._blocks[i], patches, route)
            most = LARGEST * sum(paged.storage.nbytes for paged in self._blocks[i].paged)
            fits = sum(tensor.nbytes for tensor in form.tensors) <= most
            if self.parcels is not None and fits and self.parcels.pack(i, form.tensors):
                form = form._replace(tensors=[])  # the fp16 copies are in pinned RAM now
            self._forms[i] = form
        return self._forms[i]


def _form(block: Block, patches: PatchSet, route: PatchRoute) -> _Form:
    tensors: list[Tensor] = []
    found: dict[str, Any] = {}
    for paged in block.paged:
        own = patches.get(paged.key)
        if own:
            found[paged.key] = _taken_out(_changes(paged, own, route), tensors)
    return _Form(found, tensors, route)


def _changes(paged: Paged, patches: tuple[Any, ...], route: PatchRoute) -> Pairs | Later | tuple[Any, ...]:
    weight = paged.stand_in
    is_half = weight.dtype is torch.float16 and not is_quantised(weight)
    on_the_way = paged.attribute == "weight" and _is_cast_for_each_product(paged, route)
    plain = [patch for patch in patches if patch is not AGAIN]  # one sum, in whatever steps
    found = pairs_of(plain, weight) if route.one_pass and (is_half or on_the_way) else None
    halves = [half for pair in found or () if (half := halved(pair)) is not None]
    if found is not None and len(halves) == len(found):
        return Pairs(halves, on_the_way=on_the_way)
    # ComfyUI's functions are slow, so writable residents are patched once, rounded as ComfyUI does.
    once = storage_of(weight).is_writable and not (route.one_pass and route.streams)
    return Later(patches) if on_the_way and not once else patches


def _is_cast_for_each_product(paged: Paged, route: PatchRoute) -> bool:
    full_precision = bool(getattr(paged.module, "_full_precision_mm", False))
    return storage_of(paged.stand_in).is_converted_for_products(by_us=route.is_ours, full_precision=full_precision)


def _taken_out(value: Any, tensors: list[Tensor]) -> Any:
    """The same patches with places for their tensors, which are added to `tensors`."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or value.device.type != "cpu" or not value.numel():
            return value
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return _rebuilt(value, lambda part: _taken_out(part, tensors))


def _filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The patches with these tensors in their places."""
    if isinstance(value, _Place):
        return tensors[value.number]
    return _rebuilt(value, lambda part: _filled(part, tensors))


def _rebuilt(value: Any, change: Any) -> Any:
    kind: Any = type(value)
    if isinstance(value, WeightAdapterBase):
        if kind.__module__.startswith("comfy.weight_adapter.") and isinstance(value.weights, tuple):
            return kind(value.loaded_keys, tuple(change(part) for part in value.weights))
        return value  # of another node: who knows what else is in it
    if isinstance(value, Pairs):
        halves = (Pair(change(pair.up), change(pair.down), pair.scale) for pair in value)
        return Pairs(halves, on_the_way=value.on_the_way)
    if kind in (tuple, Later):
        return kind(change(part) for part in value)
    return value  # strengths, names, and what stock nests in lists: patches of patches
