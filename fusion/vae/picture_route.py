"""The way of pictures of one size through an encoder or a decoder, one sample after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import comfy.model_management
import torch
from torch import Tensor, nn

from .memory_limits import Progress, channels_last
from .picture_layers import PictureLayers
from .picture_passage import Leave, Passage, Rows
from .picture_plan import Plan, Way
from .request import Request
from .transfer import Outbox

Make = Callable[[Any, Tensor], Tensor]  # takes a family's layers and a picture [1, c, h, w]


class Whole(NamedTuple):
    """A part that takes a whole picture. need: bytes at a time; 0: too few for tidying torch's
    allocator first."""

    make: Make
    need: int = 0


@dataclass(frozen=True)
class Banded:
    """The part that passes in bands. modules, end: as in `Passage`. keeps: bytes of weights that
    stay from band to band."""

    way: Way
    plan: Plan
    modules: Sequence[Any]
    end: tuple[Any, Any] | None
    keeps: int = 0


@dataclass(frozen=True)
class Route:
    """layers  the class of the family's layers
    whole   the parts before a decoder's bands, or after an encoder's
    banded  None: no part passes in bands
    piece   bytes of the one piece of memory for everything, if all of it passes whole, else 0
    """

    layers: type[PictureLayers]
    whole: Sequence[Whole]
    banded: Banded | None
    piece: int

    @property
    def bands(self) -> int:
        return 1 if self.banded is None else self.banded.plan.bands

    def decode(self, request: Request, x: Tensor, put: Leave, progress: Progress) -> None:
        """Decode a latent [1, z, h, w]. put(first, last, rows): receives rows of pixels."""
        # In a box that is emptied, because a reference that outlives its use costs hundreds of
        # megabytes for a large picture.
        box = [channels_last(x)]
        self._whole(request, box)
        if self.banded is not None:
            self._passage(request, self.banded, partial(_rows, box.pop()), progress, x.dtype).run(put)
            return
        put(0, box[0].shape[2], box.pop())
        progress.add(1)

    def encode(self, request: Request, pixels: Rows, height: int, dtype: torch.dtype, progress: Progress) -> Tensor:
        """Encode pixels that arrive row by row: [1, c, h, w]."""
        box: list[Tensor] = []
        if self.banded is not None:
            made = self._passage(request, self.banded, pixels, progress, dtype).run()
            assert made is not None
            box.append(made)
            del made
        else:
            box.append(pixels(0, height))
            progress.add(1)
        self._whole(request, box)
        return box.pop()

    def _whole(self, request: Request, box: list[Tensor]) -> None:
        layers = self.layers(request.policy, 0, request.tidies)
        for make, need in self.whole:
            if need:
                layers.tidy(request.spare(need))
            box.append(make(layers, box.pop()))

    def _passage(
        self, request: Request, banded: Banded, given: Rows, progress: Progress, dtype: torch.dtype
    ) -> Passage:
        layers = self.layers(request.policy, banded.keeps, request.tidies)
        like = dtype, request.device
        return Passage(layers, banded.modules, banded.way, banded.plan, given, banded.end, progress, like)


def decoded(half: nn.Module, route: Route, request: Request, z: Tensor, out: Tensor) -> Tensor:
    """Decode latents [b, z, h, w] into `out`, [b, 3, scale h, scale w] on any device, and return
    it."""
    progress, outbox = Progress(len(z) * route.bands, shown=request.alone), Outbox(out, request.finishes)

    def one(sample: int, begun: Request) -> None:
        def put(first: int, last: int, pixels: Tensor) -> None:
            outbox.put((slice(sample, sample + 1), slice(None), slice(first, last)), pixels)

        route.decode(begun, z[sample : sample + 1], put, progress)

    for sample in range(len(z)):
        comfy.model_management.throw_exception_if_processing_interrupted()
        request.served(half, z.shape, route.piece, partial(one, sample))
        outbox.flush()
    return out


def encoded(
    half: nn.Module, route: Route, request: Request, x: Tensor, begin: Callable[[Tensor], Tensor] = channels_last
) -> Tensor:
    """Encode pixels [b, 3, h, w] on any device: [b, c, h', w'] on the request's device.

    begin  applied to rows of pixels that have arrived on the device
    """
    progress, latents = Progress(len(x) * route.bands, shown=request.alone), []

    def one(given: Tensor, begun: Request) -> Tensor:
        def pixels(first: int, last: int) -> Tensor:
            return begin(given[:, :, first:last].to(request.device))

        return route.encode(begun, pixels, x.shape[2], x.dtype, progress)

    for sample in range(len(x)):
        comfy.model_management.throw_exception_if_processing_interrupted()
        latents.append(request.served(half, x.shape, route.piece, partial(one, x[sample : sample + 1])))
    return torch.cat(latents)


def _rows(x: Tensor, first: int, last: int) -> Tensor:
    return x[:, :, first:last]
