"""Stock's TAESD, the small VAE for previews (of SD 1.5, SDXL, SD 3, Flux and Flux.2), over our ops,
within a memory limit.

Its blocks have no norms, so a large picture passes in bands that each go all the way, from latents
to pixels or back: a band enters with the rows around it that its convolutions depend on, and loses
them on the way. Flux.2's has norms in the blocks of the latent's size. These blocks pass whole, as
they do in all the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from comfy.taesd.taesd import TAESD, Block, Clamp, DecoderFlux2
from torch import Tensor, nn

from ....kernels_cuda import STANDARD, KernelPolicy, conv2d, fold_upsample, group_norm_silu, upsample_conv2d
from ....kernels_cuda.ops.matmul.linear import Activation
from ...base.policy import standing
from ...base.subclassing import mix
from ...vae.bands import CONV, UP, Layer, by_rows, convolutions, entering, fewest
from ...vae.memory_limits import HELD, LIMIT, channels_last, weights
from ...vae.picture_layers import PictureLayers
from ...vae.picture_plan import PACK, Picture, Way, in_one_pass
from ...vae.picture_route import Banded, Pass, Route, Whole, decoded, encoded
from ...vae.request import Request, answer, room_within
from ...weights.operands import operands

Kind = Literal["clamp", "conv", "block", "up", "pixels"]

SCALE = 8  # pixels of one latent of its halves, on a side
# Pictures of the latent's size that its part needs at a time; those of a norm have four times the
# channels.
WHOLE = 10
BESIDE = 64 << 20  # bytes in addition to the pictures, for the rounding of allocators
AT_WORK = 4  # pictures that a block needs at a time, with its input
BLOCK = convolutions(3)
DOWN = Layer(stride=2)


# ---------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Step:
    """A part of stock's Sequential, and its layer in the table. activation: a ReLU that follows
    it."""

    kind: Kind
    module: Any
    layer: Layer
    activation: Activation = "none"


def steps_of(vae: Any, decodes: bool) -> list[Step]:
    """The steps of stock's encoder or decoder, in order."""
    found: list[Step] = []
    modules = iter(vae.taesd_decoder if decodes else vae.taesd_encoder)
    for module in modules:
        if isinstance(module, nn.ReLU):
            found[-1] = replace(found[-1], activation="relu")
        elif isinstance(module, nn.Upsample):
            found.append(Step("up", next(modules), UP))
        elif isinstance(module, nn.Conv2d):
            found.append(Step("conv", module, DOWN if module.stride == (2, 2) else CONV))
        elif isinstance(module, Clamp):
            found.append(Step("clamp", module, Layer(kernel=1, before=0)))
        else:
            found.append(Step("block", module, BLOCK))
    if decodes:
        found[-1] = replace(found[-1], kind="pixels")
    return found


def split(decodes: bool, found: Sequence[Step]) -> tuple[Sequence[Step], Sequence[Step]]:
    """The steps of the latent's size, and the others. A decoder begins with the former."""
    at = [k for k, step in enumerate(found) if step.layer in (UP, DOWN)]
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


# --------------------------------------------------------------------------------------------------------------- layers


class Layers(PictureLayers):
    """The steps as functions of rows of a picture, [1, c, rows, width]."""

    def make(self, step: Step, x: Tensor, above: int, below: int) -> Tensor:
        """The output of a step, without rows that depend on others beyond a cut. above, below: rows
        of zeros beyond the edges of the picture."""
        if step.kind == "clamp":
            return channels_last(step.module(x))
        if step.kind == "block":
            return self._block(step.module, x, above, below)
        if step.kind == "up":
            with weights(step.module, self.policy, x) as (weight, bias):
                return upsample_conv2d(x, weight, bias, folded=fold_upsample(weight), policy=self.policy)
        made = self._conv(step.module, x, above > 0, below > 0, step.activation)
        return made * 2 - 1 if step.kind == "pixels" else made

    def _conv(
        self,
        module: Any,
        x: Tensor,
        above: bool,
        below: bool,
        activation: Activation = "none",
        skip: Tensor | None = None,
    ) -> Tensor:
        """A 3x3 convolution with a stride of 1 or 2."""
        stride, padding, policy = module.stride[0], (1, 1, int(above), int(below)), self.policy
        with weights(module, policy, x) as (weight, bias):
            return conv2d(
                x, weight, bias, stride=stride, padding=padding, residual=skip, activation=activation, policy=policy
            )

    def _block(self, module: Any, x: Tensor, above: int, below: int) -> Tensor:
        """Three convolutions and a skip: the first sees zeros if one is needed, the last if three
        are."""
        if module.pool is not None:
            x = self._pooled(module.pool, x)
        reach = BLOCK.before
        box = [self._conv(module.conv[0], x, above > 0, below > 0, "relu")]
        box.append(self._conv(module.conv[2], box.pop(), above > 1, below > 1, "relu"))
        skip = x[:, :, reach - above : x.shape[2] - (reach - below)]
        del x
        if not isinstance(module.skip, nn.Identity):
            skip = self._point(module.skip, skip)
        return self._conv(module.conv[4], box.pop(), above > 2, below > 2, skip=skip).relu_()

    def _pooled(self, pool: Any, x: Tensor) -> Tensor:
        """x plus the output of the block's norm over the whole picture. x [1, c, h, w]."""
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


# --------------------------------------------------------------------------------------------------------- the bounds


def heights(layers: Iterable[Layer], height: int) -> list[int]:
    """Rows of the input of the first layer, and of each layer's output."""
    found = [height]
    for layer in layers:
        found.append(layer.size(found[-1]))
    return found


def most(vae: Any, decodes: bool, height: int, width: int, item: int, count: int) -> int:
    """Most bytes of a picture at a time, in so many bands. height, width: of the latent of the
    halves."""
    _, banded = split(decodes, steps_of(vae, decodes))
    layers, channels = [step.layer for step in banded], banded[0].module.out_channels
    *sizes, made = heights(layers, height * (1 if decodes else SCALE))
    bands = (entering(layers, sizes, band) for band in by_rows(made, -(-made // count)))
    rows = max(high - low for low, high in bands) * (SCALE if decodes else 1)
    # A block's pictures with its input, and pixels on the card and in the host's type.
    pixels = rows * width * SCALE * (AT_WORK * channels * item + PACK * (item + 4))
    latent = channels * height * width * item
    return int(HELD * max(pixels + latent, WHOLE * latent))


def count_for(vae: Any, decodes: bool, height: int, width: int, item: int, room: int) -> int:
    """The least number of bands that fit; if none does, one for each row of the latent."""
    return fewest(partial(most, vae, decodes, height, width, item), height, room)


def room_for(vae: Any, limit: int, device: torch.device | None = None) -> int:
    """Bytes that a picture may take: by the limit, and by the free memory of the device."""
    return room_within(vae, limit, device) - BESIDE


def memory_used(vae: Any, limit: int, decodes: bool, shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes that a decoding or encoding takes in addition to the weights, for any number of
    samples. ComfyUI frees so many."""
    height, width = (fold(vae) * side if decodes else max(1, side // SCALE) for side in shape[2:])
    count = count_for(vae, decodes, height, width, dtype.itemsize, room_for(vae, limit))
    return BESIDE + most(vae, decodes, height, width, dtype.itemsize, count)


def fold(vae: Any) -> int:
    """Pixels of the halves' latent, on either side, in one of the latents that samplers see."""
    return 2 if isinstance(vae.taesd_decoder, DecoderFlux2) else 1


def route(vae: Any, decodes: bool, given: Tensor, room: int) -> Route:
    """The route of a half's input [b, c, h, w]. room: bytes that a picture may take."""
    whole, banded = split(decodes, steps_of(vae, decodes))
    channels, item = banded[0].module.out_channels, given.element_size()
    height, width = (side if decodes else -(-side // SCALE) for side in given.shape[2:])
    count = count_for(vae, decodes, height, width, item, room)
    taken = most(vae, decodes, height, width, item, count)
    if count == 1:
        return Route(Layers, [_whole(step) for step in steps_of(vae, decodes)], None, taken)
    layers = [step.layer for step in banded]
    rows, columns = (heights(layers, side) for side in given.shape[2:])
    pictures = [
        Picture("layer" if k else "given", channels, rows[k], columns[k], max(0, k - 1), 0, layer, normed=False)
        for k, layer in enumerate((CONV, *layers))
    ]
    way = Way(tuple(pictures), banded[-1].module.out_channels if decodes else 0, item)
    plan = in_one_pass(way, count, taken - channels * height * width * item)
    return Route(Layers, [_whole(step) for step in whole], Banded(way, plan, [None, *banded], None), 0)


def _whole(step: Step) -> Whole:
    """A step of a picture that passes whole."""
    around = step.layer.before
    return Whole(lambda layers, x: layers.make(step, x, around, around))


# ------------------------------------------------------------------------------------------------------ the fused VAE


class FusedTiny:
    """Mixed into stock's TAESD."""

    comfy_has_chunked_io = True
    fusestream_policy: KernelPolicy
    fusestream_limit: int

    def decode_output_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The pixels [b, 3, h, w] that latents of this shape become."""
        b, _, h, w = shape
        return b, 3, SCALE * fold(self) * h, SCALE * fold(self) * w

    def fusestream_room(self, device: torch.device) -> int:
        """The default of `room` at this moment."""
        return room_for(self, self.fusestream_limit, device)

    @torch.no_grad()
    def decode(
        self, x: Tensor, output_buffer: Tensor | None = None, room: int | None = None, **_options: Any
    ) -> Tensor:
        """Latents [b, z, h, w] -> pixels [b, 3, 8 h, 8 w]; Flux.2: 16 h, 16 w. Arguments as in
        `fused.Fused.decode`."""
        vae: Any = self
        shape = self.decode_output_shape(x.shape)
        out = torch.empty(shape, device=x.device, dtype=x.dtype) if output_buffer is None else output_buffer
        latent = (x - vae.vae_shift) * vae.vae_scale
        if fold(vae) > 1:
            latent = torch.pixel_shuffle(latent, fold(vae))
        request = Request.for_pictures(self, x.device, room, BESIDE, output_buffer is not None)
        half = vae.taesd_decoder
        found = route(vae, True, latent, request.room)
        return decoded(half, found, request, latent, out, lambda one: _by_stock(half, one) * 2 - 1)

    @torch.no_grad()
    def encode(self, x: Tensor, device: torch.device | None = None, room: int | None = None) -> Tensor:
        """Pixels [b, 3, h, w] -> latents [b, z, h / 8, w / 8]; Flux.2: h / 16, w / 16. Arguments as
        in `fused.Fused.encode`."""
        vae: Any = self
        request = Request.for_pictures(self, device or x.device, room, BESIDE, device is not None)
        found = route(vae, False, x, request.room)
        half = vae.taesd_encoder
        begin: Pass = lambda pixels: channels_last(pixels) * 0.5 + 0.5  # noqa: E731
        latent = encoded(half, found, request, x, begin, partial(_by_stock, half))
        if fold(vae) > 1:
            latent = torch.pixel_unshuffle(latent, fold(vae))
        scaled: Tensor = latent / vae.vae_scale + vae.vae_shift
        return scaled


def _by_stock(half: nn.Sequential, x: Tensor) -> Tensor:
    """Stock's layers in turn, because its halves for Flux.2 fold latents as well."""
    for layer in half:
        x = layer(x)
    return x


def fuse(vae: Any, policy: KernelPolicy = STANDARD, limit: int = LIMIT) -> None:
    """Let stock's TAESD compute through our ops, in place, under this policy. limit: as in
    `fused.fuse`."""
    mix(vae, FusedTiny, **standing(policy), fusestream_limit=limit)


def install(vae: Any, policy: KernelPolicy) -> int:
    """Like `fused.install`."""
    net = vae.first_stage_model
    if obstacle(net) is not None:
        return 0
    fuse(net, policy)
    answer(vae, memory_used)
    return 1
