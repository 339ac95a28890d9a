"""The way of pictures of one size through an encoder or a decoder, one sample after the other.

An encoder or a decoder in which another node has changed a part, as nodes for seamless pictures do, is
stock's for as long: whole, and in the type that stock would have loaded the VAE in, because numbers
between stock's layers may be too large for fp16. If that is too much for the card, ComfyUI's tiles
follow.
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

Pass = Callable[[Tensor], Tensor]
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


def decoded(
    half: nn.Module, route: Route, request: Request, z: Tensor, out: Tensor, stocks: Pass | None = None
) -> Tensor:
    """Decode latents [b, z, h, w] into `out`, [b, 3, scale h, scale w] on any device, and return
    it.

    stocks  stock's computation of one sample, if it is not the half itself
    """
    progress, outbox = Progress(len(z) * route.bands, shown=request.alone), Outbox(out, request.finishes)
    is_stocks = request.hands_back(half, z)

    def one(sample: int, begun: Request) -> None:
        def put(first: int, last: int, pixels: Tensor) -> None:
            outbox.put((slice(sample, sample + 1), slice(None), slice(first, last)), pixels)

        route.decode(begun, z[sample : sample + 1], put, progress)

    for sample in range(len(z)):
        comfy.model_management.throw_exception_if_processing_interrupted()
        if is_stocks:
            outbox.put((slice(sample, sample + 1),), by_stock(half, z[sample : sample + 1], stocks))
            progress.add(route.bands)
        else:
            request.served(half, z.shape, route.piece, partial(one, sample))
        outbox.flush()
    return out


def encoded(
    half: nn.Module,
    route: Route,
    request: Request,
    x: Tensor,
    begin: Pass = channels_last,
    stocks: Pass | None = None,
) -> Tensor:
    """Encode pixels [b, 3, h, w] on any device: [b, c, h', w'] on the request's device.

    begin   applied to rows of pixels that have arrived on the device
    stocks  as for `decoded`
    """
    progress, latents = Progress(len(x) * route.bands, shown=request.alone), []
    is_stocks = request.hands_back(half, x)

    def one(given: Tensor, begun: Request) -> Tensor:
        def pixels(first: int, last: int) -> Tensor:
            return begin(given[:, :, first:last].to(request.device))

        return route.encode(begun, pixels, x.shape[2], x.dtype, progress)

    for sample in range(len(x)):
        comfy.model_management.throw_exception_if_processing_interrupted()
        given = x[sample : sample + 1]
        if is_stocks:
            latents.append(by_stock(half, begin(given.to(request.device)), stocks))
            progress.add(route.bands)
        else:
            latents.append(request.served(half, x.shape, route.piece, partial(one, given)))
    return torch.cat(latents)


def by_stock(half: nn.Module, x: Tensor, stocks: Pass | None = None) -> Tensor:
    """Stock's computation of a picture [1, c, h, w] on its device, in x's type again."""
    if stocks is not None:
        return stocks(x)
    dtype = x.dtype
    if dtype is torch.float16:
        dtype = comfy.model_management.vae_dtype(x.device, [torch.bfloat16, torch.float32])
    with_weights = {name: one.to(dtype) for name, one in half.named_parameters() if one.is_floating_point()}
    made: Tensor = torch.func.functional_call(half, with_weights, (x.to(dtype),))
    return made.to(x.dtype)


def _rows(x: Tensor, first: int, last: int) -> Tensor:
    return x[:, :, first:last]
