"""The bands that a frame is cut into so that a causal VAE of videos keeps within a memory limit,
and the memory that it needs.

A causal convolution remembers the two frames before the ones it computes. At 1280x720 in fp16 a
frame of 96 channels has 177 MB, and Wan 2.1's decoder has seven such convolutions at that size:

    remembered, per stage        7 x 2 x 177 MB = 2.5 GB     (the head's included)
                                 6 x 2 x  88 MB = 1.1 GB     192 channels, half the width and height
                                 about            0.7 GB     384 channels at a quarter and an eighth
    at work, two frames a time   3 x 2 x 177 MB = 1.1 GB     a block's input, middle and output
    waiting                      4 x     88 MB = 0.35 GB     four frames between two stages
                                               = 5.7 GB

It cannot be left out or shrunk: recomputing the remembered frames would mean fourteen frames
at each step, and copying them out and in would take longer than computing. But all of it is
proportional to the part of the frame that passes. So a large frame passes in bands, each through
all frames before the next begins. This is exact: a band enters each stage with as many more rows or
columns as the following convolutions reach sideways. Values at the cut are wrong, one further in
with each convolution, and are cut off before they matter. Only the attention needs a whole frame.
It runs at the size of the latent, for all frames, before the decoder's bands and after the
encoder's.

The price is the margin: 13 pixels of the latent on either side of a decoder's cut where channels
are many and pixels few, 1 where the work is; 12 % more work for 1280x720 in four bands. The
encoder's margin is widest where its images are (9 pixels of the latent), 18 % in three bands. Wan
2.2's weights leave its decoder half the room: ten bands, 69 %.
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
# Bytes of features that may stay on the card; if all frames have more, they wait on the host.
KEPT = 1 << 28
# Bytes: weights in transfer, pixels that leave for the host, rounding of allocators.
MARGIN = 64 << 20
LEAST = 4  # pixels of a latent that a band makes, at the least


@dataclass(frozen=True)
class Cut:
    """The part of a stage's result that is passed on, along one side of the image. None: all of
    it."""

    dim: int = 4
    span: Span | None = None

    def of(self, x: Tensor) -> Tensor:
        """That part of x [b, c, t, h, w], a view."""
        return x if self.span is None else x.narrow(self.dim, self.span[0], self.span[1] - self.span[0])

    def even(self, x: Tensor) -> Tensor:
        """That part of x as the input of a halved output: one pixel less if its size is odd."""
        x = self.of(x)
        return x if self.span is None else x.narrow(self.dim, 0, x.shape[self.dim] // 2 * 2)


WHOLE = Cut()


@dataclass(frozen=True)
class Profile:
    """A stage's row in the table of a half: its channels, and the layer that leads to the next
    stage.

    blocks     channels in and out of each residual block's two convolutions
    others     input channels of the convolutions at its entry or exit
    resample   the layer after its blocks; None: it is the last stage
    over_time  whether that layer doubles or halves the frames, too
    out        channels of its result
    shortcut   whether one leads round the whole stage
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
        """Its convolutions before the resampling as one layer."""
        return convolutions(2 * len(self.blocks) + len(self.others))

    @property
    def remembered(self) -> int:
        """Channels of all remembered frames."""
        own = sum(into + out for into, out in self.blocks) + sum(-(-c // 8) * 8 for c in self.others)
        return own + (self.blocks[-1][1] if self.over_time else 0)

    @property
    def at_work(self) -> int:
        """Channels of the frames that a block needs at a time, without remembered ones."""
        needs = [3 * out if into == out else max(3 * out + into, 2 * (into + out)) for into, out in self.blocks]
        return max(needs) + (self.blocks[0][0] if self.shortcut else 0)


@dataclass(frozen=True)
class Band:
    """A part of the image along one side: its result, its input, and the part that each stage
    passes on."""

    made: Span
    enters: Span
    cuts: tuple[Cut, ...]
    widths: tuple[int, ...]  # of each stage's computation


def band(stages: Sequence[Profile], sizes: Sequence[int], made: Span, dim: int) -> Band:
    """The band that makes these pixels of the last stage's result. sizes: of each stage's images
    along `dim`."""
    leave, cuts, widths = made, [], []
    for k in reversed(range(len(stages))):
        low, high = stages[k].within.needs(leave, sizes[k])
        before = stages[k - 1].resample if k else None
        if before is not None:
            source = before.needs((low, high), sizes[k - 1])
            # A resampling makes all it can of its input: both pixels of an upsampled one, even if
            # only one is wanted.
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
    card; 0: they wait on the host, because they are too many, or would need more bands."""

    bands: int
    kept: int


@dataclass(frozen=True)
class Work:
    """One half of a VAE and the latent's size: all that decides how much memory it needs.

    stages   first to last
    decodes  whether they go from the latent to the image
    height, width, frames  of the latent
    image    channels of the image, as its convolutions see a pixel
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
        """So many bands. Their results are in pixels of the last stage."""
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
        """Bytes of the features between the bands and the attention, for all frames."""
        return self.inner * self.height * self.width * self.frames * self.item

    def peak(self, count: int) -> int:
        """Most bytes at a time with so many bands, without the weights, and with several bands
        without the features."""
        pixels = self.inner * self.height * self.width * self.item
        pair, remembered = (1, 0) if self.frames == 1 else (PAIR, 5 * PAIR * pixels)
        tokens = self.height * self.width
        # The need of a block, or of the attention, which takes one frame after another.
        middle = 8 * pair * pixels + scratch_bytes(tokens, tokens, self.inner)
        most = max(self._peak(band) for band in self.bands(count))
        return MARGIN + (remembered + max(middle, most) if count == 1 else max(remembered + middle, most))

    def _peak(self, band: Band) -> int:
        """Most bytes at a time in the stages, for a band."""
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
        # The pixels that leave or enter, on the card, and in the host's type.
        image = areas[-1 if self.decodes else 0] * pair * self.image
        return (remembered + most) * self.item + image * (self.item + 8)

    def count(self, room: int, features: int) -> int:
        """The least number of bands that keeps within `room` bytes; the most possible if there is
        none.

        features: bytes of them that stay on the card if there are several bands.
        """
        most = max(self.height, self.width) // LEAST
        return fewest(lambda n: self.peak(n) + (features if n > 1 else 0), most, room)

    def cut(self, room: int) -> Cutting:
        """The number of bands with which a video keeps within so many bytes."""
        count, features = self.count(room, 0), self.features()
        stays = count > 1 and features <= KEPT and self.count(room, features) == count
        return Cutting(count, features if stays else 0)

    def piece(self, cut: Cutting) -> int:
        """Bytes of the one piece of memory that a video passes through."""
        return int(IN_ONE_PIECE * (self.peak(cut.bands) + cut.kept))

    def cut_into(self, bands: int) -> Cutting:
        """So many bands, regardless of memory."""
        features = self.features()
        return Cutting(bands, features if bands > 1 and features <= KEPT else 0)
