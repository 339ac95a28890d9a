"""The bands that a frame is cut into so that a causal VAE of videos keeps within a bound of memory,
and what it needs.

A causal convolution remembers the two frames before the ones it computes. At 1280x720 in fp16 a
frame of 96 channels has 177 MB, and Wan 2.1's decoder has seven such convolutions at that size:

    remembered, per stage        7 x 2 x 177 MB = 2.5 GB     (the head's included)
                                 6 x 2 x  88 MB = 1.1 GB     192 channels, half the width and height
                                 about            0.7 GB     384 channels at a quarter and an eighth
    at work, two frames a time   3 x 2 x 177 MB = 1.1 GB     a block's input, what lies between, and
                                 its output
    waiting                      4 x     88 MB = 0.35 GB     four frames between two stages, taken
                                 two by two
                                               = 5.7 GB

Nothing of it can be left out or shrunk: recomputing what is remembered would take fourteen frames
back at each step, and copying it out and in would take longer than computing. But it all is
proportional to the part of the frame that passes through. So a large frame passes in bands, each
through all its time before the next begins, and this is exact: a band enters each stage with as
many more rows or columns as the convolutions behind it look sideways, which get wrong values at the
cut, one further in with each convolution, and are cut off before they arrive. The attention alone
sees a whole frame. It runs at the size of the latent, for all frames, before the decoder's bands
and behind the encoder's.

The price is the margin: 13 pixels of the latent on either side of a decoder's cut where the
channels are many and pixels few, 1 where the work is; 12 % more work for 1280x720 in four bands.
The encoder's margin is widest where its images are (9 pixels of the latent), 18 % in three bands.
Wan 2.2's weights leave its decoder half the room: ten bands, 69 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...kernels_cuda.ops.attention.attention_products import scratch_bytes
from .bands import UP, Layer, Span, by_count, convolutions, fewest
from .memory_limits import IN_ONE_PIECE

PAIR = 2  # frames that pass at a time
KEPT = 1 << 28  # bytes of features that may stay on the card; where all frames have more, they wait on the host
MARGIN = 64 << 20  # bytes: weights on their way, what leaves for the host, what allocators round up
LEAST = 4  # pixels of a latent that a band makes


@dataclass(frozen=True)
class Cut:
    """The part of a stage's result that goes on, along one side of the image. None: all."""

    dim: int = 4
    span: Span | None = None

    def of(self, x: Tensor) -> Tensor:
        """x [b, c, t, h, w], a view of it."""
        return x if self.span is None else x.narrow(self.dim, self.span[0], self.span[1] - self.span[0])

    def even(self, x: Tensor) -> Tensor:
        """The part that a halved output shows: a pixel less where a convolution looks beyond it."""
        x = self.of(x)
        return x if self.span is None else x.narrow(self.dim, 0, x.shape[self.dim] // 2 * 2)


WHOLE = Cut()


@dataclass(frozen=True)
class Profile:
    """A stage's row in the table of a half: its channels, and the layer that leads to the next
    stage.

    blocks     of each residual block: those that its two convolutions see
    others     those of its entry or exit, a convolution each
    resample   behind its blocks; None: it is the last one
    over_time  whether that doubles or halves the frames, too
    out        of what it hands on
    shortcut   whether one leads round all of it
    """

    blocks: tuple[tuple[int, int], ...]
    others: tuple[int, ...]
    resample: Layer | None
    over_time: bool
    out: int
    shortcut: bool

    @property
    def up(self) -> bool:
        return self.resample == UP

    @property
    def within(self) -> Layer:
        """Its convolutions before the resampling in one."""
        return convolutions(2 * len(self.blocks) + len(self.others))

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


def band(stages: Sequence[Profile], sizes: Sequence[int], made: Span, dim: int) -> Band:
    """The band that makes these pixels of the last stage's result. sizes: of each stage's pictures
    along `dim`.
    """
    leave, cuts, widths = made, [], []
    for k in reversed(range(len(stages))):
        low, high = stages[k].within.needs(leave, sizes[k])
        before = stages[k - 1].resample if k else None
        if before is not None:
            source = before.needs((low, high), sizes[k - 1])
            # A resampling makes all that it can of what enters: of an upsampled pixel both,
            # whichever is wanted.
            low = source[0] * before.scale // before.stride
            high = low + before.size(source[1] - source[0])
        cuts.append(Cut(dim, (leave[0] - low, leave[1] - low)))
        widths.append(high - low)
        if before is not None:
            leave = source
    return Band(made, (low, high), tuple(reversed(cuts)), tuple(reversed(widths)))


# ------------------------------------------------------------------------------------------------------------- memory


class Cutting(NamedTuple):
    """bands: how many. kept: bytes of features between them and the attention that stay on the
    card; where fewer bands fit without, or there are too many, they wait on the host.
    """

    bands: int
    kept: int


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
        """So many bands. What they make is in pixels of the last stage."""
        side, deepest = max(self.height, self.width), len(self.stages) - 1
        sizes = [side << (k if self.decodes else deepest - k) for k in range(len(self.stages))]
        scale = sizes[-1] // side
        parts = ((first * scale, last * scale) for first, last in by_count(side, count))
        return [band(self.stages, sizes, made, self.dim) for made in parts]

    @property
    def inner(self) -> int:
        """Channels of the middle."""
        return self.stages[0].blocks[0][0] if self.decodes else self.stages[-1].out

    def features(self) -> int:
        """Bytes of what lies between the bands and the attention, for all frames."""
        return self.inner * self.height * self.width * self.frames * self.item

    def peak(self, count: int) -> int:
        """Bytes needed at a time with so many bands, without the weights and, of several bands, the
        features.
        """
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
        """The least number of bands that keeps within `room` bytes; the most there can be where
        none does.

        features: bytes of them that are kept on the card where there are several bands.
        """
        most = max(self.height, self.width) // LEAST
        return fewest(lambda n: self.peak(n) + (features if n > 1 else 0), most, room)

    def cut(self, room: int) -> Cutting:
        """How a video keeps within so many bytes in use."""
        count, features = self.count(room, 0), self.features()
        stays = count > 1 and features <= KEPT and self.count(room, features) == count
        return Cutting(count, features if stays else 0)

    def piece(self, cut: Cutting) -> int:
        """Bytes of the one piece of memory that a video passes through."""
        return int(IN_ONE_PIECE * (self.peak(cut.bands) + cut.kept))

    def cut_into(self, bands: int) -> Cutting:
        """So many bands, whatever they take."""
        features = self.features()
        return Cutting(bands, features if bands > 1 and features <= KEPT else 0)
