"""How images and videos are seen as planes: shared by the ops that work over channels or over a channel's pixels.

[batch, channel, ...] is seen as [batch, channel, pixel] in one of two layouts. "first": the pixels of a channel are
adjacent (contiguous tensors). "last": the channels of a pixel are adjacent (torch.channels_last, channels_last_3d).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...call import Call, round_up
from ...launcher import Card, output
from .checks import not_contiguous, word, wrong_dtype

Layout = Literal["first", "last"]

TYPES = (torch.float16,)
WEIGHT_TYPES = (torch.float16, torch.float32)

ACTIVATIONS = {"none": 0, "silu": 1, "relu": 2}  # kNone, kSilu, kRelu


@dataclass(frozen=True)
class Planes:
    """A tensor as [batch, channel, pixel]. `step`: from channel to channel (first) or from pixel to pixel (last)."""

    layout: Layout
    batches: int
    channels: int
    pixels: int
    batch_stride: int
    step: int

    def places(self, name: str) -> dict[str, int]:
        """The fields of a struct for an operand of this name."""
        return {f"{name}_batch": self.batch_stride, f"{name}_step": self.step}


def pixel_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The distance between neighbouring pixels, if the dimensions of the image fold into one."""
    stride, expected = None, None
    for size, step in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if expected is not None and step != expected:
            return None
        stride = step if stride is None else stride
        expected = step * size
    return 1 if stride is None else stride


def planes(shape: Sequence[int], strides: Sequence[int]) -> Planes | str:
    """The view of a tensor of this shape and these strides, or why there is none."""
    batches, channels, *image = shape
    batch_stride, channel_stride = (
        stride if size > 1 else 0 for size, stride in zip(shape[:2], strides[:2], strict=True)
    )
    pixels = math.prod(image)
    between = pixel_stride(image, strides[2:])
    if between is None:
        return f"image dimensions {tuple(image)} with strides {tuple(strides[2:])} do not fold into one"
    if pixels == 1 or (channels > 1 and channel_stride == 1):  # one pixel: its channels are all there is to go along
        if channels > 1 and channel_stride != 1:
            return f"channels are {channel_stride} apart, not adjacent, and there is one pixel"
        return Planes("last", batches, channels, pixels, batch_stride, between if pixels > 1 else 0)
    if between == 1:
        return Planes("first", batches, channels, pixels, batch_stride, channel_stride)
    if channels == 1:
        return Planes("last", batches, channels, pixels, batch_stride, between)
    return f"neither pixels ({between} apart) nor channels ({channel_stride} apart) are adjacent"


def plane_view(shape: Sequence[int], strides: Sequence[int]) -> Planes:
    """`planes` of a tensor that is known to have them."""
    view = planes(shape, strides)
    if isinstance(view, str):
        raise ValueError(view)
    return view


def strides_like(x: Tensor) -> tuple[int, ...]:
    """The strides torch gives to a result that preserves x's format."""
    return torch.empty_like(x, device="meta").stride()


def output_like(x: Tensor, card: Card) -> Callable[[], Tensor]:
    """A maker of tensors of x's shape and dtype in x's format."""
    shape, strides = tuple(x.shape), strides_like(x)
    if torch.empty(shape, device="meta").stride() == strides:
        return output(shape, x.dtype, card.index)
    flat = output((x.numel(),), x.dtype, card.index)
    return lambda: flat().as_strided(shape, strides)


def check_planes(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Raises ValueError for what is not an image with a weight and a bias for each channel."""
    if x.ndim < 2:
        raise ValueError(f"x: {list(x.shape)} is not [batch, channels, ...]")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            per_channel(t, x, name)


def per_channel(t: Tensor, x: Tensor, name: str) -> Tensor:
    """A weight or bias, stored as [c], [c, 1, 1] or [c, 1, 1, 1], so that it broadcasts against x."""
    if t.numel() != x.shape[1] or t.ndim == 0 or t.shape[0] != x.shape[1]:
        raise ValueError(f"{name}: {list(t.shape)} is not one value for each of {x.shape[1]} channels")
    return t.reshape(-1, *[1] * (x.ndim - 2))


def plane_class(x: Tensor) -> str:
    """A coarse name for an image tensor: exact channels, layout, other elements to a power of two."""
    view = planes(x.shape, x.stride())
    layout = "-" if isinstance(view, str) else view.layout
    others = x.numel() // max(x.shape[1], 1)
    return f"{word(x)}[{x.shape[1]} {layout} x {round_up(others)}]"


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels of these ops from serving a call on x, and on a weight and a bias where it has them."""
    x, weight, bias, *_ = (*call.operands, None, None)
    yield from wrong_dtype(TYPES, x=x)
    yield from wrong_dtype(WEIGHT_TYPES, weight=weight, bias=bias)
    yield from not_contiguous(weight=weight, bias=bias)
    view, out = planes(x.shape, x.stride()), planes(x.shape, strides_like(x))
    if isinstance(view, str):
        yield f"x: {view}"
    elif isinstance(out, str) or view.layout != out.layout:
        yield f"x: torch would not keep the layout of strides {x.stride()} in the result"
