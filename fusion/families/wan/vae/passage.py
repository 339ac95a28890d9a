"""One video on its way through a Wan VAE: bands of it, one after the other, each through all its time.

Decoded frames leave for the host as they are ready, encoded ones come from it as they are needed. Between two pieces the
user's interrupt is looked for, and the progress shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import comfy.ldm.wan.vae2_2
import comfy.model_management
import torch
from torch import Tensor

from .....kernels_cuda import KernelPolicy
from ....vae.memory_limits import (
    Leftovers,
    Progress,
    Result,
    channels_last,
    on_card,
)
from ....vae.pixel_range import Given
from ....vae.transfer import Inbox, Outbox, Place
from .bands import WHOLE, Band, Work
from .layers import causal_conv
from .stages import Pieces, before_stages, behind_stages, gathered, in_pairs, stages, through

KEPT = 1 << 28  # bytes of features that may stay on the card; where all frames have more, they wait on the host


@dataclass(frozen=True)
class Passage:
    """A decoding or an encoding.

    vae     stock's WanVAE
    fold    pixels of the image, along either side, that are one pixel to its convolutions
    bands   None: the whole image at once
    keeps   whether what lies between the bands and the attention stays on the card, or waits on the host
    device  where it is computed
    alone   this is all of an image or video, and no tile of one
    piece   bytes of the one piece of memory that it passes through
    most    and of all that is made on its way
    """

    vae: Any
    fold: int
    policy: KernelPolicy
    job: Work
    bands: list[Band] | None
    keeps: bool
    device: torch.device
    progress: Progress
    alone: bool
    piece: int
    most: int

    @property
    def remember(self) -> bool:
        """Whether a frame has others before or behind it."""
        return self.job.frames > 1

    @property
    def tidies(self) -> bool:
        """Whether what the allocator holds is looked after: not for tiles, which are small and many."""
        return self.alone and on_card(self.device)

    def passed(self, half: Any, shape: torch.Size, run: Callable[[], Result]) -> Result:
        """What `run` makes of a video of this shape. torch's allocator holds one piece of memory, in which each frame finds what it
        needs: the first, those behind it, and those of each band are of many sizes, and in what one left the next would not fit. To
        give that back in between cost 160 pieces for a decoding of 480x832, asked of the card and given back."""
        if not self.tidies:
            return run()
        return Leftovers(half, shape, self.piece).serve(run, self.piece, self.most, self.device)

    # ------------------------------------------------------------------------------------------------------- decoding

    def decode(self, z: Tensor, outbox: Outbox, sample: int) -> None:
        """The latent [1, z, t, h, w] becomes the sample of this number in what the outbox fills."""
        x = channels_last(causal_conv(self.vae.conv2, self.policy, z))
        pieces = (x[:, :, start:end] for start, end in spans(self.job.frames))
        features = before_stages(self.vae.decoder, self.policy, pieces, self.remember)
        if self.bands is None:
            self._deliver(self._through(self.vae.decoder, features, None), None, outbox, sample)
            return
        whole = self._keep(features)
        for band in self.bands:
            cut = (self._entering(piece, band) for piece in self._taken_from(whole))
            self._deliver(self._through(self.vae.decoder, cut, band), band, outbox, sample)

    def _deliver(self, pieces: Pieces, band: Band | None, outbox: Outbox, sample: int) -> None:
        start = 0
        for frames in pieces:
            comfy.model_management.throw_exception_if_processing_interrupted()
            end = start + frames.shape[2]
            pixels = comfy.ldm.wan.vae2_2.unpatchify(frames, self.fold)
            outbox.put(self._place(sample, slice(start, end), band), pixels)
            self.progress.add(end - start)
            start = end
        outbox.flush()

    def _place(self, sample: int, frames: slice, band: Band | None) -> Place:
        """Where frames of a band lie among the pixels [b, 3, t, h, w]."""
        sides = [slice(None), slice(None)]
        if band is not None:
            sides[self.job.dim - 3] = slice(band.made[0] * self.fold, band.made[1] * self.fold)
        return (slice(sample, sample + 1), slice(None), frames, *sides)

    def _entering(self, x: Tensor, band: Band) -> Tensor:
        """What of the features enters a band, dense: a norm reads no part of an image."""
        part = x.narrow(self.job.dim, band.enters[0], band.enters[1] - band.enters[0])
        return part.contiguous(memory_format=torch.channels_last_3d)

    # ------------------------------------------------------------------------------------------------------- encoding

    def encode(self, given: Given) -> Tensor:
        """Pixels [1, 3, t, h, w], on any device -> latents [1, z, t', h', w'] on the passage's."""
        features = (
            self._through(self.vae.encoder, self._pixels(given, None), None)
            if self.bands is None
            else self._taken_from(self._features_of_bands(given, self.bands))
        )
        made = []
        for each in behind_stages(self.vae.encoder, self.policy, gathered(features), self.remember):
            mean, _ = causal_conv(self.vae.conv1, self.policy, each).chunk(2, 1)
            made.append(mean)
        return torch.cat(made, 2)

    def _features_of_bands(self, given: Given, bands: list[Band]) -> Tensor:
        """What the stages make of all frames, [1, c, t, h, w], channels-last."""
        whole = self._room(given.begins or given.pixels.dtype)
        for band in bands:
            start = 0
            for each in self._through(self.vae.encoder, self._pixels(given, band), band):
                end = start + each.shape[2]
                whole[:, :, start:end].narrow(self.job.dim, band.made[0], band.made[1] - band.made[0]).copy_(each)
                start = end
        return whole

    def _pixels(self, given: Given, band: Band | None) -> Pieces:
        """Frames on the device: of all the image, or of what enters a band."""
        inbox = Inbox(self.device)
        for start, end in spans(given.pixels.shape[2]):
            comfy.model_management.throw_exception_if_processing_interrupted()
            piece = given.pixels[:, :, start:end]
            if band is not None:
                low, high = (edge * self.fold for edge in band.enters)
                piece = piece.narrow(self.job.dim, low, high - low)
            yield comfy.ldm.wan.vae2_2.patchify(given.piece(inbox.take(piece)), self.fold)
            self.progress.add(end - start)

    # ----------------------------------------------------------------------------------------------------------- both

    def _through(self, half: Any, pieces: Iterable[Tensor], band: Band | None) -> Pieces:
        """All stages of the encoder or the decoder, one behind the other."""
        steps = stages(half)
        join = in_pairs if self.job.decodes else gathered
        for stage, cut in zip(steps, [WHOLE] * len(steps) if band is None else band.cuts, strict=True):
            pieces = through(stage, self.policy, join(pieces), cut, self.remember)
        return iter(pieces)

    def _room(self, dtype: torch.dtype) -> Tensor:
        """For what lies between the bands and the attention, of all frames."""
        shape = (1, self.job.inner, self.job.frames, self.job.height, self.job.width)
        where = self.device if self.keeps else "cpu"
        return torch.empty(shape, dtype=dtype, device=where, memory_format=torch.channels_last_3d)

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

    def _taken_from(self, whole: Tensor) -> Pieces:
        inbox = Inbox(self.device)
        for start, end in spans(whole.shape[2]):
            yield inbox.take(whole[:, :, start:end])


def spans(frames: int) -> Iterator[tuple[int, int]]:
    """(0, 1), (1, 3), (3, 5), ...: where the pieces of so many frames start and end."""
    yield 0, 1
    for start in range(1, frames, 2):
        yield start, min(start + 2, frames)
