"""Folds a batch norm into the weights of the convolution before it, as the conv op reads them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.conv.conv import fold_batch_norm, weight_obstacles
from ..ops.views.checks import bias_obstacles, word

HALF_STEP = 2.0**-11  # half a unit in the last place of fp16, relative
SMALLEST = 2.0**-25  # half of fp16's smallest step, absolute


class Own(Enum):
    """Kept if the op reads the convolution's own weight and bias, so that nothing holds on to their
    memory."""

    WEIGHTS = "weights"


class Folded(NamedTuple):
    """Weight [n, c, ...] fp16 in torch.channels_last and bias [n], with the norm in them. ours:
    whether they are no parameters of the model."""

    weight: Tensor
    bias: Tensor | None
    ours: bool


def foldable(conv: nn.Conv2d, norm: nn.BatchNorm2d | None) -> str | None:
    """Why parameters and statistics cannot be folded, by their types and devices; None if they
    can."""
    named: dict[str, Tensor | None] = {"conv.weight": conv.weight, "conv.bias": conv.bias}
    if norm is not None:
        names = ("weight", "bias", "running_mean", "running_var")
        named |= {f"norm.{name}": getattr(norm, name) for name in names}
    for name, t in named.items():
        if t is None:
            continue
        if type(t) not in (Tensor, nn.Parameter):
            return f"{name} is a {type(t).__name__}, not a plain tensor"
        types = (torch.float16,) if name.startswith("conv.") else (torch.float16, torch.float32)
        if t.dtype not in types:
            return f"{name} is {word(t)}, the kernels take {' and '.join(map(word, types))}"
        if t.device != conv.weight.device:
            return f"{name} is on {t.device}, conv.weight on {conv.weight.device}"
    return None


def fold(conv: nn.Conv2d, norm: nn.BatchNorm2d | None, before: Folded | Own | str | None) -> Folded | str:
    """The weights for the op, or why there are none. Made in the memory of those before them, if
    there are any, because a CUDA graph recorded over that memory then goes on with the new
    weights."""
    # Never in inference mode, because what is kept may be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        new = laid_out(conv.weight, conv.bias) if norm is None else folded_norm(conv, norm)
        if isinstance(new, str) or not isinstance(before, Folded) or not (new.ours and before.ours):
            return new
        if (new.weight.shape, new.weight.device) != (before.weight.shape, before.weight.device):
            return new
        before.weight.copy_(new.weight)
        # then the bias is the convolution's own
        if norm is None or new.bias is None or before.bias is None:
            return before._replace(bias=new.bias)
        before.bias.copy_(new.bias)
        return before


def laid_out(weight: Tensor, bias: Tensor | None) -> Folded:
    """A convolution's own weight and bias, copied only if the op cannot read them as they are."""
    ours = next(weight_obstacles(weight), None) is not None
    bias = bias if bias is None or next(bias_obstacles(bias), None) is None else bias.clone()
    return Folded(weight.clone(memory_format=torch.channels_last) if ours else weight, bias, ours)


def folded_norm(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Folded | str:
    """The norm in the convolution's weight, rounded to fp16 once, and in its bias, fp32."""
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None and variance is not None
    # The norm has neither without `affine`.
    scale = torch.ones_like(variance) if norm.weight is None else norm.weight
    shift = torch.zeros_like(mean) if norm.bias is None else norm.bias
    exact, bias = fold_batch_norm(conv.weight.float(), conv.bias, scale, shift, mean, variance, norm.eps)
    weight = exact.to(torch.float16, memory_format=torch.channels_last)
    lost = worse_than_rounding(weight, exact, bias)
    if lost:
        return f"with the norm folded into them, the weights of channel {lost[0]} do not fit float16"
    return Folded(weight, bias, ours=True)


def worse_than_rounding(weight: Tensor, exact: Tensor, bias: Tensor) -> list[int]:
    """The channels whose folded weights overflow fp16, or underflow so far that the result would
    show it.

    Rounding alone costs half a step of the weights' norm. The result adds its own rounding of the
    offset. Beside that, for an image of unit variance, a loss in the weights of a channel that is
    almost off does not show. Waits for the device, once for each folding.
    """
    error = (weight.float() - exact).flatten(1).norm(dim=1)
    allowed = 2 * HALF_STEP * exact.flatten(1).norm(dim=1) + HALF_STEP * bias.abs() + SMALLEST
    # negated, so that NaN is found too
    found: list[int] = (~(error <= allowed)).nonzero().flatten().tolist()
    return found
