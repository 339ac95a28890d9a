"""What stock does with all pixels on the host once a VAE has made them, done piece by piece on the card.

Behind a decoding stock goes over all pixels three times (+ 1, / 2, within 0 and 1), when the last of them has arrived: of a video
of 81 frames of 480x832 that is 2.3 GB of the host's memory read and written while the card waits. Here each piece is finished on
the card, before it leaves. (What stock does before an encoding: beginning.py.)

Only what is stock's usual way for pictures is replaced, and the numbers are the same to the bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .beginning import Beginning

FINISHING = "fusestream_finishing"  # where a VAE's network has it


def finish(pixels: Tensor) -> Tensor:
    """Pixels as a VAE makes them, from -1 to 1, become those of pictures, from 0 to 1. In place."""
    return pixels.add_(1.0).div_(2.0).clamp_(0.0, 1.0)


class Finishing:
    """Stands where a stock VAE has `process_output`, and knows which pixels were finished on their way.

    A network that decodes into a buffer asks whether it stands there still: another node may have put something else in its place,
    which then gets pixels that nobody has touched.
    """

    def __init__(self, vae: Any) -> None:
        self._vae = weakref.ref(vae)
        self._stocks: Callable[[Tensor], Tensor] = vae.process_output
        self._finished: tuple[int, torch.Size] | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        is_finished = self._finished == _place(pixels)
        self._finished = None
        return pixels if is_finished else self._stocks(pixels)

    def stands(self) -> bool:
        """Whether what leaves the network now comes here next."""
        vae = self._vae()
        return vae is not None and vae.process_output is self

    def begun(self) -> None:
        """A decoding begins. What was finished before, and not handed in, is no longer known."""
        self._finished = None

    def done(self, pixels: Tensor) -> None:
        """All of these are finished."""
        self._finished = _place(pixels)


def install(vae: Any) -> None:
    """Let a stock VAE's pixels be finished where they are made, and begun where they are encoded, if that is what stock does with
    them."""
    probe = torch.linspace(-1.5, 1.5, 13)
    if torch.equal(vae.process_output(probe.clone()), finish(probe.clone())):
        vae.process_output = Finishing(vae)
        vae.first_stage_model.__dict__[FINISHING] = vae.process_output
    if torch.equal(vae.process_input(probe.clone()), probe * 2.0 - 1.0):
        vae.process_input = Beginning(vae)


def of(net: Any, out: Tensor | None) -> Finishing | None:
    """What finishes the pixels that a network decodes into this buffer; None: nobody does, or there is none."""
    finishing: Finishing | None = net.__dict__.get(FINISHING)
    if finishing is not None:
        finishing.begun()
    return finishing if finishing is not None and out is not None and finishing.stands() else None


def _place(pixels: Tensor) -> tuple[int, torch.Size]:
    return pixels.data_ptr(), pixels.shape
