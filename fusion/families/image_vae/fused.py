"""Stock's AutoencoderKL and AutoencodingEngine over our ops, within a memory limit: the VAEs of SD,
SDXL, Flux and Flux.2.

Stock's modules keep the weights. Some steps stay stock's: the batch norm around Flux.2's latents,
the 1x1 convolutions next to the latents, the mean of an encoding. Encoder and decoder are ours. A
picture passes whole if it fits, else in bands (`vae/picture_planner.py`). Decoded rows leave for
the host when they are ready, pixels to encode arrive when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.ldm.modules.diffusionmodules.model import Encoder
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy
from ...base.policy import standing
from ...base.subclassing import mix
from ...vae import pixel_range
from ...vae.memory_limits import HELD, LIMIT
from ...vae.picture_plan import Plan
from ...vae.picture_planner import best
from ...vae.picture_route import Banded, Route, Whole, decoded, encoded
from ...vae.picture_stages import Journey, Stage, journey, modules
from ...vae.request import Request, answer, room_within, with_workspaces
from .layers import Layers
from .stages import obstacle, table

GRAIN = 1 << 26  # bytes: rooms that differ by less share a plan
WEIGHTS = 40 << 20  # bytes of weights that are laid out for the kernels and kept from band to band
SMALL = WEIGHTS + (24 << 20)  # bytes in addition to the pictures, with the rounding of allocators
TURNS = 128 << 20  # bytes for kernels that are tried while one is chosen
# For workspaces of cuDNN's convolutions, which no plan sees: pixels up to which SMALL has room for
# them, and bytes for each pixel beyond. An H200 held 3.05 GiB in a decoding of 4096x4096 at first
# use, where the simulated allocator (tests/torch_allocator.py) had 2.80, weights included; for that
# size these are 96 MiB.
FORESEEN = 2048 * 2048
UNSEEN = 8


# --------------------------------------------------------------------------------------------------------- the bounds


def planned(half: Any, height: int, width: int, item: int, room: int) -> tuple[Journey, Plan | None]:
    """The way of a picture of this size through an encoder or a decoder. room: bytes that its parts
    may take."""
    room -= unseen(half, height, width)
    found = journey(table(half), height, width, item, int(room / HELD))
    return found, None if found.way is None else best(found.way, room)


def unseen(half: Any, height: int, width: int) -> int:
    """Bytes in addition to the parts of a picture and SMALL. height, width: as for `planned`."""
    scale = 1 if isinstance(half, Encoder) else 2 ** (half.num_resolutions - 1)
    return UNSEEN * max(0, height * scale * width * scale - FORESEEN)


def room_for(vae: Any, limit: int, device: torch.device | None = None) -> int:
    """Bytes that the parts of a picture may take: by the limit, and by the free memory of the
    device."""
    room = room_within(vae, limit, device)
    return max(GRAIN, (room - SMALL - TURNS) // GRAIN * GRAIN)


def memory_used(vae: Any, limit: int, decodes: bool, shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes that a decoding or encoding takes in addition to the weights, for any number of
    samples. ComfyUI frees so many."""
    half = vae.decoder if decodes else vae.encoder
    height, width = shape[2:]
    fold = folding(vae) if decodes else 1
    sides = fold * height, fold * width
    found, plan = planned(half, *sides, dtype.itemsize, room_for(vae, limit))
    passing = found.piece if plan is None else max(int(HELD * found.most), plan.peak)
    return with_workspaces(SMALL + TURNS + unseen(half, *sides) + passing, dtype)


def folding(vae: Any) -> int:
    """Pixels of the decoder's latent, on either side, in one of the latents that samplers see:
    Flux.2's are folded 2x2."""
    return 1 if getattr(vae, "bn", None) is None else 2


# --------------------------------------------------------------------------------------------------------- the halves


def route(half: Any, height: int, width: int, item: int, room: int) -> Route:
    """The route through an encoder or a decoder, for a picture as in `planned`."""
    found, plan = planned(half, height, width, item, room)
    stages = [part for stage, need in zip(found.whole, found.needs, strict=True) for part in _parts(stage, need)]
    middle = Whole(lambda layers, x: layers.middle(half.mid, x), found.middle)
    norm = Whole(lambda layers, x: layers.norm(half.norm_out, x))
    last = Whole(lambda layers, x: layers.last(half.conv_out, x))
    if isinstance(half, Encoder):
        whole, end = [*stages, middle, norm, last], None
    else:
        end = half.norm_out, half.conv_out
        first = Whole(lambda layers, x: layers.first(half.conv_in, x))
        whole = [first, middle, *stages, *((norm, last) if plan is None else ())]
    if plan is None or found.way is None:
        # Some of the candidate kernels need a little more than the plan: cuDNN's workspaces, a
        # padded weight.
        return Route(Layers, whole, None, found.piece + TURNS)
    return Route(Layers, whole, Banded(found.way, plan, modules(found.banded), end, WEIGHTS), 0)


def _parts(stage: Stage, need: int) -> Iterator[Whole]:
    """A stage of a picture that passes whole, module by module, because the input of each is freed
    when its output is there."""
    entered = len(stage.modules) - len(stage.blocks)
    for number, module in enumerate(stage.modules):
        yield _made_by(module, number >= entered, 0 if number else need)


def _made_by(module: Any, is_block: bool, need: int) -> Whole:
    return Whole(lambda layers, x: (layers.block if is_block else layers.make)(module, x), need)


class FusedDecoder:
    """Mixed into stock's Decoder."""

    def forward(self, z: Tensor, request: Request | None = None, **others: Any) -> Tensor:
        """Latents [b, z, h, w] -> pixels [b, 3, 8 h, 8 w]."""
        half: Any = self
        if request is None:
            made: Tensor = super().forward(z, **others)  # type: ignore[misc]
            return made
        b, _, h, w = z.shape
        scale = 2 ** (half.num_resolutions - 1)
        shape = (b, half.conv_out.out_channels, scale * h, scale * w)
        out = torch.empty(shape, device=z.device, dtype=z.dtype) if request.into is None else request.into
        return decoded(half, route(half, h, w, z.element_size(), request.room), request, z, out)


class FusedEncoder:
    """Mixed into stock's Encoder."""

    def forward(self, x: Any) -> Tensor:
        """Pixels [b, 3, h, w] -> [b, 2 z, h / 8, w / 8]. With a request, pixels may be on any
        device, and the result is on the request's."""
        half: Any = self
        if not isinstance(x, Asked):
            made: Tensor = super().forward(x)  # type: ignore[misc]
            return made
        pixels, request = x
        height, width = pixels.shape[2:]
        return encoded(half, route(half, height, width, pixels.element_size(), request.room), request, pixels)


class Asked(NamedTuple):
    """Pixels with a request, because stock passes one argument to its encoder."""

    x: Tensor
    request: Request


# ------------------------------------------------------------------------------------------------------ the fused VAEs


class Fused:
    """Mixed into stock's AutoencodingEngine and AutoencoderKL."""

    comfy_has_chunked_io = True
    fusestream_policy: KernelPolicy
    fusestream_limit: int

    def decode_output_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The pixels [b, 3, h, w] that latents of this shape become."""
        vae: Any = self
        b, _, h, w = shape
        scale = folding(vae) * 2 ** (vae.decoder.num_resolutions - 1)
        return b, vae.decoder.conv_out.out_channels, scale * h, scale * w

    def fusestream_room(self, device: torch.device) -> int:
        """The default of `room` at this moment."""
        return room_for(self, self.fusestream_limit, device)

    @torch.no_grad()
    def decode(
        self, z: Tensor, output_buffer: Tensor | None = None, room: int | None = None, **_options: Any
    ) -> Tensor:
        """Latents [b, z, h, w] -> pixels [b, 3, 8 h, 8 w]; Flux.2: 16 h, 16 w.

        output_buffer  the destination, on any device and of any type; by default a tensor like z
        room           bytes that the parts of a picture may take; by default the limit decides
        """
        finishes = pixel_range.finishing_of(self, output_buffer)
        asked = {"into": output_buffer, "finishes": finishes is not None}
        request = Request.for_pictures(self, z.device, room, SMALL, output_buffer is not None, **asked)
        made: Tensor = super().decode(z, request=request)  # type: ignore[misc]
        if finishes is not None and output_buffer is not None:
            finishes.done(output_buffer)
        return made

    @torch.no_grad()
    def encode(self, x: Tensor, device: torch.device | None = None, room: int | None = None, **options: Any) -> Any:
        """Pixels [b, 3, h, w] -> latents [b, z, h / 8, w / 8]; Flux.2: h / 16, w / 16.

        x       on any device
        device  of the computation and the result; by default x's
        room    bytes that the parts of a picture may take; by default the limit decides
        """
        request = Request.for_pictures(self, device or x.device, room, SMALL, device is not None)
        return super().encode(Asked(x, request), **options)  # type: ignore[misc]


def unserved(vae: nn.Module | None) -> str | None:
    """Why `fuse` does not take this VAE, in words a user understands; None: it does."""
    if type(vae) not in (AutoencodingEngine, AutoencoderKL) and not isinstance(vae, Fused):
        return "it is of another kind"
    if getattr(vae, "max_batch_size", None) is not None or getattr(vae.regularization, "sample", True):  # type: ignore[union-attr]
        return "it takes its latents by chance"
    return obstacle(vae.encoder) or obstacle(vae.decoder)  # type: ignore[union-attr]


def fuse(vae: Any, policy: KernelPolicy = STANDARD, limit: int = LIMIT) -> None:
    """Let stock's AutoencodingEngine or AutoencoderKL compute through our ops, in place, under this
    policy.

    limit: bytes of VRAM for the weights and a picture of any size.
    """
    mix(vae.encoder, FusedEncoder)
    mix(vae.decoder, FusedDecoder)
    mix(vae, Fused, **standing(policy), fusestream_limit=limit)


def install(vae: Any, policy: KernelPolicy) -> int:
    """Let a stock VAE object compute through our ops, and free only as much memory as it takes.
    Returns whether it will."""
    net = vae.first_stage_model
    if unserved(net) is not None:
        return 0
    fuse(net, policy, LIMIT)
    pixel_range.install(vae)
    answer(vae, memory_used)
    return 1
