"""Stock's TAESD, the small VAE for previews (of SD 1.5, SDXL, SD 3, Flux and Flux.2), over our ops, within a bound of memory.

Its blocks have no norms, so a large picture passes in bands that each go all the way, from latents to pixels or back: a band
enters with the rows beside it that its convolutions look at, and loses them on the way. Flux.2's has norms in the blocks that are
as large as the latent: those pass whole, as they do in all the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import comfy.model_management
import torch
from comfy.taesd.taesd import TAESD, Block, Clamp, DecoderFlux2
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy, conv2d, fold_upsample, group_norm_silu, upsample_conv2d
from ....kernels_cuda.ops.matmul.linear import Activation
from ...base.subclassing import mix
from ...vae.memory_limits import (
    HELD,
    LIMIT,
    Leftovers,
    Progress,
    channels_last,
    on_card,
    weight_bytes,
    weights,
)
from ...vae.transfer import Outbox
from ...weights.operands import operands
from .plan import PACK, parts

Kind = Literal["clamp", "conv", "block", "up", "down"]

SCALE = 8  # pixels of one of the latent that its halves see
WHOLE = 10  # pictures as large as the latent that its part needs at a time: a norm's have four times the channels
BESIDE = 64 << 20  # bytes beside the pictures: what allocators round up
AT_WORK = 4  # pictures that a block needs at a time, with what it is made of


# ---------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Step:
    """A part of stock's Sequential. activation: ReLU, where it follows."""

    kind: Kind
    module: Any
    activation: Activation = "none"

    def height(self, of: int) -> int:
        """Rows of the result."""
        if self.kind == "up":
            return 2 * of
        return (of + 1) // 2 if self.kind == "down" else of

    def seen(self, first: int, last: int) -> tuple[int, int]:
        """Rows of its input that rows of its result are made of, edges not looked at."""
        if self.kind == "up":
            return (first - 1) // 2, (last + 2) // 2
        if self.kind == "down":
            return 2 * first - 1, 2 * last
        reach = {"clamp": 0, "conv": 1, "block": 3}[self.kind]
        return first - reach, last + reach


def steps(half: Any) -> list[Step]:
    """Of stock's encoder or decoder, in order."""
    found: list[Step] = []
    modules = iter(half)
    for module in modules:
        if isinstance(module, nn.ReLU):
            found[-1] = Step(found[-1].kind, found[-1].module, "relu")
        elif isinstance(module, nn.Upsample):
            found.append(Step("up", next(modules)))
        elif isinstance(module, nn.Conv2d):
            found.append(Step("down" if module.stride == (2, 2) else "conv", module))
        else:
            found.append(Step("clamp" if isinstance(module, Clamp) else "block", module))
    return found


def split(decodes: bool, found: Sequence[Step]) -> tuple[Sequence[Step], Sequence[Step]]:
    """Of the first, those that pass at the size of the latent, and the others: a decoder begins with the former."""
    at = [k for k, step in enumerate(found) if step.kind in ("up", "down")]
    if decodes:
        return found[: at[0]], found[at[0] :]
    return found[at[-1] + 1 :], found[: at[-1] + 1]


def obstacle(vae: Any) -> str | None:
    """Why this is no TAESD that is served, in words a user understands."""
    if type(vae) is not TAESD and not isinstance(vae, FusedTiny):
        return "it is of another kind"
    known = (Clamp, nn.Conv2d, nn.ReLU, nn.Upsample, Block)
    if not all(isinstance(module, known) for half in (vae.taesd_encoder, vae.taesd_decoder) for module in half):
        return "its layers are of another kind"
    return None


# --------------------------------------------------------------------------------------------------------------- bands


class Slab(NamedTuple):
    """Rows of a picture: x [1, c, rows, width], from the row `at` of `height`."""

    x: Tensor
    at: int
    height: int

    @property
    def end(self) -> int:
        return self.at + self.x.shape[2]

    def rows(self, first: int, last: int) -> Tensor:
        return self.x[:, :, first - self.at : last - self.at]


class Layers:
    """The steps as functions of slabs. What looks beyond a cut is not made, what looks beyond the picture sees zeros."""

    def __init__(self, policy: KernelPolicy) -> None:
        self.policy = policy

    def through(self, found: Iterable[Step], slab: Slab) -> Slab:
        # In a box that is emptied: a reference that outlives its use is, for a large picture, hundreds of megabytes.
        box = [slab]
        del slab
        for step in found:
            box.append(self._step(step, box.pop()))
        return box.pop()

    def _step(self, step: Step, slab: Slab) -> Slab:
        if step.kind == "clamp":
            return slab._replace(x=channels_last(step.module(slab.x)))
        if step.kind == "block":
            return self._block(step.module, slab)
        return self._up(step.module, slab) if step.kind == "up" else self._conv(step.module, slab, step.activation)

    def _conv(self, module: Any, slab: Slab, activation: Activation = "none", skip: Tensor | None = None) -> Slab:
        """A 3x3 convolution with a stride of 1 or 2."""
        stride = module.stride[0]
        above, below = slab.at == 0, slab.end == slab.height
        assert above or stride == 1 or slab.at % 2
        with weights(module, self.policy, slab.x) as (weight, bias):
            x = conv2d(
                slab.x,
                weight,
                bias,
                stride=stride,
                padding=(1, 1, int(above), int(below)),
                residual=skip,
                activation=activation,
                policy=self.policy,
            )
        return Slab(x, 0 if above else (slab.at + 1) // stride, (slab.height - 1) // stride + 1)

    def _up(self, module: Any, slab: Slab) -> Slab:
        with weights(module, self.policy, slab.x) as (weight, bias):
            x = upsample_conv2d(slab.x, weight, bias, folded=fold_upsample(weight), policy=self.policy)
        above, below = int(slab.at > 0), int(slab.end < slab.height)
        return Slab(x[:, :, above : x.shape[2] - below], 2 * slab.at + above, 2 * slab.height)

    def _block(self, module: Any, slab: Slab) -> Slab:
        if module.pool is not None:
            slab = slab._replace(x=self._pooled(module.pool, slab.x))
        box = [self._conv(module.conv[0], slab, "relu")]
        box.append(self._conv(module.conv[2], box.pop(), "relu"))
        low, high = (
            max(slab.at, box[0].at + (box[0].at > 0)),
            min(slab.end, box[0].end - (box[0].end < slab.height)),
        )
        skip = slab.rows(low, high)
        if not isinstance(module.skip, nn.Identity):
            skip = self._point(module.skip, skip)
        made = self._conv(module.conv[4], box.pop(), skip=skip)
        made.x.relu_()
        return made

    def _pooled(self, pool: Any, x: Tensor) -> Tensor:
        """x and what the block's norm of all of it makes. x [1, c, h, w], whole."""
        box = [self._point(pool[0], x)]
        norm = pool[1]
        with operands(x, self.policy, norm) as [own]:
            normed = group_norm_silu(
                box.pop(), norm.num_groups, own.weight, own.bias, eps=norm.eps, silu=False, policy=self.policy
            )
        return self._point(pool[3], normed.relu_(), x)

    def _point(self, module: Any, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """A 1x1 convolution."""
        with weights(module, self.policy, x) as (weight, bias):
            return conv2d(x, weight, bias, residual=skip, policy=self.policy)


def bands(found: Sequence[Step], height: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """So many bands of what the steps make of a picture of this height: its rows, and the rows of the picture that enter."""
    heights = [height]
    for step in found:
        heights.append(step.height(heights[-1]))
    for first, last in parts(heights[-1], -(-heights[-1] // count)):
        low, high = first, last
        for step, rows in zip(reversed(found), reversed(heights[:-1]), strict=True):
            low, high = step.seen(low, high)
            low, high = max(0, low), min(rows, high)
        yield first, last, low, high


# --------------------------------------------------------------------------------------------------------- the bounds


def most(vae: Any, decodes: bool, height: int, width: int, item: int, count: int) -> int:
    """Bytes that a picture takes at a time in so many bands. height, width: of the latent that the halves see."""
    half = vae.taesd_decoder if decodes else vae.taesd_encoder
    _, banded = split(decodes, steps(half))
    channels = banded[0].module.out_channels
    rows = max(
        (high - low) * (SCALE if decodes else 1)
        for *_, low, high in bands(banded, height * (1 if decodes else SCALE), count)
    )
    # A block's pictures, what it is made of, and pixels in the host's type beside the card's.
    pixels = rows * width * SCALE * (AT_WORK * channels * item + PACK * (item + 4))
    latent = channels * height * width * item
    return int(HELD * max(pixels + latent, WHOLE * latent))


def count_for(vae: Any, decodes: bool, height: int, width: int, item: int, room: int) -> int:
    """The least number of bands that fit; where none does, one for each row of the latent."""
    fits = (count for count in range(1, height + 1) if most(vae, decodes, height, width, item, count) <= room)
    return next(fits, max(1, height))


def room_for(vae: Any, limit: int, device: torch.device | None = None) -> int:
    """Bytes that a picture may take: by the limit, and by what is free on the device."""
    room = limit - weight_bytes(vae)
    if device is not None and device.type == "cuda":
        room = min(room, int(comfy.model_management.get_free_memory(device)))
    return room - BESIDE


def memory_used(vae: Any, limit: int, decodes: bool, shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes that a decoding or encoding takes beside the weights, however many samples there are. For ComfyUI to free."""
    height, width = (fold(vae) * side if decodes else max(1, side // SCALE) for side in shape[2:])
    count = count_for(vae, decodes, height, width, dtype.itemsize, room_for(vae, limit))
    return BESIDE + most(vae, decodes, height, width, dtype.itemsize, count)


def fold(vae: Any) -> int:
    """Pixels of the halves' latent, along either side, in one of the latents that samplers see."""
    return 2 if isinstance(vae.taesd_decoder, DecoderFlux2) else 1


# ------------------------------------------------------------------------------------------------------ the fused VAE


class FusedTiny:
    """What stock's TAESD is mixed with."""

    comfy_has_chunked_io = True
    fusestream_policy: KernelPolicy
    fusestream_limit: int

    def decode_output_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The pixels [b, 3, h, w] that latents of this shape become."""
        b, _, h, w = shape
        return b, 3, SCALE * fold(self) * h, SCALE * fold(self) * w

    def fusestream_room(self, device: torch.device) -> int:
        """What `room` is there now, unless given."""
        return room_for(self, self.fusestream_limit, device)

    @torch.no_grad()
    def decode(
        self, x: Tensor, output_buffer: Tensor | None = None, room: int | None = None, **_options: Any
    ) -> Tensor:
        """Latents [b, z, h, w] -> pixels [b, 3, 8 h, 8 w]; Flux.2: 16 h, 16 w. As `fused.Fused.decode`."""
        vae: Any = self
        shape = self.decode_output_shape(x.shape)
        out = torch.empty(shape, device=x.device, dtype=x.dtype) if output_buffer is None else output_buffer
        latent = (x - vae.vae_shift) * vae.vae_scale
        if fold(vae) > 1:
            latent = torch.pixel_shuffle(latent, fold(vae))
        height, width = latent.shape[2:]
        alone, outbox, leftovers = output_buffer is not None, Outbox(out), Leftovers(vae.taesd_decoder, x.shape)
        count = self._count(True, height, width, x, x.device, room)
        whole, banded = split(True, steps(vae.taesd_decoder))
        layers, progress = Layers(self.fusestream_policy), Progress(len(x) * count, shown=alone)
        for sample in range(len(x)):
            start = layers.through(whole, Slab(channels_last(latent[sample : sample + 1]), 0, height))
            tidies = alone and on_card(x.device) and not (count == 1 and leftovers.lie_there(x.device))
            for first, last, low, high in self._around(bands(banded, height, count), tidies, progress):
                made = layers.through(banded, Slab(start.rows(low, high), low, height))
                outbox.put((slice(sample, sample + 1), slice(None), slice(first, last)), made.rows(first, last) * 2 - 1)
                del made
            outbox.flush()
            if tidies:
                leftovers.are_left(x.device)
        return out

    @torch.no_grad()
    def encode(self, x: Tensor, device: torch.device | None = None, room: int | None = None) -> Tensor:
        """Pixels [b, 3, h, w] -> latents [b, z, h / 8, w / 8]; Flux.2: h / 16, w / 16. As `fused.Fused.encode`."""
        vae: Any = self
        alone, device = device is not None, device or x.device
        height, width = x.shape[2:]
        count = self._count(False, -(-height // SCALE), -(-width // SCALE), x, device, room)
        whole, banded = split(False, steps(vae.taesd_encoder))
        layers, progress = Layers(self.fusestream_policy), Progress(len(x) * count, shown=alone)
        latents, leftovers = [], Leftovers(vae.taesd_encoder, x.shape)
        for sample in range(len(x)):
            made: list[Tensor] = []
            tidies = alone and on_card(device) and not (count == 1 and leftovers.lie_there(device))
            for first, last, low, high in self._around(bands(banded, height, count), tidies, progress):
                pixels = channels_last(x[sample : sample + 1, :, low:high].to(device)) * 0.5 + 0.5
                made.append(
                    layers.through(banded, Slab(pixels, low, height))
                    .rows(first, last)
                    .contiguous(memory_format=torch.channels_last)
                )
                del pixels
            joined = made.pop() if len(made) == 1 else torch.cat(made, 2)
            made.clear()
            latents.append(layers.through(whole, Slab(joined, 0, joined.shape[2])).x)
            if tidies:
                leftovers.are_left(device)
        latent = torch.cat(latents)
        if fold(vae) > 1:
            latent = torch.pixel_unshuffle(latent, fold(vae))
        scaled: Tensor = latent / vae.vae_scale + vae.vae_shift
        return scaled

    def _count(self, decodes: bool, height: int, width: int, x: Tensor, device: torch.device, room: int | None) -> int:
        found = self.fusestream_room(device) if room is None else room
        return count_for(self, decodes, height, width, x.element_size(), found)

    def _around(
        self, each: Iterable[tuple[int, int, int, int]], tidies: bool, progress: Progress
    ) -> Iterator[tuple[int, int, int, int]]:
        """The bands, with what is to be done around each. tidies: whether memory that is free goes back to the card."""
        for number, band in enumerate(each):
            comfy.model_management.throw_exception_if_processing_interrupted()
            # Another size than what went before, and at the picture's edge a band has fewer rows around it.
            if tidies and number < 2:
                torch.cuda.empty_cache()
            yield band
            progress.add(1)


def fuse(vae: Any, policy: KernelPolicy = STANDARD, limit: int = LIMIT) -> None:
    """Let stock's TAESD compute through our ops from now on, under this policy. In place. limit: as `fused.fuse` has it."""
    mix(vae, FusedTiny, fusestream_policy=policy, fusestream_limit=limit)


def install(vae: Any, policy: KernelPolicy) -> int:
    """As `fused.install`."""
    net = vae.first_stage_model
    if obstacle(net) is not None:
        return 0
    fuse(net, policy)
    vae.memory_used_decode = partial(memory_used, net, LIMIT, True)
    vae.memory_used_encode = partial(memory_used, net, LIMIT, False)
    return 1
