"""How pictures of one size pass through an encoder or a decoder, and passing them: one sample after
the other.
"""

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

Make = Callable[[Any, Tensor], Tensor]  # of a family's layers and a picture [1, c, h, w]


class Whole(NamedTuple):
    """What sees all of a picture. need: bytes at a time; 0: it is not worth a look at what torch's
    allocator holds.
    """

    make: Make
    need: int = 0


@dataclass(frozen=True)
class Banded:
    """What passes in bands. modules, end: as `Passage` has them. keeps: bytes of weights that stay
    from band to band.
    """

    way: Way
    plan: Plan
    modules: Sequence[Any]
    end: tuple[Any, Any] | None
    keeps: int = 0


@dataclass(frozen=True)
class Route:
    """layers  the class of the family's layers whole   before a decoder's bands, behind an
    encoder's banded  None: nothing does piece   bytes of the one piece of memory that all of it
    passes through, if it passes whole, else 0
    """

    layers: type[PictureLayers]
    whole: Sequence[Whole]
    banded: Banded | None
    piece: int

    @property
    def bands(self) -> int:
        return 1 if self.banded is None else self.banded.plan.bands

    def decode(self, request: Request, x: Tensor, put: Leave, progress: Progress) -> None:
        """A latent [1, z, h, w]. put: gets rows of pixels, from which to which."""
        # In a box that is emptied: a reference that outlives its use is, for a large picture,
        # hundreds of megabytes.
        box = [channels_last(x)]
        self._whole(request, box)
        if self.banded is not None:
            self._passage(request, self.banded, partial(_rows, box.pop()), progress, x.dtype).run(put)
            return
        put(0, box[0].shape[2], box.pop())
        progress.add(1)

    def encode(self, request: Request, pixels: Rows, height: int, dtype: torch.dtype, progress: Progress) -> Tensor:
        """Pixels that come row by row -> what the encoder makes of them, [1, c, h, w]."""
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
    """Latents [b, z, h, w] become pixels in `out`, [b, 3, scale h, scale w] on any device, which is
    returned.
    """
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
    """Pixels [b, 3, h, w] on any device -> what the encoder makes of them on the request's, [b, c,
    h', w'].

    begin  what is done to rows of pixels that have arrived there
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
