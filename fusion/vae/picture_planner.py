"""The plan for passing a large picture through a VAE in bands without seams: which pictures are
kept on the way, and which are made again.

A convolution needs only the rows next to a band. A group norm needs the whole picture: no row can
be normed before the last row was made. So the work goes from norm to norm, in passes. A pass makes
one picture of the way (a block's input, or what lies between its convolutions) band by band, from
pictures that are kept, and gathers the moments of its groups, with which the next pass can norm it.

    kept        both pictures of a block      each convolution runs once
    made again  all others, in each pass that needs them, from the last kept picture, with the rows
                around a band

At 2048x2048 in fp16 a picture of 128 channels has 1.07 GB, and the decoder's last stage has seven
norms. Two such pictures and the 256 channels at half the size that they are made of fit 3 GiB: all
but the upsampled one are kept, and that is made twice. At 4096x4096 not one of them fits, and the
last stage is made anew for each of its norms, 5.5 times its work. So one of a few ways is chosen
for each stage, such that everything fits and the products are fewest (`best`). Stages that fit pass
whole, before the bands of a decoder and after those of an encoder; so does the middle, because its
attention reads all of a picture.

Bands are rows, because the rows of a channels-last picture are contiguous at any width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .memory_limits import HELD
from .picture_plan import PACK, Pass, Picture, Plan, Way

SLAB = 768 << 20  # most bytes that bands pass through: more do not fill a card better
LEAST_ROWS = 8  # of a band: with fewer, most of the work is for the rows around it


# ------------------------------------------------------------------------------------------- what a band takes of others


@dataclass(frozen=True)
class Made:
    """The cost of making some rows of a picture: bytes at the peak and at the end, and products."""

    peak: int
    size: int
    products: int


class _Reckoning:
    """The cost of bands, by an outline."""

    def __init__(self, outline: Outline) -> None:
        self.way, self.kept, self.filled = outline.way, outline.kept, outline.filled

    def had(self, number: int, rows: int) -> Made:
        if number in self.kept:
            return Made(0, 0, 0)
        return self.made(number, rows)

    def made(self, number: int, rows: int) -> Made:
        way = self.way
        p = way.pictures[number]
        size = p.bytes(rows, way.item)
        if p.kind == "given":  # pixels arrive in another type and format
            size = rows * p.width * PACK * (way.item + 4)
            return Made(size, size, 0)
        source = way.pictures[p.source]
        if p.kind == "block":
            return self._block(number, p, source, rows, size)
        x = self.had(p.source, p.layer.most(rows))
        if p.layer.scale > 1:  # all that can be made of the input rows
            rows = p.layer.scale * p.layer.most(rows)
            size = p.bytes(rows, way.item)
        peak = max(x.peak, x.size + size)
        if p.kind == "inner":
            normed = source.bytes(rows + 2, way.item)
            peak = max(x.peak, x.size + normed, normed + size, x.size + size if number + 1 in self.filled else 0)
        return Made(peak, size, x.products + p.layer.taps * rows * p.width * source.channels * p.channels)

    def _block(self, number: int, p: Picture, source: Picture, rows: int, size: int) -> Made:
        item = self.way.item
        products = 9 * rows * p.width * p.channels * p.channels
        normed = p.bytes(rows + 2, item)
        if number in self.filled:
            return Made(normed + size, size, products)
        widening = rows * p.width * source.channels * p.channels if p.widens else 0
        if number - 1 in self.kept:
            x = self.had(p.source, rows)
            skip = size if p.widens else x.size
            peak = max(x.peak, x.size + skip if p.widens else 0, skip + normed + size)
            return Made(peak, size, x.products + products + widening)
        x = self.had(p.source, rows + 4)
        first, between = source.bytes(rows + 4, item), p.bytes(rows + 2, item)
        products += 9 * (rows + 2) * p.width * source.channels * p.channels + widening
        peak = max(x.peak, x.size + first + between, x.size + between + normed)
        peak = max(peak, x.size + normed + size, 2 * size + normed if p.widens else 0)
        return Made(peak, size, x.products + products)

    def leaving(self, rows: int) -> Made:
        """The cost of the last norm and convolution, and of the way to the host."""
        way = self.way
        last = way.pictures[-1]
        x = self.had(way.last, rows + 2)
        normed, out = last.bytes(rows + 2, way.item), rows * last.width * way.exits
        peak = max(x.peak, x.size + normed, normed + out * way.item, out * (way.item + 8))
        return Made(peak, out * way.item, x.products + 9 * out * last.channels)


# ------------------------------------------------------------------------------------------------------------- choosing

# Which pictures of a stage are kept: its first, those within blocks, the blocks' results except the
# last, the last. `over`: if a block widens and its input is not kept, its result overwrites the
# picture within the block. Otherwise it has memory of its own, into which the shortcut's output is
# written first.
Inner = Literal["over"] | bool
Keeps = tuple[bool, Inner, bool, bool]
DECODING: tuple[Keeps, ...] = (
    (True, True, True, True),
    (False, True, True, True),
    (False, "over", True, True),
    (True, False, True, True),
    (False, False, True, True),
    (False, False, False, True),
    (False, False, False, False),
)
# The end of a stage is read only once, by the convolution that makes it smaller.
ENCODING: tuple[Keeps, ...] = (
    (True, True, True, False),
    (False, True, True, False),
    (True, False, True, False),
    (False, False, True, False),
    (True, False, False, False),
    (False, False, False, False),
)


# Number of plans that are made in full, of those with the fewest products, because small bands add
# products that only the plan tells.
TRIED = 12


@lru_cache(maxsize=64)
def best(way: Way, room: int) -> Plan:
    """The plan with the fewest products among those that keep within so many bytes; if none does,
    the one that needs least."""
    stages = 1 + max(p.stage for p in way.pictures)
    choices = itertools.product(DECODING if way.exits else ENCODING, repeat=stages)
    outlines = sorted(
        (Outline(way, *_kept(way, keeps)) for keeps in choices), key=lambda each: (each.products, each.most)
    )
    fits: list[Plan] = []
    for outline in outlines:
        if outline.most < room and (plan := planned(outline, room)).peak <= room:
            fits.append(plan)
            if len(fits) == TRIED:
                break
    if fits:
        return min(fits, key=lambda plan: (plan.products, plan.peak))
    least = sorted(outlines, key=lambda each: each.most)[:TRIED]
    return min((planned(outline, room) for outline in least), key=lambda plan: plan.peak)


def _kept(way: Way, keeps: Sequence[Keeps]) -> tuple[frozenset[int], frozenset[int]]:
    """The pictures that are kept, and those of them that overwrite the picture within their
    blocks."""
    kept = {0} if way.begins_kept else set()
    over = set()
    for number, p in enumerate(way.pictures):
        entry, inner, blocks, last = keeps[p.stage]
        is_last = number == way.last or way.pictures[number + 1].stage != p.stage
        if p.kind == "inner":
            wanted = bool(inner)
        elif p.kind == "block":
            wanted = last if is_last else blocks
            if inner == "over":
                over.add(number)
        else:
            wanted = entry and p.kind != "given"
        if wanted or (is_last and number == way.last and not way.exits):
            kept.add(number)
    return frozenset(kept), frozenset(over)


class Outline:
    """The consequences of a choice of kept pictures, for bands of any size.

    numbers   of the passes, in order
    filled    blocks' results whose shortcuts are made together with the pictures before them,
              because their inputs are gone later
    in_place  those that overwrite their sources
    over      those that overwrite the picture within their block
    alive     bytes that are kept during each pass; most: the most of them
    takes     bytes of each allocation before a pass, largest first
    frees     the pictures that are not needed after a pass; leaves: their bytes, largest first
    products  without those for rows that bands share
    """

    def __init__(self, way: Way, kept: frozenset[int], over: frozenset[int] = frozenset()) -> None:
        self.way, self.kept = way, kept
        pictures = way.pictures
        blocks = [k for k in kept if pictures[k].kind == "block"]
        widened = {k for k in blocks if pictures[k].widens and k - 1 in kept and pictures[k].source not in kept}
        self.over = over & widened
        self.filled = frozenset(widened - over)
        # The input of the bands is not ours to overwrite.
        self.in_place = frozenset(
            k for k in blocks if pictures[k].source in kept and not pictures[k].widens and pictures[k].source != 0
        )
        self.numbers = [k for k, p in enumerate(pictures) if k and (p.normed or k in kept)]
        reads, products = self._followed()
        if way.exits:
            self.numbers.append(len(pictures))
        self.products = sum(products[k] for k in self.numbers)
        self._live(reads)

    def _followed(self) -> tuple[list[frozenset[int]], list[int]]:
        """For each picture, and for the output: the kept ones that it is made of, and the
        products."""
        reads: list[frozenset[int]] = []
        products: list[int] = []

        def had(number: int) -> tuple[frozenset[int], int]:
            return (frozenset((number,)), 0) if number in self.kept else (reads[number], products[number])

        for k, p in enumerate(self.way.pictures):
            own = _products(self.way, k)
            if p.kind == "given":
                seen: tuple[frozenset[int], int] = frozenset(), 0
            elif k in self.filled:
                seen = frozenset((k - 1, k)), 0
            elif p.kind == "block" and k - 1 in self.kept:
                read, before = had(p.source)
                seen = read | {k - 1}, before
            elif p.kind == "block":
                seen = reads[k - 1], products[k - 1]
            else:
                seen = had(p.source)
            reads.append(seen[0])
            products.append(seen[1] + own)
        read, before = had(self.way.last)
        reads.append(read)
        products.append(before)
        return reads, products

    def _live(self, reads: Sequence[frozenset[int]]) -> None:
        pictures = self.way.pictures
        home = {k: k for k in self.kept}
        for k in sorted(self.in_place | self.over):
            home[k] = home[k - 1 if k in self.over else pictures[k].source]
        begins = {k: k - (k in self.filled) for k in self.kept}
        until = {home[k]: begins[home[k]] for k in self.kept}
        for k in self.kept:
            until[home[k]] = max(until[home[k]], begins[k])
        for k in self.numbers:
            for each in reads[k]:
                until[home[each]] = max(until[home[each]], k)
        if not self.way.exits:  # it is the result
            until[home[self.way.last]] = len(pictures)
        sizes = {k: pictures[k].bytes(pictures[k].height, self.way.item) for k in until}
        self.alive = [sum(sizes[k] for k, end in until.items() if begins[k] <= now <= end) for now in self.numbers]
        self.most = max(self.alive)
        self.frees = [tuple(sorted(k for k, end in until.items() if end == now)) for now in self.numbers]
        self.leaves = [sorted((sizes[k] for k in frees if k), reverse=True) for frees in self.frees]
        self.takes = [sorted((sizes[k] for k in until if k and begins[k] == now), reverse=True) for now in self.numbers]


@lru_cache(maxsize=1024)
def _products(way: Way, number: int) -> int:
    """Products for a picture, made of the one before it."""
    p = way.pictures[number]
    area, into = p.height * p.width, way.pictures[p.source].channels
    if p.kind == "given":
        return 0
    if p.kind == "block":
        return area * p.channels * (9 * p.channels + (into if p.widens else 0))
    return area * into * p.channels * p.layer.taps


def planned(outline: Outline, room: int) -> Plan:
    """The plan of an outline, with bands as large as fit, and at most SLAB bytes."""
    way, reckoning = outline.way, _Reckoning(outline)
    peak = products = slab = 0
    left: list[int] = []
    passes = []
    cuts = []
    for k, alive in zip(outline.numbers, outline.alive, strict=True):
        height = way.pictures[min(k, way.last)].height
        lags = k in outline.over or (k in outline.in_place and k - 1 not in outline.kept)
        rows, transient = _rows(reckoning, k, lags, height, min(SLAB, room - alive))
        cuts.append((lags, rows, -(-height // rows), int(HELD * transient)))
    for turn, (k, alive, (lags, rows, count, passing)) in enumerate(
        zip(outline.numbers, outline.alive, cuts, strict=True)
    ):
        anew = passing > slab or alive + slab > room
        if anew:  # large enough for later passes, too
            slab = max(passing, min(room - alive, max(later for *_, later in cuts[turn:])))
        # Pictures of the same size as the freed ones reuse their memory.
        returns, left = bool(left) and left != outline.takes[turn], outline.leaves[turn]
        peak = max(peak, alive + slab)
        products += count * _at(reckoning, k, rows).products
        passes.append(
            Pass(
                number=k,
                rows=rows,
                bands=count,
                gathers=k < len(way.pictures) and way.pictures[k].normed,
                keeps=k in outline.kept,
                lags=lags,
                fills=k + 1 in outline.filled,
                frees=outline.frees[turn],
                slab=slab,
                anew=anew,
                returns=returns,
            )
        )
    return Plan(tuple(passes), outline.kept, outline.in_place, outline.over, outline.filled, peak, products)


def _at(reckoning: _Reckoning, number: int, rows: int) -> Made:
    return reckoning.leaving(rows) if number == len(reckoning.way.pictures) else reckoning.made(number, rows)


def _rows(reckoning: _Reckoning, number: int, lags: bool, height: int, room: int) -> tuple[int, int]:
    """Rows of a band, as many as fit, and their bytes. Bytes grow at least in proportion to rows,
    so between two sizes a straight line is an upper bound."""

    def taken(rows: int) -> int:
        made = _at(reckoning, number, rows)
        return made.peak + (made.size if lags else 0)

    low, high = min(LEAST_ROWS, height), height
    small, large = taken(low), taken(high)
    if HELD * large <= room or high == low:
        return high, large
    per_row = max(1.0, (large - small) / (high - low))
    rows = low + max(0, int((room / HELD - small) / per_row))
    rows = -(-height // -(-height // min(rows, high)))  # bands of about equal size
    return rows, taken(rows)
