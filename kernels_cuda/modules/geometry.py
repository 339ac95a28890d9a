"""A Conv2d's arguments in the ops' form, and pictures in the layout that they read."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..ops.conv.bordered_conv import BORDERS
from ..ops.conv.borders import Border, with_border
from ..ops.conv.conv import image_obstacles
from ..ops.conv.conv_operands import Padding

PADS: dict[type[nn.Module], Border | None] = {
    nn.ReflectionPad2d: "reflect",
    nn.ReplicationPad2d: "replicate",
    nn.ZeroPad2d: None,
}


class Geometry(NamedTuple):
    """A convolution's arguments in the op's form. border: the padding's kind if it is not zeros."""

    stride: int
    padding: Padding
    border: Border | None
    taps: tuple[int, int]

    @property
    def is_bordered(self) -> bool:
        """Whether the op makes the border's pixels itself. Other borders are a pass before it."""
        return self.border in BORDERS and self.taps == (3, 3) and self.stride in (1, 2)


@lru_cache(maxsize=256)
def geometry_of(
    taps: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...] | str,
    dilation: tuple[int, ...],
    groups: int,
    padding_mode: str,
) -> Geometry | str:
    """A Conv2d's arguments in the op's form, or why the kernels do not serve them."""
    down, across = taps
    if groups != 1:
        return f"{groups} groups: the kernels have none"
    if set(dilation) != {1}:
        return f"a dilation of {dilation}: the kernels have none"
    if len(set(stride)) > 1:
        return (
            f"{down}x{across} taps with stride {stride[0]}x{stride[1]}: the kernels are 3x3 with stride 1 or 2, and 1x1"
        )
    if isinstance(padding, str):
        if padding == "same" and not (down % 2 and across % 2):
            return f"{down}x{across} taps and padding 'same', which is not the same on all sides"
        padding = (down // 2, across // 2) if padding == "same" else (0, 0)
    top, left = padding
    border = None if padding_mode == "zeros" or not (top or left) else cast(Border, padding_mode)
    return Geometry(stride[0], (left, left, top, top), border, (down, across))


def misfit(x: Tensor, conv: nn.Conv2d, padding: Padding) -> str | None:
    """Why torch must get these shapes, because it has an answer or an error of its own; None if
    not."""
    if x.ndim != 4:
        return f"x has {x.ndim} dimensions, not 4"
    if not x.numel():
        return "x is empty"
    if x.device != conv.weight.device:
        return f"x is on {x.device}, the weights are on {conv.weight.device}"
    left, right, top, bottom = padding
    if min(padding) < 0:
        return f"a padding of {padding} cuts the picture"
    down, across = conv.kernel_size
    if x.shape[1] != conv.weight.shape[1] or x.shape[2] + top + bottom < down or x.shape[3] + left + right < across:
        return f"an image {list(x.shape[1:])} does not go with a weight {list(conv.weight.shape)}"
    return None


def prepared(x: Tensor, geometry: Geometry) -> tuple[Tensor, Padding]:
    """x as the op reads it, and the zeros around it."""
    if geometry.border is None:
        return as_wanted(x), geometry.padding
    return with_border(x, geometry.padding, geometry.border), (0, 0, 0, 0)


def as_wanted(x: Tensor) -> Tensor:
    """x, or a copy if it is not channels-last or its pixels are at odd addresses."""
    if x.data_ptr() % 16 == 0 and x.is_contiguous(memory_format=torch.channels_last):
        return x
    return x if next(image_obstacles(x=x), None) is None else x.clone(memory_format=torch.channels_last)
