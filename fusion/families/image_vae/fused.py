"""Stock's AutoencoderKL and AutoencodingEngine over our ops, within a bound of memory: the VAEs of SD, SDXL, Flux and Flux.2.

Stock's modules keep the weights. What is stock's own of these VAEs stays so: the batch norm that Flux.2 has around its latents, the
1x1 convolutions beside them, the mean of what is encoded. Encoder and decoder are ours. A picture passes whole where it fits, else
in bands (plan.py); decoded rows leave for the host as they are ready, encoded ones come from it as they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfy.model_management
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.ldm.modules.diffusionmodules.model import Encoder
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy
from ...base.subclassing import mix
from ...vae import pixel_range
from ...vae.memory_limits import (
    HELD,
    LIMIT,
    OTHERS,
    Leftovers,
    Progress,
    Result,
    channels_last,
    on_card,
    weight_bytes,
)
from ...vae.transfer import Outbox
from .layers import Layers
from .passage import Passage
from .plan import Plan, best
from .stages import Journey, Stage, journey, obstacle

GRAIN = 1 << 26  # bytes: rooms that differ by less have one plan
WEIGHTS = 40 << 20  # bytes of those that are laid out for the kernels and kept from band to band
SMALL = WEIGHTS + (24 << 20)  # bytes beside the pictures: and what allocators round up
TURNS = 128 << 20  # bytes for what kernels need that take their turn while one is chosen
# Of what no plan sees, the workspaces of cuDNN's convolutions: pixels up to which SMALL has room for it, and bytes for each one
# beyond. An H200 held 3.05 GiB of a decoding of 4096x4096 at first use, where the reckoning of the allocator
# (tests/torch_allocator.py) had 2.80, weights included; for that size these are 96 MiB.
FORESEEN = 2048 * 2048
UNSEEN = 8


# --------------------------------------------------------------------------------------------------------- the bounds


def planned(half: Any, height: int, width: int, item: int, room: int) -> tuple[Journey, Plan | None]:
    """How a picture of this size passes through an encoder or a decoder. room: bytes that its parts may take."""
    room -= unseen(half, height, width)
    found = journey(half, height, width, item, int(room / HELD))
    return found, None if found.way is None else best(found.way, room)


def unseen(half: Any, height: int, width: int) -> int:
    """Bytes beside the parts of a picture and SMALL. height, width: as for `planned`."""
    scale = 1 if isinstance(half, Encoder) else 2 ** (half.num_resolutions - 1)
    return UNSEEN * max(0, height * scale * width * scale - FORESEEN)


def room_for(vae: Any, limit: int, device: torch.device | None = None) -> int:
    """Bytes that the parts of a picture may take: by the limit, and by what is free on the device."""
    room = limit - weight_bytes(vae)
    if device is not None and device.type == "cuda":
        room = min(room, int(comfy.model_management.get_free_memory(device)))
    return max(GRAIN, (room - SMALL - TURNS) // GRAIN * GRAIN)


def memory_used(vae: Any, limit: int, decodes: bool, shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes that a decoding or encoding takes beside the weights, however many samples there are. For ComfyUI to free."""
    half = vae.decoder if decodes else vae.encoder
    height, width = shape[2:]
    fold = folding(vae) if decodes else 1
    sides = fold * height, fold * width
    found, plan = planned(half, *sides, dtype.itemsize, room_for(vae, limit))
    passing = found.piece if plan is None else max(int(HELD * found.most), plan.peak)
    needed = SMALL + TURNS + unseen(half, *sides) + passing
    # Where our kernels do not serve, torch's convolutions have a workspace.
    return needed if dtype is torch.float16 else needed * 3 // 2 + (1 << 30)


def folding(vae: Any) -> int:
    """Pixels of the decoder's latent, along either side, in one of the latents that samplers see: Flux.2's are folded 2x2."""
    return 1 if getattr(vae, "bn", None) is None else 2


# --------------------------------------------------------------------------------------------------------- the halves


@dataclass(frozen=True)
class Order:
    """What a half is to do, beside its input.

    device  where it computes
    into    where decoded pixels go; None: into a tensor like the latents
    finishes  whether they are to be those of pictures there
    room    bytes that the parts of a picture may take
    most    and all that is made on its way
    alone   whether this is all of a picture, and no tile of one
    tidies  whether memory that is free goes back from torch's allocator to the card
    """

    policy: KernelPolicy
    device: torch.device
    room: int
    most: int
    alone: bool
    tidies: bool
    into: Tensor | None = None
    finishes: bool = False

    def layers(self, keeps: int = 0) -> Layers:
        return Layers(self.policy, keeps, self.tidies)

    def passed(self, found: Journey, leftovers: Leftovers, run: Callable[[Order], Result]) -> Result:
        """What `run` makes of one sample, when torch's allocator is ready for it, and within the bound. A picture that passes whole
        finds all in one piece of memory; for others nothing of what went before may lie amid what comes."""
        if not self.tidies:
            return run(self)
        whole = found.way is None
        begun = replace(self, tidies=not whole)
        # Some of the kernels that are chosen want a little beside what the plan knows: cuDNN's workspaces, a padded weight.
        return leftovers.serve(lambda: run(begun), found.piece + TURNS if whole else 0, self.most, self.device)

    def spare(self, need: int) -> int:
        """Bytes that torch's allocator may hold unused before something that needs so many."""
        return max(0, self.room - int(HELD * need))


class FusedDecoder:
    """What stock's Decoder is mixed with."""

    def forward(self, z: Tensor, order: Order | None = None, **others: Any) -> Tensor:
        """Latents [b, z, h, w] -> pixels [b, 3, 8 h, 8 w]."""
        half: Any = self
        if order is None:
            made: Tensor = super().forward(z, **others)  # type: ignore[misc]
            return made
        b, _, h, w = z.shape
        scale = 2 ** (half.num_resolutions - 1)
        shape = (b, half.conv_out.out_channels, scale * h, scale * w)
        out = torch.empty(shape, device=z.device, dtype=z.dtype) if order.into is None else order.into
        found, plan = planned(half, h, w, z.element_size(), order.room)
        progress = Progress(b * (1 if plan is None else plan.bands), shown=order.alone)
        outbox, leftovers = Outbox(out, order.finishes), Leftovers(half, z.shape)

        def one(sample: int, begun: Order) -> None:
            decode(half, begun, z[sample : sample + 1], found, plan, outbox, sample, progress)

        for sample in range(b):
            comfy.model_management.throw_exception_if_processing_interrupted()
            order.passed(found, leftovers, partial(one, sample))
            outbox.flush()
        return out


def decode(
    half: Any,
    order: Order,
    z: Tensor,
    found: Journey,
    plan: Plan | None,
    outbox: Outbox,
    sample: int,
    progress: Progress,
) -> None:
    """One sample."""
    layers = order.layers()
    # In boxes that are emptied: a reference that outlives its use is, for a large picture, hundreds of megabytes.
    box = [layers.first(half.conv_in, channels_last(z))]
    layers.tidy(order.spare(found.middle))
    box.append(layers.middle(half.mid, box.pop()))
    for stage, need in zip(found.whole, found.needs, strict=True):
        layers.tidy(order.spare(need))
        box.append(through(layers, stage, box.pop()))

    def put(first: int, last: int, pixels: Tensor) -> None:
        outbox.put((slice(sample, sample + 1), slice(None), slice(first, last)), pixels)

    if found.way is None or plan is None:
        box.append(layers.norm(half.norm_out, box.pop()))
        pixels = layers.last(half.conv_out, box.pop())
        put(0, pixels.shape[2], pixels)
        progress.add(1)
        return
    layers = order.layers(keeps=WEIGHTS)
    end = half.norm_out, half.conv_out
    like = z.dtype, z.device
    Passage(layers, found.banded, found.way, plan, partial(_rows, box.pop()), end, progress, like).run(put)


class FusedEncoder:
    """What stock's Encoder is mixed with."""

    def forward(self, x: Any) -> Tensor:
        """Pixels [b, 3, h, w], with an order: on any device -> [b, 2 z, h / 8, w / 8], on the order's."""
        half: Any = self
        if not isinstance(x, Ordered):
            made: Tensor = super().forward(x)  # type: ignore[misc]
            return made
        x, order = x.x, x.order
        height, width = x.shape[2:]
        found, plan = planned(half, height, width, x.element_size(), order.room)
        progress = Progress(len(x) * (1 if plan is None else plan.bands), shown=order.alone)
        latents, leftovers = [], Leftovers(half, x.shape)

        def one(sample: int, begun: Order) -> Tensor:
            return encode(half, begun, x[sample : sample + 1], found, plan, progress)

        for sample in range(len(x)):
            comfy.model_management.throw_exception_if_processing_interrupted()
            latents.append(order.passed(found, leftovers, partial(one, sample)))
        return torch.cat(latents)


@dataclass(frozen=True)
class Ordered:
    """Pixels with an order: stock hands one argument to its encoder."""

    x: Tensor
    order: Order


def encode(half: Any, order: Order, x: Tensor, found: Journey, plan: Plan | None, progress: Progress) -> Tensor:
    """One sample."""

    def pixels(first: int, last: int) -> Tensor:
        return channels_last(x[:, :, first:last].to(order.device))

    layers = order.layers()
    box: list[Tensor] = []
    if found.way is not None and plan is not None:
        banded = order.layers(keeps=WEIGHTS)
        like = x.dtype, order.device
        made = Passage(banded, found.banded, found.way, plan, pixels, None, progress, like).run()
        assert made is not None
        box.append(made)
        del made
    else:
        box.append(pixels(0, x.shape[2]))
        progress.add(1)
    for stage, need in zip(found.whole, found.needs, strict=True):
        layers.tidy(order.spare(need))
        box.append(through(layers, stage, box.pop()))
    layers.tidy(order.spare(found.middle))
    box.append(layers.middle(half.mid, box.pop()))
    box.append(layers.norm(half.norm_out, box.pop()))
    return layers.last(half.conv_out, box.pop())


def through(layers: Layers, stage: Stage, x: Tensor) -> Tensor:
    """A stage of a picture that passes whole."""
    if stage.entry is not None:
        make = {"up": layers.up, "down": layers.down, "enter": layers.first}[stage.kind]
        x = make(stage.entry, x)
    for block in stage.blocks:
        x = layers.block(block, x)
    return x


def _rows(x: Tensor, first: int, last: int) -> Tensor:
    return x[:, :, first:last]


# ------------------------------------------------------------------------------------------------------ the fused VAEs


class Fused:
    """What stock's AutoencodingEngine and AutoencoderKL are mixed with."""

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
        """What `room` is there now, unless given."""
        return room_for(self, self.fusestream_limit, device)

    @torch.no_grad()
    def decode(
        self, z: Tensor, output_buffer: Tensor | None = None, room: int | None = None, **_options: Any
    ) -> Tensor:
        """Latents [b, z, h, w] -> pixels [b, 3, 8 h, 8 w]; Flux.2: 16 h, 16 w.

        output_buffer  where to put them, on any device and of any type; unless given, like z
        room           bytes that the parts of a picture may take, unless the limit shall decide it
        """
        finishes = pixel_range.finishing_of(self, output_buffer)
        order = self._order(z.device, room, output_buffer is not None, output_buffer)
        made: Tensor = super().decode(z, order=replace(order, finishes=finishes is not None))  # type: ignore[misc]
        if finishes is not None and output_buffer is not None:
            finishes.done(output_buffer)
        return made

    @torch.no_grad()
    def encode(self, x: Tensor, device: torch.device | None = None, room: int | None = None, **options: Any) -> Any:
        """Pixels [b, 3, h, w] -> latents [b, z, h / 8, w / 8]; Flux.2: h / 16, w / 16.

        x       on any device
        device  where to compute and to leave the result; unless given, where x is
        room    bytes that the parts of a picture may take, unless the limit shall decide it
        """
        order = self._order(device or x.device, room, device is not None)
        return super().encode(Ordered(x, order), **options)  # type: ignore[misc]

    def _order(self, device: torch.device, room: int | None, alone: bool, into: Tensor | None = None) -> Order:
        found = self.fusestream_room(device) if room is None else room
        most = max(found + SMALL, self.fusestream_limit - OTHERS - weight_bytes(self))  # type: ignore[arg-type]
        return Order(self.fusestream_policy, device, found, most, alone, alone and on_card(device), into)


def unserved(vae: nn.Module | None) -> str | None:
    """Why this is no VAE that `fuse` takes, in words a user understands."""
    if type(vae) not in (AutoencodingEngine, AutoencoderKL) and not isinstance(vae, Fused):
        return "it is of another kind"
    if getattr(vae, "max_batch_size", None) is not None or getattr(vae.regularization, "sample", True):  # type: ignore[union-attr]
        return "it takes its latents by chance"
    return obstacle(vae.encoder) or obstacle(vae.decoder)  # type: ignore[union-attr]


def fuse(vae: Any, policy: KernelPolicy = STANDARD, limit: int = LIMIT) -> None:
    """Let stock's AutoencodingEngine or AutoencoderKL compute through our ops from now on, under this policy. In place.

    limit: bytes of VRAM that the weights and a picture on its way may take, however large it is.
    """
    mix(vae.encoder, FusedEncoder)
    mix(vae.decoder, FusedDecoder)
    mix(vae, Fused, fusestream_policy=policy, fusestream_limit=limit)


def install(vae: Any, policy: KernelPolicy) -> int:
    """Let a stock VAE object compute through our ops, and free no more memory for it than it takes. Returns whether it will."""
    net = vae.first_stage_model
    if unserved(net) is not None:
        return 0
    fuse(net, policy, LIMIT)
    pixel_range.install(vae)
    vae.memory_used_decode = partial(memory_used, net, LIMIT, True)
    vae.memory_used_encode = partial(memory_used, net, LIMIT, False)
    return 1
