"""Pixels between 0 and 1, as in pictures, and between -1 and 1, as in VAEs, converted piece by
piece on the card.

Stock converts on the host, all pixels at once, while the card waits. Before an encoding it makes
three copies (* 2, - 1, to the VAE's type): for a video of 81 frames of 480x832 one pass alone takes
0.15 s, a third of the encoding. After a decoding it goes over all pixels three times (+ 1, / 2,
clamp): for the same video 2.3 GB of the host's memory are read and written. Here each piece is
converted on the card, when it has arrived (`Unbegun`) or before it leaves (`Finishing`).

Only stock's usual conversion for pictures is replaced, and the numbers are the same to the bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..base.hooks import FINISHING, TAKES_PIXELS


def begin(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Pixels from 0 to 1 as those of an encoder that computes in this type, from -1 to 1: in one
    pass, computed in the pixels' own type."""
    made = torch.empty_like(pixels, dtype=dtype)
    less = torch.full((), -1.0, dtype=pixels.dtype, device=pixels.device)
    return torch.add(less, pixels, alpha=2.0, out=made)


class Unbegun(Tensor):
    """Pixels that our encoder converts when a piece of them has arrived (`taken`), with their
    shape, device and strides.

    For all other code it is a tensor of the type that stock would make, so that stock's `.to()`
    leaves it alone. Code that reads its numbers gets those that stock would have made.
    """

    pixels: Tensor

    @staticmethod
    def __new__(cls, pixels: Tensor, dtype: torch.dtype) -> Unbegun:
        made: Unbegun = Tensor._make_wrapper_subclass(
            cls, pixels.shape, strides=pixels.stride(), dtype=dtype, device=pixels.device
        )
        made.pixels = pixels
        return made

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """The tensor itself for its own type. Needed because in inference mode torch dispatches
        this call like any other."""
        made: Tensor = self if args == (self.dtype,) and not kwargs else super().to(*args, **kwargs)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda one: begin(one.pixels, one.dtype), (args, kwargs or {}))
        return func(*args, **kwargs)


class Given(NamedTuple):
    """An encoder's input. pixels: unconverted. begins: type to convert each piece to; None: they
    are converted."""

    pixels: Tensor
    begins: torch.dtype | None

    def piece(self, there: Tensor) -> Tensor:
        """A part of the pixels, which has arrived on the device, as the encoder takes it."""
        return there if self.begins is None else begin(there, self.begins)


def taken(x: Tensor) -> Given:
    return Given(x.pixels, x.dtype) if isinstance(x, Unbegun) else Given(x, None)


class Beginning:
    """Replaces the `process_input` of a stock VAE."""

    def __init__(self, vae: Any) -> None:
        self._dtype: torch.dtype = vae.vae_dtype
        self._takes = hasattr(vae.first_stage_model, TAKES_PIXELS)
        self._stocks: Callable[[Tensor], Tensor] = vae.process_input

    def __call__(self, pixels: Tensor) -> Tensor:
        if pixels.dtype is not torch.float32:
            return self._stocks(pixels)
        return Unbegun(pixels, self._dtype) if self._takes else begin(pixels, self._dtype)


def finish(pixels: Tensor) -> Tensor:
    """Pixels from -1 to 1, as a VAE makes them, to those of pictures, from 0 to 1. In place."""
    return pixels.add_(1.0).div_(2.0).clamp_(0.0, 1.0)


class Finishing:
    """Replaces the `process_output` of a stock VAE, and knows which pixels were converted on the
    way.

    A network that decodes into a buffer asks whether it is still installed. If another node has
    replaced it, that node's function gets unconverted pixels. Copies of the VAE object over the same
    network have it, too.
    """

    def __init__(self, vae: Any) -> None:
        self._vaes = weakref.WeakSet([vae])
        self._stocks: Callable[[Tensor], Tensor] = vae.process_output
        self._finished: tuple[int, torch.Size] | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        is_finished = self._finished == _place(pixels)
        self._finished = None
        return pixels if is_finished else self._stocks(pixels)

    def serves(self, copied: Any) -> None:
        """Note a copy of the VAE object, whose decodings cannot be told from the others'."""
        self._vaes.add(copied)

    def stands(self) -> bool:
        """Whether the network's output comes here next, whichever of its VAE objects decodes."""
        return len(self._vaes) > 0 and all(vae.process_output is self for vae in self._vaes)

    def begun(self) -> None:
        """Start a decoding, and forget finished pixels that were not collected."""
        self._finished = None

    def done(self, pixels: Tensor) -> None:
        """Note that all of these are finished."""
        self._finished = _place(pixels)


def install(vae: Any) -> None:
    """Let a stock VAE's pixels be converted where they are decoded and encoded, if its own
    functions compute the same."""
    probe = torch.linspace(-1.5, 1.5, 13)
    if torch.equal(vae.process_output(probe.clone()), finish(probe.clone())):
        vae.process_output = Finishing(vae)
        vae.first_stage_model.__dict__[FINISHING] = vae.process_output
    if torch.equal(vae.process_input(probe.clone()), probe * 2.0 - 1.0):
        vae.process_input = Beginning(vae)


def copied(vae: Any) -> None:
    """Tell the network of a new copy of its stock VAE object."""
    finishing: Finishing | None = vae.first_stage_model.__dict__.get(FINISHING)
    if finishing is not None:
        finishing.serves(vae)


def finishing_of(net: Any, out: Tensor | None) -> Finishing | None:
    """The object that finishes the pixels which a network decodes into this buffer; None: there is
    none, or no buffer."""
    finishing: Finishing | None = net.__dict__.get(FINISHING)
    if finishing is not None:
        finishing.begun()
    return finishing if finishing is not None and out is not None and finishing.stands() else None


def _place(pixels: Tensor) -> tuple[int, torch.Size]:
    return pixels.data_ptr(), pixels.shape
