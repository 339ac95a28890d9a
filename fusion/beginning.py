"""Pixels of pictures on their way into an encoder: what stock does with all of them on the host, done piece by piece on the card.

In front of an encoding stock makes three copies of all pixels (* 2, - 1, to the VAE's type), while the card waits: of a video of 81
frames of 480x832 one pass alone takes 0.15 s, a third of what the encoding takes. Here they stay as they are until a piece of them
has arrived. The numbers are the same to the bit.

What stands for them meanwhile is a tensor to everybody: of the type that stock would make, so that stock's `.to()` leaves it alone.
An encoder of ours asks for what is in it (`taken`). Whatever else looks at its numbers gets those that stock would have made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

TAKES = "fusestream_takes_unbegun"  # on a VAE's network that calls `taken`


def begin(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Pixels from 0 to 1 become those of an encoder that computes in this type, from -1 to 1: in one pass, added up in the pixels'
    own."""
    made = torch.empty_like(pixels, dtype=dtype)
    less = torch.full((), -1.0, dtype=pixels.dtype, device=pixels.device)
    return torch.add(less, pixels, alpha=2.0, out=made)


class Unbegun(Tensor):
    """Pixels that are yet to be begun: shape, device and strides are theirs, the type is the encoder's."""

    pixels: Tensor

    @staticmethod
    def __new__(cls, pixels: Tensor, dtype: torch.dtype) -> Unbegun:
        made: Unbegun = Tensor._make_wrapper_subclass(
            cls, pixels.shape, strides=pixels.stride(), dtype=dtype, device=pixels.device
        )
        made.pixels = pixels
        return made

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Of its own type it is already: said here, since in inference mode torch asks below, as of anything else."""
        made: Tensor = self if args == (self.dtype,) and not kwargs else super().to(*args, **kwargs)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda one: begin(one.pixels, one.dtype), (args, kwargs or {}))
        return func(*args, **kwargs)


class Given(NamedTuple):
    """What an encoder is given. pixels: as they lie. begins: of which type each piece of them is to be made, unless they are it."""

    pixels: Tensor
    begins: torch.dtype | None

    def piece(self, there: Tensor) -> Tensor:
        """A part of the pixels that has arrived where it is computed with, as the encoder wants it."""
        return there if self.begins is None else begin(there, self.begins)


def taken(x: Tensor) -> Given:
    return Given(x.pixels, x.dtype) if isinstance(x, Unbegun) else Given(x, None)


class Beginning:
    """Stands where a stock VAE has `process_input`."""

    def __init__(self, vae: Any) -> None:
        self._dtype: torch.dtype = vae.vae_dtype
        self._takes = hasattr(vae.first_stage_model, TAKES)
        self._stocks: Callable[[Tensor], Tensor] = vae.process_input

    def __call__(self, pixels: Tensor) -> Tensor:
        if pixels.dtype is not torch.float32:
            return self._stocks(pixels)
        return Unbegun(pixels, self._dtype) if self._takes else begin(pixels, self._dtype)
