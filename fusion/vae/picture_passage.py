"""The passage of a picture through a VAE in bands, by a plan that says what is kept and what is
recomputed (`picture_planner.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...kernels_cuda import join_moments
from .bands import CONV, by_rows, entering
from .memory_limits import Progress, channels_last
from .picture_layers import PictureLayers
from .picture_plan import Pass, Plan, Way

Leave = Callable[[int, int, Tensor], None]
Rows = Callable[[int, int], Tensor]


class Passage:
    """The passage of one sample.

    modules  the module that makes each picture of the way
    given    rows of the first picture: pixels that arrive piece by piece, or a tensor on the card
    end      the last norm and convolution of a decoder; None: the last picture is the result
    like     type and device of the pictures
    """

    def __init__(
        self,
        layers: PictureLayers,
        modules: Sequence[Any],
        way: Way,
        plan: Plan,
        given: Rows,
        end: tuple[Any, Any] | None,
        progress: Progress,
        like: tuple[torch.dtype, torch.device],
    ) -> None:
        self._layers, self._way, self._plan, self._given, self._end = layers, way, plan, given, end
        self._dtype, self._device = like
        self._modules, self._progress = modules, progress
        self._kept: dict[int, Tensor] = {}
        self._moments: dict[int, Tensor] = {}

    def run(self, leave: Leave | None = None) -> Tensor | None:
        """Run all passes. leave(first, last, rows): receives the rows that leave, `last` excluded;
        None: the last picture is returned, whole."""
        way = self._way
        self._layers.ready(self._dtype, self._device)
        if way.pictures[0].normed:
            self._moments[0] = self._layers.moments(self._norm(0), self._given(0, way.pictures[0].height))
        for each in self._plan.passes:
            self._places(each)
            if each.number == len(way.pictures):
                assert leave is not None
                self._leave(each, leave)
            else:
                self._make(each)
            self._layers.forget()
            for number in each.frees:
                self._free(number)
        kept = self._kept.get(self._place(way.last))
        self._kept.clear()
        return kept

    # ----------------------------------------------------------------------------------------------------------- passes

    def _make(self, each: Pass) -> None:
        number, p = each.number, self._way.pictures[each.number]
        moments, counts = [], []
        late: tuple[int, int, Tensor] | None = None
        for first, last in self._bands(p.height, each):
            made = self._made(number, first, last, fills=each.fills)
            if each.gathers:
                moments.append(self._layers.moments(self._norm(number), made))
                counts.append(made.shape[2])
            if late is not None:
                self._write(number, *late)
            late = (first, last, made) if each.lags else None
            if each.keeps and not each.lags:
                self._write(number, first, last, made)
            del made
        if late is not None:
            self._write(number, *late)
        if each.gathers:
            self._moments[number] = join_moments(moments, counts)

    def _leave(self, each: Pass, leave: Leave) -> None:
        last_one = self._way.pictures[-1]
        for first, last in self._bands(last_one.height, each):
            if self._end is None:
                leave(first, last, self._had(self._way.last, first, last))
                continue
            norm, conv = self._end
            low, high = CONV.needs((first, last), last_one.height)
            box = [self._had(self._way.last, low, high)]
            box.append(self._layers.norm(norm, box.pop(), self._moments[self._way.last]))
            leave(first, last, self._layers.last(conv, box.pop(), low == first, high == last))

    def _bands(self, height: int, each: Pass) -> Iterator[tuple[int, int]]:
        """The rows of each band, as a span; checks for interrupts, and moves the bar."""
        for band in by_rows(height, each.rows):
            comfy.model_management.throw_exception_if_processing_interrupted()
            yield band
            self._progress.add(1)

    # --------------------------------------------------------------------------------------------------- what is kept

    def _places(self, each: Pass) -> None:
        """Allocate kept pictures before a pass, each by itself, and one slab for temporary tensors,
        because bands have many sizes, and one would not fit where another was. Each piece that is
        allocated on the card and given back takes a millisecond. The slab is held while kept
        pictures are allocated and freed, so that they do not lie in it."""
        layers = self._layers
        slab = None if each.anew else layers.slab(each.slab, self._device)
        if each.anew or each.returns:
            layers.tidy()
        for kept in (each.number,) * each.keeps + (each.number + 1,) * each.fills:
            self._room(kept)
        if each.anew:
            slab = layers.slab(each.slab, self._device)
        del slab

    def _place(self, number: int) -> int:
        """The number of the picture whose memory holds this one."""
        plan = self._plan
        while number in plan.in_place or number in plan.over:
            number = number - 1 if number in plan.over else self._way.pictures[number].source
        return number

    def _room(self, number: int) -> Tensor:
        home = self._place(number)
        if home not in self._kept:
            p = self._way.pictures[number]
            shape, last = (1, p.channels, p.height, p.width), torch.channels_last
            self._kept[home] = torch.empty(shape, dtype=self._dtype, device=self._device, memory_format=last)
        return self._kept[home]

    def _write(self, number: int, first: int, last: int, rows: Tensor) -> None:
        self._room(number)[:, :, first:last].copy_(rows)

    def _free(self, number: int) -> None:
        if number == 0:
            self._given = _gone
        else:
            self._kept.pop(number, None)

    # ----------------------------------------------------------------------------------------------------- what is made

    def _norm(self, number: int) -> Any:
        """The norm that reads a picture: of the block that begins with it, of the block that it
        lies in, or the last."""
        p = self._way.pictures[number]
        if p.kind == "inner":
            return self._modules[number].norm2
        if number < self._way.last:
            return self._modules[number + 1].norm1
        assert self._end is not None
        return self._end[0]

    def _had(self, number: int, first: int, last: int) -> Tensor:
        """Rows of a picture, kept or made now."""
        if number == 0:
            return self._given(first, last)
        kept = self._kept.get(self._place(number)) if self._is_kept(number) else None
        return self._made(number, first, last) if kept is None else kept[:, :, first:last]

    def _is_kept(self, number: int) -> bool:
        return number in self._plan.kept

    def _made(self, number: int, first: int, last: int, fills: bool = False) -> Tensor:
        p, module = self._way.pictures[number], self._modules[number]
        if self._way.straight:
            return self._straight(first, last)
        if p.kind == "inner":
            return self._between(number, first, last, fills)
        if p.kind == "block":
            return self._block(number, first, last)
        layer, height = p.layer, self._way.pictures[p.source].height
        low, high = layer.needs((first, last), height)
        above, below = layer.zeros((first, last), height)
        box = [channels_last(self._had(p.source, low, high))]
        box.append(self._layers.make(module, box.pop(), above, below))
        # An upsampling makes both pixels of each input pixel, even if only one is wanted.
        return box.pop() if layer.scale == 1 else box.pop()[:, :, first - layer.scale * low : last - layer.scale * low]

    def _straight(self, first: int, last: int) -> Tensor:
        """Rows of the last picture. A band enters with all rows that it depends on, and loses them
        on the way: rows that depend on others beyond a cut are not made, and beyond the picture
        there are zeros."""
        given, *pictures = self._way.pictures
        heights = [given.height, *(p.height for p in pictures)]
        low, high = entering([p.layer for p in pictures], heights[:-1], (first, last))
        box = [self._given(low, high)]
        for p, module, height in zip(pictures, self._modules[1:], heights, strict=False):
            layer, at = p.layer, p.layer.scale * low
            above, below = layer.before * (low == 0), layer.kernel // 2 * (high == height)
            low, high = layer.makes((low, high), height)
            box.append(self._layers.make(module, box.pop(), above, below))
            if layer.scale > 1:
                box.append(box.pop()[:, :, low - at : high - at])
        return box.pop()[:, :, first - low : last - low]

    def _between(self, number: int, first: int, last: int, fills: bool) -> Tensor:
        """Rows between a block's convolutions. fills: the shortcut's output of these rows is kept
        on the way."""
        p, block = self._way.pictures[number], self._modules[number]
        low, high = CONV.needs((first, last), p.height)
        box = [self._had(p.source, low, high)]
        if fills:
            self._write(number + 1, first, last, self._layers.shortcut(block, box[0][:, :, first - low : last - low]))
        return self._first_half(block, p.source, box, low == first, high == last)

    def _first_half(self, block: Any, source: int, box: list[Tensor], above: bool, below: bool) -> Tensor:
        """A block's first norm and convolution, of rows that the box gives up."""
        box.append(self._layers.norm(block.norm1, box.pop(), self._moments[source]))
        return self._layers.first(block.conv1, box.pop(), above, below)

    def _block(self, number: int, first: int, last: int) -> Tensor:
        p, block, layers = self._way.pictures[number], self._modules[number], self._layers
        low, high = CONV.needs((first, last), p.height)
        above, below = low == first, high == last
        inner = self._moments[number - 1]
        if number in self._plan.filled:
            seen = layers.norm(block.norm2, self._had(number - 1, low, high), inner)
            return layers.second(block.conv2, seen, self._room(number)[:, :, first:last], above, below)
        if self._is_kept(number - 1):
            skip = layers.shortcut(block, self._had(p.source, first, last))
            seen = layers.norm(block.norm2, self._had(number - 1, low, high), inner)
            return layers.second(block.conv2, seen, skip, above, below)
        far_low, far_high = CONV.needs((low, high), p.height)
        x = self._had(p.source, far_low, far_high)
        between = self._first_half(block, p.source, [x], far_low == low, far_high == high)
        seen = layers.norm(block.norm2, between, inner)
        del between
        skip = layers.shortcut(block, x[:, :, first - far_low : last - far_low])
        del x
        return layers.second(block.conv2, seen, skip, above, below)


def _gone(_first: int, _last: int) -> Tensor:
    raise AssertionError("the plan reads what it has freed")
