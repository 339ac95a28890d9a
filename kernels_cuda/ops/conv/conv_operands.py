"""The operands of conv by name, the checks of their shapes, the maths, and what stock runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Options, Tensors
from ..matmul.linear_operands import ACTIVATIONS, activate
from ..views.checks import check_one_of, check_result, check_vector
from ..views.half_range import in_type

Padding = tuple[int, int, int, int]  # left, right, top, bottom


@dataclass(frozen=True)
class Operands:
    """The tensors and options of a call, by name."""

    x: Tensor  # [b, c, t, h, w]
    weight: Tensor  # [n, c, taps of time, taps down, taps across]
    bias: Tensor | None
    cache: Tensor | None  # the frames just before x
    residual: Tensor | None
    activation: str
    time_stride: int
    before: int  # frames that the first result sees before x: the cached ones, and before them zeros
    stride: int  # of rows and columns
    padding: Padding

    @staticmethod
    def of(tensors: Tensors, options: Options) -> Operands:
        *asked, left, right, top, bottom = options
        return Operands(*tensors, *asked, (left, right, top, bottom))  # type: ignore[call-arg, arg-type]

    @staticmethod
    def of_call(call: Call) -> Operands:
        return Operands.of(call.tensors, call.options)

    @property
    def cached(self) -> int:
        return 0 if self.cache is None else self.cache.shape[2]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of the result: [b, n, t, h, w]."""
        b, _, t, h, w = self.x.shape
        n, _, *taps = self.weight.shape
        left, right, top, bottom = self.padding
        frames, rows, columns = t + self.before, h + top + bottom, w + left + right
        return (
            b,
            n,
            (frames - taps[0]) // self.time_stride + 1,
            (rows - taps[1]) // self.stride + 1,
            (columns - taps[2]) // self.stride + 1,
        )


def channels_adjacent(x: Tensor) -> bool:
    """Whether x [b, c, ...] is channels-last, be it a part of something larger."""
    return x.shape[1] == 1 or x.stride(1) == 1


def is_one_pixel(residual: Tensor) -> bool:
    """Whether a residual [b, n, t, h, w] is one pixel for each of a batch, expanded: next to nothing to read."""
    steps = zip(residual.shape[2:], residual.stride()[2:], strict=True)
    return channels_adjacent(residual) and all(size == 1 or step == 0 for size, step in steps)


def last_format(t: Tensor) -> torch.memory_format:
    """Channels-last for t's rank."""
    return torch.channels_last_3d if t.ndim == 5 else torch.channels_last


def memory_format(x: Tensor) -> torch.memory_format:
    """The format of a result: x's, where it has one of the two."""
    return last_format(x) if channels_adjacent(x) else torch.contiguous_format


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    o = Operands.of_call(call)
    check_one_of("activation", o.activation, ACTIVATIONS)
    if o.x.ndim != 5 or o.weight.ndim != 5 or o.x.shape[1] != o.weight.shape[1]:
        raise ValueError(f"x: {list(o.x.shape)} does not go with the weight {list(o.weight.shape)}")
    if min(o.time_stride, o.stride) < 1 or min(o.before, *o.padding) < 0:
        raise ValueError(f"strides {o.time_stride}, {o.stride} and padding {o.before}, {o.padding} make no sense")
    if o.cache is not None:
        b, c, _, h, w = o.x.shape
        if o.cache.ndim != 5 or (*o.cache.shape[:2], *o.cache.shape[3:]) != (b, c, h, w):
            raise ValueError(f"cache: {list(o.cache.shape)} is not frames of x's {list(o.x.shape)}")
        if o.cached > o.before:
            raise ValueError(f"cache: {o.cached} frames, and the first result sees {o.before} before x")
    if min(o.shape[2:]) < 1 and o.x.numel():
        raise ValueError(f"x: {list(o.x.shape)} is smaller than the weight's taps {list(o.weight.shape[2:])}")
    check_vector("bias", o.bias, o.weight.shape[0])
    check_result("residual", o.residual, o.shape)


def _all_frames(o: Operands, x: Tensor, cache: Tensor | None) -> Tensor:
    """The frames that results see: zeros, the cache, x."""
    b, c, _, h, w = x.shape
    parts = [x.new_zeros(b, c, o.before - o.cached, h, w), cache, x]
    present = [part for part in parts if part is not None and part.shape[2]]
    return torch.cat(present, 2) if len(present) > 1 else x


def compute(o: Operands) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(o.x.dtype, torch.float32)
    x, weight, bias, cache, residual = in_type(wide, o.x, o.weight, o.bias, o.cache, o.residual)
    value: Tensor
    if not o.x.numel() or not o.weight.numel():
        value = x.new_zeros(o.shape)
        value = value if bias is None else value + bias.reshape(-1, 1, 1, 1)
    else:
        padded = functional.pad(_all_frames(o, x, cache), o.padding)
        value = functional.conv3d(padded, weight, bias, (o.time_stride, o.stride, o.stride))
    value = activate(value, o.activation)
    if residual is not None:
        value = residual + value
    return value.to(o.x.dtype, memory_format=memory_format(o.x))


def convolved(o: Operands) -> Tensor:
    """torch's convolution of the frames concatenated, with its bias where it has one."""
    weight, before = o.weight, o.before
    if o.cache is None and o.x.shape[2] == 1 and before == weight.shape[2] - 1:
        weight, before = weight[:, :, -1:], 0  # stock's own way round a pile of zeros
    x = _all_frames(o, o.x, o.cache) if before else o.x
    left, right, top, bottom = o.padding
    if (left, top) == (right, bottom):
        padding = (top, left)
    else:
        x, padding = functional.pad(x, o.padding), (0, 0)
    bias = None if o.bias is None else o.bias.to(x.dtype)
    return functional.conv3d(x, weight, bias, (o.time_stride, o.stride, o.stride), (0, *padding))


def stock_compute(o: Operands) -> Tensor:
    """What stock runs: torch's convolution, then one operation after the other."""
    value = activate(convolved(o), o.activation)
    if o.residual is not None:
        value = value + o.residual
    return value.contiguous(memory_format=memory_format(o.x))
