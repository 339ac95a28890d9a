"""A plan of how a picture passes in bands, as data: `picture_planner.py` makes it, and
`picture_passage.py` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .bands import CONV, Layer

Kind = Literal["given", "layer", "inner", "block"]

PACK = 8  # channels of a pixel that the kernels read at a time


@dataclass(frozen=True)
class Picture:
    """One of those that follow each other on the way.

    kind    given  what the bands begin with
            layer  of a convolution, a resampling, or whatever the layer stands for
            inner  between the two convolutions of a residual block, block: its result
    source  the number of the picture it is made of; a block's result: the block's input, and the
            one before it
    stage   its number among those that pass in bands
    layer   what makes it
    widens  whether the block's shortcut is a convolution
    normed  whether a norm looks at all of it
    """

    kind: Kind
    channels: int
    height: int
    width: int
    source: int
    stage: int
    layer: Layer = CONV
    widens: bool = False
    normed: bool = True

    def bytes(self, rows: int, item: int) -> int:
        return rows * self.width * self.channels * item


@dataclass(frozen=True)
class Way:
    """The pictures that pass in bands, and how the way ends.

    exits  the channels of what the last norm and convolution make, band by band; 0: the last
           picture is wanted whole
    """

    pictures: tuple[Picture, ...]
    exits: int
    item: int = 2

    @property
    def begins_kept(self) -> bool:
        """Whether what the bands begin with lies on the card: pixels come piece by piece."""
        return bool(self.exits)

    @property
    def last(self) -> int:
        return len(self.pictures) - 1

    @property
    def straight(self) -> bool:
        """Whether bands go all the way, because no norm looks at all of a picture."""
        return not any(p.normed for p in self.pictures)


@dataclass(frozen=True)
class Pass:
    """Making one picture of the way in bands.

    number   of the picture; one beyond the last: what leaves
    rows     of a band; bands: how many there are
    gathers  whether the moments of its groups are wanted
    keeps    whether it is kept
    lags     whether a band is written only when the next one was made: its place is that of a
             picture whose rows are still needed
    fills    whether the block's shortcut of it goes straight to where the block's result will be
             kept
    frees    the pictures that nobody needs after it
    slab     bytes of the one piece of memory that its bands pass through
    anew     whether that is another piece than the pass before had
    returns  whether what was kept until then goes back to the card: nothing that is kept from now
             on is as large
    """

    number: int
    rows: int
    bands: int
    gathers: bool = False
    keeps: bool = False
    lags: bool = False
    fills: bool = False
    frees: tuple[int, ...] = ()
    slab: int = 0
    anew: bool = False
    returns: bool = False


@dataclass(frozen=True)
class Plan:
    """
    passes    in order
    kept      the pictures that are kept
    in_place  those of them that take the place of their sources
    over      blocks' results that take the place of what lies within the block
    filled    blocks' results whose shortcuts are there before the rest of them
    peak      bytes at most
    products  how many are computed
    """

    passes: tuple[Pass, ...]
    kept: frozenset[int]
    in_place: frozenset[int] = frozenset()
    over: frozenset[int] = frozenset()
    filled: frozenset[int] = frozenset()
    peak: int = 0
    products: int = 0

    @property
    def bands(self) -> int:
        return sum(each.bands for each in self.passes)


def in_one_pass(way: Way, count: int, nbytes: int) -> Plan:
    """The plan of pictures that no norm looks at: so many bands go all the way, each through so
    many bytes.
    """
    height, number = way.pictures[-1].height, way.last + 1 if way.exits else way.last
    rows = -(-height // count)
    one = Pass(number, rows, -(-height // rows), keeps=not way.exits, slab=nbytes, anew=True)
    return Plan((one,), frozenset({0 if way.exits else number}), peak=nbytes)
