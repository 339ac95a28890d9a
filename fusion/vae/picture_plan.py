"""The plan of a picture's passage in bands, as data: `picture_planner.py` makes it, and
`picture_passage.py` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .bands import CONV, Layer

Kind = Literal["given", "layer", "inner", "block"]

PACK = 8  # the kernels read a pixel's channels in groups of so many


@dataclass(frozen=True)
class Picture:
    """One of the feature maps that follow each other on the way.

    kind    given  the input of the bands
            layer  the output of a convolution, a resampling, or another layer of the table
            inner  between the two convolutions of a residual block
            block  the result of a residual block
    source  number of the picture that it is made of. A block's result has the block's input as
            source, and also needs the picture before it
    stage   its number among those that pass in bands
    layer   the layer that makes it
    widens  whether the block's shortcut is a convolution
    normed  whether a norm reads all of it
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
    """The pictures that pass in bands, and the end of the way.

    exits  channels that the last norm and convolution make, band by band; 0: the last picture is
           kept whole
    """

    pictures: tuple[Picture, ...]
    exits: int
    item: int = 2

    @property
    def begins_kept(self) -> bool:
        """Whether the input of the bands is on the card. Pixels arrive piece by piece instead."""
        return bool(self.exits)

    @property
    def last(self) -> int:
        return len(self.pictures) - 1

    @property
    def straight(self) -> bool:
        """Whether bands go all the way at once, because no norm reads a whole picture."""
        return not any(p.normed for p in self.pictures)


@dataclass(frozen=True)
class Pass:
    """Making one picture of the way in bands.

    number   of the picture; one more than the last: the output
    rows     of a band
    bands    how many there are
    gathers  whether the moments of its groups are needed
    keeps    whether it is kept
    lags     whether a band is written only after the next one was made, because it overwrites a
             picture whose rows are still needed
    fills    whether the shortcut's output goes straight to where the block's result will be kept
    frees    the pictures that are not needed after it
    slab     bytes of the one piece of memory that its bands pass through
    anew     whether that is another piece than in the pass before
    returns  whether freed pictures go back to the card, because no later one has their size
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
    """A plan of a picture's passage.

    passes    in order
    kept      numbers of the pictures that are kept
    in_place  those of them that overwrite their sources
    over      blocks' results that overwrite the picture within the block
    filled    blocks' results whose shortcuts are written before the rest of them
    peak      most bytes at a time
    products  number of multiplications
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
    """The plan if no norm reads a whole picture: so many bands go all the way, each within so many
    bytes."""
    height, number = way.pictures[-1].height, way.last + 1 if way.exits else way.last
    rows = -(-height // count)
    one = Pass(number, rows, -(-height // rows), keeps=not way.exits, slab=nbytes, anew=True)
    return Plan((one,), frozenset({0 if way.exits else number}), peak=nbytes)
