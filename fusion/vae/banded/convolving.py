"""The operations that look sideways: convolutions, padding, upsampling."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..bands import Span
from .rules import LIGHT, aten, moving, rule, run
from .tensor import Banded, Unreadable


@rule(aten.convolution)
def convolution(
    func: Any,
    x: Banded,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *others: Any,
) -> Banded:
    """Rows of which all inputs are there. Zeros lie at the edges of the picture, not of a band."""
    assert x.axis is not None
    side = x.axis - 2
    if side < 0:
        raise Unreadable("a convolution is over its samples")
    if transposed:
        return _transposed(func, x, weight, bias, stride, padding, dilation, *others)
    step, zeros = stride[side % len(stride)], padding[side % len(padding)]
    reach = (weight.shape[x.axis] - 1) * dilation[side % len(dilation)] + 1
    whole = (x.whole + 2 * zeros - reach) // step + 1
    first, last = _made(x, step, zeros, reach, whole)
    low, high = first * step - zeros, (last - 1) * step - zeros + reach
    above, below = max(0, -low), max(0, high - x.whole)
    entered = x.part((max(0, low), min(x.whole, high)))
    around = list(padding) if len(padding) > 1 else list(padding) * (x.ndim - 2)
    too_many = 0
    if above and below and above == below == zeros:
        pass
    elif (above or below) and step == 1:
        # The convolution pads both sides. The rows that it makes of zeros at the cut are dropped.
        too_many = zeros
    else:
        around[side] = 0
        if above or below:
            behind = x.ndim - 1 - x.axis
            entered = F.pad(entered, [0, 0] * behind + [above, below])
    made = run(func, x, entered, weight, bias, stride, around, dilation, transposed, *others)
    if too_many:
        made = made.narrow(x.axis, 0 if above else made.shape[x.axis] - (last - first), last - first)
    return x.like(made, x.axis, (first, last), whole)


def _transposed(
    func: Any, x: Banded, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, more: Any, groups: int
) -> Banded:
    """Rows to which no other band's rows add. more: rows behind the last, which torch calls output padding."""
    assert x.axis is not None
    side = x.axis - 2
    step, cut = stride[side % len(stride)], padding[side % len(padding)]
    reach = (weight.shape[x.axis] - 1) * dilation[side % len(dilation)] + 1
    whole = (x.whole - 1) * step - 2 * cut + reach + more[side % len(more)]
    low, high = x.span
    first = 0 if low == 0 else low * step + max(0, reach - step) - cut
    last = whole if high == x.whole else high * step - max(0, step - reach) - cut
    if first >= last:
        raise Unreadable("the bands are too narrow")
    around = list(padding) if len(padding) > 1 else list(padding) * (x.ndim - 2)
    around[side] = 0
    made = run(func, x, x.held, weight, bias, stride, around, dilation, True, more, groups)
    return x.like(made.narrow(x.axis, first - (low * step - cut), last - first), x.axis, (first, last), whole)


@rule(aten.cudnn_convolution)
def cudnn_convolution(
    func: Any, x: Banded, weight: Tensor, padding: Any, stride: Any, dilation: Any, *others: Any, **options: Any
) -> Any:
    """The same by another name: stock calls it around a fault of cuDNN's."""

    def convolve(entered: Tensor, weight: Tensor, _bias: None, stride: Any, around: Any, dilation: Any, *_: Any) -> Any:
        return func(entered, weight, around, stride, dilation, *others, **options)

    return convolution(convolve, x, weight, None, stride, padding, dilation, False, [0] * len(padding), others[0])


def _made(x: Banded, step: int, zeros: int, reach: int, whole: int) -> Span:
    low, high = x.span
    first = 0 if low == 0 else -(-(low + zeros) // step)
    last = whole if high == x.whole else (high + zeros - reach) // step + 1
    if first >= last:
        raise Unreadable("the bands are too narrow")
    return first, last


@rule(
    aten.constant_pad_nd, aten.reflection_pad2d, aten.reflection_pad3d, aten.replication_pad2d, aten.replication_pad3d
)
def pad(func: Any, x: Banded, around: Any, *others: Any) -> Banded:
    """More rows at the edges of the picture."""
    assert x.axis is not None
    behind = x.ndim - 1 - x.axis
    around = list(around)
    if 2 * behind >= len(around):
        return x.like(run(func, x, x.held, around, *others), x.axis, x.span, x.whole)
    above, below = around[2 * behind : 2 * behind + 2]
    if above < 0 or below < 0:
        raise Unreadable("it pads by less than nothing")
    low, high = x.span
    at_first, at_last = low == 0, high == x.whole
    around[2 * behind : 2 * behind + 2] = above * at_first, below * at_last
    made = run(func, x, x.held, around, *others)
    span = low + above * (not at_first), high + above + below * at_last
    return x.like(made, x.axis, span, x.whole + above + below)


@moving(aten.pad)
def padded(x: Banded, around: Any, mode: str = "constant", value: float | None = None) -> Banded:
    """Padding of any kind, before torch chooses the operation for it."""
    if mode == "constant":
        return pad(aten.constant_pad_nd.default, x, around, value or 0.0)
    chosen = {("reflect", 4): aten.reflection_pad2d, ("reflect", 6): aten.reflection_pad3d}
    chosen |= {("replicate", 4): aten.replication_pad2d, ("replicate", 6): aten.replication_pad3d}
    packet = chosen.get((mode, len(around)))
    if packet is None:
        raise Unreadable(f"it pads with {mode}")
    return pad(packet.default, x, around)


UPSAMPLING = (
    *(aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d),
    *(aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d),
)
LIGHT.update(UPSAMPLING)


@rule(*UPSAMPLING)
def upsample(func: Any, x: Banded, size: Any, *scales: Any) -> Banded:
    """Nearest values, by whole factors, for which both kinds of them are the same."""
    assert x.axis is not None
    by_factors = size is None or (scales and isinstance(scales[0], list))
    side = x.axis - 2
    wanted = [int(n * f) for n, f in zip(x.shape[2:], scales[0], strict=True)] if by_factors else list(size)
    factor, rest = divmod(wanted[side], x.whole)
    if rest or factor < 1:
        raise Unreadable("it resizes by a broken factor")
    sizes = list(wanted)
    sizes[side] = factor * x.held.shape[x.axis]
    packet = func.overloadpacket
    made = run(packet.default, x, x.held, sizes)
    return x.like(made, x.axis, (factor * x.span[0], factor * x.span[1]), wanted[side])
