"""How much memory a Wan VAE needs, and the bands a frame is cut into so that a bound is kept.

A causal convolution remembers the two frames before the ones it computes. At 1280x720 in fp16 a frame of 96 channels has
177 MB, and Wan 2.1's decoder has seven such convolutions at that size:

    remembered, per stage        7 x 2 x 177 MB = 2.5 GB     (the head's included)
                                 6 x 2 x  88 MB = 1.1 GB     192 channels, half the width and height
                                 about            0.7 GB     384 channels at a quarter and an eighth
    at work, two frames a time   3 x 2 x 177 MB = 1.1 GB     a block's input, what lies between, and its output
    waiting                      4 x     88 MB = 0.35 GB     four frames between two stages, taken two by two
                                               = 5.7 GB

Nothing of it can be left out or shrunk: recomputing what is remembered would take fourteen frames back at each step, and
copying it out and in would take longer than computing. But it all is proportional to the part of the frame that passes
through. So a large frame passes in bands, each through all its time before the next begins, and this is exact: a band
enters each stage with as many more rows or columns as the convolutions behind it look sideways, which get wrong values at
the cut, one further in with each convolution, and are cut off before they arrive. The attention alone sees a whole frame.
It runs at the size of the latent, for all frames, before the decoder's bands and behind the encoder's.

The price is the margin: 13 pixels of the latent on either side of a decoder's cut where the channels are many and pixels
few, 1 where the work is; 12 % more work for 1280x720 in four bands. The encoder's margin is widest where its images are
(9 pixels of the latent), 18 % in three bands. Wan 2.2's weights leave its decoder half the room: ten bands, 69 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .....kernels_cuda.ops.attention.attention_products import scratch_bytes

Span = tuple[int, int]

PAIR = 2  # frames that pass at a time
MARGIN = 64 << 20  # bytes: weights on their way, what leaves for the host, what allocators round up
LEAST = 4  # pixels of a latent that a band makes


@dataclass(frozen=True)
class Cut:
    """The part of what a stage has computed that goes on, along one side of the image. None: all."""

    dim: int = 4
    span: Span | None = None
    even_end: int = 0

    def of(self, x: Tensor) -> Tensor:
        """x [b, c, t, h, w], a view of it."""
        return x if self.span is None else x.narrow(self.dim, self.span[0], self.span[1] - self.span[0])

    def even(self, x: Tensor) -> Tensor:
        """The part of a stage's input that its halved output shows: one less where a convolution looks beyond it."""
        return x if self.span is None else x.narrow(self.dim, self.span[0], self.even_end - self.span[0])


WHOLE = Cut()


@dataclass(frozen=True)
class Profile:
    """A stage's channels.

    blocks  of each residual block: those that its two convolutions see
    others  those of its entry or exit
    out     of what it hands on
    """

    blocks: tuple[tuple[int, int], ...]
    others: tuple[int, ...]
    up: bool
    over_time: bool
    out: int
    shortcut: bool

    @property
    def reach(self) -> int:
        """Pixels that its convolutions look sideways."""
        return 2 * len(self.blocks) + len(self.others)

    @property
    def remembered(self) -> int:
        """Channels of all that is remembered."""
        own = sum(into + out for into, out in self.blocks) + sum(-(-c // 8) * 8 for c in self.others)
        return own + (self.blocks[-1][1] if self.over_time else 0)

    @property
    def at_work(self) -> int:
        """Channels of the frames that a block needs at a time, beside what is remembered."""
        needs = [3 * out if into == out else max(3 * out + into, 2 * (into + out)) for into, out in self.blocks]
        return max(needs) + (self.blocks[0][0] if self.shortcut else 0)


@dataclass(frozen=True)
class Band:
    """A part of the image along one side: what it makes, what enters, and what each stage hands on."""

    made: Span
    enters: Span
    cuts: tuple[Cut, ...]
    widths: tuple[int, ...]  # of what each stage computes


# -------------------------------------------------------------------------------------------------------------- bands


def decoder_bands(count: int, side: int, reaches: Sequence[int], dim: int) -> list[Band]:
    """`count` bands of an image whose latent has `side` pixels along `dim`. `made` is in pixels of the last stage."""
    sizes = [side << k for k in range(len(reaches))]
    return [_decoder_band(made, sizes, reaches, dim) for made in _parts(count, side, 1 << (len(reaches) - 1))]


def _decoder_band(made: Span, sizes: Sequence[int], reaches: Sequence[int], dim: int) -> Band:
    leave, cuts, widths = made, [], []
    for k in reversed(range(len(sizes))):
        low, high = _grown(leave, reaches[k], sizes[k])
        if k:
            # The upsampling before this stage has a convolution too, and makes two pixels of one.
            before = max(0, (low - 1) // 2), min(sizes[k - 1], (high + 2) // 2)
            low, high = 2 * before[0], 2 * before[1]
        cuts.append(Cut(dim, (leave[0] - low, leave[1] - low)))
        widths.append(high - low)
        if k:
            leave = before
    return Band(made, (low, high), tuple(reversed(cuts)), tuple(reversed(widths)))


def encoder_bands(count: int, side: int, reaches: Sequence[int], dim: int) -> list[Band]:
    """`count` bands of an image whose latent has `side` pixels along `dim`. `made` is in pixels of the latent."""
    deepest = len(reaches) - 1
    sizes = [side << (deepest - k) for k in range(len(reaches))]
    return [_encoder_band(made, sizes, reaches, dim) for made in _parts(count, side, 1)]


def _encoder_band(made: Span, sizes: Sequence[int], reaches: Sequence[int], dim: int) -> Band:
    leave, even_end, cuts, widths = made, made[1], [], []
    for k in reversed(range(len(sizes))):
        low, high = _grown(leave, reaches[k], sizes[k])
        cuts.append(Cut(dim, (leave[0] - low, leave[1] - low), even_end - low))
        widths.append(high - low)
        if k:
            # The downsampling before this stage makes one pixel of two and one further to the right.
            leave, even_end = (2 * low, min(2 * high + 1, sizes[k - 1])), 2 * high
    return Band(made, (low, high), tuple(reversed(cuts)), tuple(reversed(widths)))


def _parts(count: int, side: int, scale: int) -> list[Span]:
    edges = [side * i // count * scale for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def _grown(span: Span, by: int, size: int) -> Span:
    return max(0, span[0] - by), min(size, span[1] + by)


# ------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Work:
    """One half of a VAE and the image it meets: enough to know what it needs.

    stages   first to last
    decodes  whether they go from the latent to the image
    height, width, frames  of the latent
    image    channels of the image, of a pixel to the convolutions
    item     bytes of a value
    """

    stages: tuple[Profile, ...]
    decodes: bool
    height: int
    width: int
    frames: int
    image: int = 3
    item: int = 2

    @property
    def dim(self) -> int:
        """The side that is cut: the longer one."""
        return 4 if self.width >= self.height else 3

    def bands(self, count: int) -> list[Band]:
        make = decoder_bands if self.decodes else encoder_bands
        return make(count, max(self.height, self.width), [stage.reach for stage in self.stages], self.dim)

    @property
    def inner(self) -> int:
        """Channels of the middle."""
        return self.stages[0].blocks[0][0] if self.decodes else self.stages[-1].out

    def features(self) -> int:
        """Bytes of what lies between the bands and the attention, for all frames."""
        return self.inner * self.height * self.width * self.frames * self.item

    def peak(self, count: int) -> int:
        """Bytes needed at a time with so many bands, without the weights and, of several bands, the features."""
        pixels = self.inner * self.height * self.width * self.item
        pair, remembered = (1, 0) if self.frames == 1 else (PAIR, 5 * PAIR * pixels)
        tokens = self.height * self.width
        # A block's, or the attention's, which takes one frame after another.
        middle = 8 * pair * pixels + scratch_bytes(tokens, tokens, self.inner)
        most = max(self._peak(band) for band in self.bands(count))
        return MARGIN + (remembered + max(middle, most) if count == 1 else max(remembered + middle, most))

    def _peak(self, band: Band) -> int:
        """Bytes that the stages need at a time for a band."""
        other, deepest, alone = min(self.height, self.width), len(self.stages) - 1, self.frames == 1
        areas = [width * (other << (k if self.decodes else deepest - k)) for k, width in enumerate(band.widths)]
        pair = 1 if alone else PAIR
        remembered = 0 if alone else sum(PAIR * s.remembered * a for s, a in zip(self.stages, areas, strict=True))
        waiting, most = 0, 0
        for k, (stage, area) in enumerate(zip(self.stages, areas, strict=True)):
            at_work = pair * stage.at_work * area
            if stage.up:
                frames = 2 * pair if stage.over_time and not alone else pair
                made = frames * stage.out * 4 * area
                dealt = frames * stage.blocks[-1][1] * area
                spread = pair * stage.out * area if stage.shortcut else 0
                at_work = max(at_work, dealt + max(dealt if stage.over_time else 0, made) + spread)
            most = max(most, waiting + at_work)
            if stage.up and stage.over_time and not alone:
                waiting += made
            elif not stage.up and k < deepest:
                waiting += pair * stage.out * area // 4
        # What leaves, or enters, in the host's type beside the card's.
        image = areas[-1 if self.decodes else 0] * pair * self.image
        return (remembered + most) * self.item + image * (self.item + 8)

    def count(self, room: int, features: int) -> int:
        """The least number of bands that keeps within `room` bytes; the most there can be where none does.

        features: bytes of them that are kept on the card where there are several bands.
        """
        most = max(1, max(self.height, self.width) // LEAST)
        fits = (n for n in range(1, most + 1) if self.peak(n) + (features if n > 1 else 0) <= room)
        return next(fits, most)
