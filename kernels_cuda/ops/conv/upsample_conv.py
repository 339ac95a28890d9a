"""upsample_conv2d: a nearest 2x upsampling and the 3x3 convolution behind it, in one kernel.

The maths stands at the head of src/conv.cu: each of the four phases of the result (odd and even, of rows and columns) is
a 2x2 convolution of x, whose weights are sums of the given ones (`fold_upsample`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan, round_up
from ...launcher import Card
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..matmul.linear import Activation
from ..matmul.linear_operands import ACTIVATIONS, activate
from ..views.checks import check_one_of, check_vector, word, wrong_dtype
from . import conv_torch
from .conv import ONE_FRAME, PLAIN, Tactic, convolving, cuts_for, kernels_of, output_in_format, picture_obstacles
from .conv_operands import channels_adjacent, memory_format


def upsample_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    folded: Tensor | None = None,
    activation: Activation = "none",
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """activation(3x3 convolution of the nearest 2x upsampling of x + bias), with a border of zeros.

    x       [b, c, h, w] fp16, channels-last
    weight  [n, c, 3, 3] fp16
    bias    [n], fp16 or fp32
    folded  `fold_upsample(weight)`, made once; without it only stock's computation can serve
    Returns [b, n, 2 h, 2 w] in x's format, rounded once. The upsampled image is never stored.
    """
    out: Tensor = UPSAMPLE_CONV((x, weight, bias, folded), (activation,), policy)
    return out


def fold_upsample(weight: Tensor) -> Tensor:
    """[n, c, 3, 3] -> [4 n, c, 2, 2] in torch.channels_last: the weights of phases (even, even), (even, odd) columns, ...

    An even row 2 y of the result sees, of the input, row y - 1 through its first tap and row y through both others; an
    odd one row y through its first two and row y + 1 through the last. Summed in fp32, rounded to weight's dtype.
    """

    def taps(t: Tensor, dim: int) -> Tensor:
        """first, first + middle, middle + last, last: of each tap both phases. Few launches: for a small VAE they are the time."""
        sums = t.narrow(dim, 0, 2) + t.narrow(dim, 1, 2)
        return torch.cat((t.narrow(dim, 0, 1), sums, t.narrow(dim, 2, 1)), dim)

    n, c = weight.shape[:2]
    both = taps(taps(weight.float(), 2), 3).reshape(n, c, 2, 2, 2, 2)  # n, c, tap and phase of rows, of columns
    folded = torch.empty(4 * n, c, 2, 2, dtype=weight.dtype, device=weight.device, memory_format=torch.channels_last)
    folded.view(2, 2, n, c, 2, 2).copy_(both.permute(3, 5, 0, 1, 2, 4))
    return folded


# ---------------------------------------------------------------------------------------------------------- the maths


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    larger = functional.interpolate(x, scale_factor=2.0, mode="nearest-exact")
    return activate(functional.conv2d(larger, weight, bias, padding=1), activation)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, _folded: Tensor | None, activation: str) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64. From the weight as given: folding is an approximation."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.numel() or not weight.numel():
        value = x.new_zeros(result_shape(x, weight), dtype=wide)
        value = activate(value if bias is None else value + bias.to(wide).reshape(-1, 1, 1), activation)
    else:
        value = _convolve(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide), activation)
    return value.to(x.dtype, memory_format=memory_format(x))


def stock(x: Tensor, weight: Tensor, bias: Tensor | None, _folded: Tensor | None, activation: str) -> Tensor:
    """What stock runs: nn.Upsample, then Conv2d."""
    value = _convolve(x, weight, None if bias is None else bias.to(x.dtype), activation)
    return value.contiguous(memory_format=memory_format(x))


def fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return torch.empty(result_shape(x, weight), dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def result_shape(x: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    b, _, h, w = x.shape
    return b, weight.shape[0], 2 * h, 2 * w


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    x, weight, *_ = call.operands
    if x.ndim != 4 or weight.ndim != 4 or weight.shape[1:] != (x.shape[1], 3, 3):
        raise ValueError(
            f"x: {list(x.shape)} does not go with the weight {list(weight.shape)}: [n, c, 3, 3] is expected"
        )
    check_rest(call)


def check_rest(call: Call) -> None:
    """Check activation, bias and the folded weight, where the pixels go with the weight."""
    _, weight, bias, folded = call.operands
    check_one_of("activation", call.options[0], ACTIVATIONS)
    n, c = weight.shape[:2]
    check_vector("bias", bias, n)
    if folded is not None and folded.shape != (4 * n, c, 2, 2):
        raise ValueError(f"folded: {list(folded.shape)} is not fold_upsample(weight)'s {[4 * n, c, 2, 2]}")


# --------------------------------------------------------------------------------------------------------- the kernel


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    x, weight, bias, folded = call.operands
    yield from wrong_dtype((torch.float16,), x=x, weight=weight, folded=folded)
    yield from wrong_dtype((torch.float16, torch.float32), bias=bias)
    if not x.numel() or not weight.numel():
        if weight.shape[0] and min(result_shape(x, weight)) > 0:
            yield "there are no channels to add up"
        return
    if folded is None:
        yield "no folded weight was given: make one with fold_upsample(weight)"
        return
    yield from picture_obstacles(x, folded, bias, result_shape(x, weight))


def ways(call: Call) -> list[Tactic]:
    return cuts_for(call.operands[1].shape[0], PLAIN, False, call.policy.sums)


def plan(call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    x, weight, *_ = call.operands
    if not x.numel() or not weight.numel():
        new_out = output_in_format(result_shape(x, weight), memory_format(x), card)
        return lambda *_: new_out()
    return upsampling(call, card, "conv", f"conv_2x2_{(tactic or ways(call)[0]).kernel}")


def upsampling(call: Call, card: Card, unit: str, name: str, **fields: int) -> Plan:
    """The plan of this kernel, which begins a pixel further up and left: of odd rows and columns."""
    x, weight, *_ = call.operands
    activation = ACTIVATIONS.index(call.options[0])
    fields |= {"height": x.shape[2], "width": x.shape[3], "top": 1, "left": 1, "activation": activation, **ONE_FRAME}
    return convolving(call, card, card.kernel(unit, name), "x - bias weight", result_shape(x, weight), fields, 4)


def shape_class(call: Call) -> str:
    """Channels exactly, pixels to a power of two."""
    x, weight, _, folded = call.operands
    b, n, h, w = result_shape(x, weight)
    pixels = round_up(b * h * w)
    parts = [word(x), f"{x.shape[1]} to {n}", f"{pixels} pixels", call.policy.sums, call.options[0]]
    parts.append("last" if channels_adjacent(x) else "first")
    return " ".join([*parts, "unfolded"] if folded is None else parts)


UPSAMPLE_CONV = Op(
    name="upsample_conv2d",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? folded, str activation, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan, ways), StockCandidate(stock, begins=conv_torch.begins)),
    shape_class=shape_class,
    validate=validate,
    kernels={"conv": tuple(f"conv_2x2_{tactic}" for tactic in kernels_of(PLAIN))},
)
