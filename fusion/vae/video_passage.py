"""The passage of a video through a causal VAE: in bands, one after the other, each through all
frames.

Two frames at a time go as deep as they can before the next two start. Each step is a generator over
pieces of one or two frames. The earlier frames that a causal convolution remembers live in its
stage's generator, and are freed with it. Generators yield their pieces without keeping them,
because a reference that outlives its use costs a third of a gigabyte at 720p.

Decoded frames leave for the host when they are ready, pixels to encode arrive when they are needed.
Between two pieces the user's interrupt is checked, and the bar moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import comfy.model_management
import torch
from torch import Tensor

from .memory_limits import Progress
from .pixel_range import Given
from .transfer import Inbox, Outbox, Place
from .video_plan import WHOLE, Band, Cut, Work

Pieces = Iterator[Tensor]


@dataclass(frozen=True)
class Half:
    """An encoder or a decoder of one video, as functions of pieces [1, c, frames, h, w].

    stages  each takes pieces, and the part of an image to pass on
    whole   the part that needs whole frames: before a decoder's stages, after an encoder's
    fold    pixels of the image, on either side, that are one pixel to its convolutions
    turned  frames [1, c, t, h, w] from an image's pixels to those of its convolutions, or back if
            it decodes
    """

    stages: Sequence[Callable[[Iterable[Tensor], Cut], Pieces]]
    whole: Callable[[Iterable[Tensor]], Pieces]
    fold: int
    turned: Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class VideoPassage:
    """A decoding or an encoding, one sample after the other.

    bands   None: the whole image at once
    keeps   whether features between the bands and the whole part stay on the card; else on the host
    device  where it computes
    """

    half: Half
    job: Work
    bands: list[Band] | None
    keeps: bool
    device: torch.device
    progress: Progress

    def decode(self, x: Tensor, outbox: Outbox, sample: int) -> None:
        """Decode the input [1, z, t, h, w] into the sample of this number in the outbox's
        result."""
        features = self.half.whole(x[:, :, start:end] for start, end in spans(self.job.frames))
        if self.bands is None:
            self._deliver(self._through(features, None), None, outbox, sample)
            return
        whole = self._keep(features)
        for band in self.bands:
            cut = (self._entering(piece, band) for piece in self._taken_from(whole))
            self._deliver(self._through(cut, band), band, outbox, sample)

    def encode(self, given: Given) -> Pieces:
        """Encode pixels [1, 3, t, h, w] on any device: pieces [1, c, frames, h', w'] on the
        passage's."""
        if self.bands is None:
            return self.half.whole(gathered(self._through(self._pixels(given, None), None)))
        return self.half.whole(gathered(self._taken_from(self._features_of_bands(given, self.bands))))

    # ------------------------------------------------------------------------------------------------- from and to the host

    def _deliver(self, pieces: Pieces, band: Band | None, outbox: Outbox, sample: int) -> None:
        start = 0
        for frames in pieces:
            comfy.model_management.throw_exception_if_processing_interrupted()
            end = start + frames.shape[2]
            outbox.put(self._place(sample, slice(start, end), band), self.half.turned(frames, self.half.fold))
            self.progress.add(end - start)
            start = end
        outbox.flush()

    def _place(self, sample: int, frames: slice, band: Band | None) -> Place:
        """The place of a band's frames among the pixels [b, 3, t, h, w]."""
        sides = [slice(None), slice(None)]
        if band is not None:
            sides[self.job.dim - 3] = slice(*(edge * self.half.fold for edge in band.made))
        return (slice(sample, sample + 1), slice(None), frames, *sides)

    def _pixels(self, given: Given, band: Band | None) -> Pieces:
        """Frames on the device, of the whole image or of a band's input."""
        inbox = Inbox(self.device)
        for start, end in spans(given.pixels.shape[2]):
            comfy.model_management.throw_exception_if_processing_interrupted()
            piece = given.pixels[:, :, start:end]
            if band is not None:
                low, high = (edge * self.half.fold for edge in band.enters)
                piece = piece.narrow(self.job.dim, low, high - low)
            yield self.half.turned(given.piece(inbox.take(piece)), self.half.fold)
            self.progress.add(end - start)

    # ----------------------------------------------------------------------------------------------- between bands and whole

    def _through(self, pieces: Iterable[Tensor], band: Band | None) -> Pieces:
        """All stages, one after the other."""
        join = in_pairs if self.job.decodes else gathered
        cuts = [WHOLE] * len(self.half.stages) if band is None else band.cuts
        for stage, cut in zip(self.half.stages, cuts, strict=True):
            pieces = stage(join(pieces), cut)
        return iter(pieces)

    def _entering(self, x: Tensor, band: Band) -> Tensor:
        """The part of the features that enters a band, copied because a norm cannot read a strided
        part."""
        part = x.narrow(self.job.dim, band.enters[0], band.enters[1] - band.enters[0])
        return part.contiguous(memory_format=torch.channels_last_3d)

    def _features_of_bands(self, given: Given, bands: list[Band]) -> Tensor:
        """The output of the stages for all frames, [1, c, t, h, w], channels-last."""
        whole = self._room(given.begins or given.pixels.dtype)
        for band in bands:
            part = whole.narrow(self.job.dim, band.made[0], band.made[1] - band.made[0])
            start = 0
            for each in self._through(self._pixels(given, band), band):
                part[:, :, start : start + each.shape[2]].copy_(each)
                start += each.shape[2]
        return whole

    def _keep(self, pieces: Pieces) -> Tensor:
        """All pieces in one tensor."""
        whole, start = None, 0
        for each in pieces:
            comfy.model_management.throw_exception_if_processing_interrupted()
            whole = self._room(each.dtype) if whole is None else whole
            whole[:, :, start : start + each.shape[2]].copy_(each)
            start += each.shape[2]
        assert whole is not None  # there is a frame
        return whole

    def _room(self, dtype: torch.dtype) -> Tensor:
        """A tensor for the features of all frames between the bands and the whole part."""
        shape = (1, self.job.inner, self.job.frames, self.job.height, self.job.width)
        where = self.device if self.keeps else "cpu"
        return torch.empty(shape, dtype=dtype, device=where, memory_format=torch.channels_last_3d)

    def _taken_from(self, whole: Tensor) -> Pieces:
        inbox = Inbox(self.device)
        for start, end in spans(whole.shape[2]):
            yield inbox.take(whole[:, :, start:end])


# ----------------------------------------------------------------------------------------------------- between stages


def spans(frames: int) -> Iterator[tuple[int, int]]:
    """(0, 1), (1, 3), (3, 5), ...: where the pieces of so many frames start and end."""
    yield 0, 1
    for start in range(1, frames, 2):
        yield start, min(start + 2, frames)


def in_pairs(pieces: Iterable[Tensor]) -> Pieces:
    """Pieces of two frames at most."""
    for x in pieces:
        box = [x]
        del x
        while box[0].shape[2] > 2:
            yield box[0][:, :, :2]
            box[0] = box[0][:, :, 2:]
        yield box.pop()


def gathered(pieces: Iterable[Tensor]) -> Pieces:
    """The very first frame alone, then two at a time, and perhaps one at the end."""
    waiting: list[Tensor] = []
    first = True
    for x in pieces:
        waiting.append(x)
        del x
        if len(waiting) == 2:
            waiting[:] = [torch.cat(waiting, 2)]
        if first or waiting[0].shape[2] > 1:
            first = False
            yield waiting.pop()
    if waiting:
        yield waiting.pop()
