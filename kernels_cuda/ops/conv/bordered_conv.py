"""bordered_conv2d and bordered_upsample_conv2d: convolutions of pictures that go on beyond their edges with pixels of their own.

The maths and the access pattern stand at the head of src/bordered_conv.cu; what torch can do of it are a pass that makes the larger
picture (borders.py), its convolution, and conv's pass behind that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

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
from . import conv_flat, conv_torch
from .borders import border_obstacle, with_border
from .conv import ONE_FRAME, PLAIN, Cuts, Tactic, convolving, cuts_for, kernels_of, picture_obstacles
from .conv_operands import Padding, channels_adjacent, memory_format
from .upsample_conv import check_rest, upsampling
from .upsample_conv import result_shape as upsampled_shape
from .upsample_conv import ways as upsample_ways

Border = Literal["reflect", "replicate"]

BORDERS: tuple[Border, ...] = get_args(Border)  # enum Border
CUTS: dict[int, Cuts] = {1: PLAIN, 2: ((4, 96),)}  # by the stride


def bordered_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    padding: Padding,
    border: Border = "reflect",
    stride: int = 1,
    activation: Activation = "none",
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """activation(3x3 convolution of x with a border of its own pixels + bias).

    x        [b, c, h, w] fp16, channels-last
    weight   [n, c, 3, 3] fp16, in torch.channels_last
    bias     [n], fp16 or fp32
    padding  the border (left, right, top, bottom), each less than the side of x that is reflected
    border   "reflect": without the edge's own pixels; "replicate": those alone
    stride   1 or 2
    Returns [b, n, h', w'] in x's format, rounded once. The larger picture is never stored.
    """
    out: Tensor = BORDERED_CONV((x, weight, bias), (activation, stride, *padding, border), policy)
    return out


def bordered_upsample_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    folded: Tensor | None = None,
    activation: Activation = "none",
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """As `upsample_conv2d`, with a border of one pixel, reflected or replicated, of the larger picture: there both are the same."""
    out: Tensor = BORDERED_UPSAMPLE_CONV((x, weight, bias, folded), (activation,), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def result_shape(x: Tensor, weight: Tensor, stride: int, padding: Padding) -> tuple[int, int, int, int]:
    left, right, top, bottom = padding
    b, _, h, w = x.shape
    return b, weight.shape[0], (h + top + bottom - 3) // stride + 1, (w + left + right - 3) // stride + 1


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: int, *where: Any) -> Tensor:
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    *padding, border = where
    larger = functional.pad(x.to(wide), padding, mode=border)
    value = functional.conv2d(larger, weight.to(wide), None if bias is None else bias.to(wide), stride)
    return activate(value, activation).to(x.dtype, memory_format=memory_format(x))


def stock(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: int, *where: Any) -> Tensor:
    """One pass that makes the larger picture, then torch's convolution."""
    *padding, border = where
    left, right, top, bottom = padding
    larger = with_border(x, (left, right, top, bottom), border)
    value = functional.conv2d(larger, weight, None if bias is None else bias.to(x.dtype), stride)
    return activate(value, activation).contiguous(memory_format=memory_format(x))


def fake(x: Tensor, weight: Tensor, _bias: Tensor | None, _activation: str, stride: int, *where: Any) -> Tensor:
    left, right, top, bottom, _ = where
    shape = result_shape(x, weight, stride, (left, right, top, bottom))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def upsample_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, _folded: Tensor | None, activation: str
) -> Tensor:
    """As `reference`, of the larger picture. From the weight as given: folding is an approximation."""
    larger = functional.interpolate(x, scale_factor=2.0, mode="nearest-exact")
    return reference(larger, weight, bias, activation, 1, 1, 1, 1, 1, "replicate").to(memory_format=memory_format(x))


def upsample_stock(x: Tensor, weight: Tensor, bias: Tensor | None, _folded: Tensor | None, activation: str) -> Tensor:
    """The border is made of the small picture, so the pass over the large one is the upsampling's own."""
    around = functional.interpolate(with_border(x, (1, 1, 1, 1), "replicate"), scale_factor=2.0, mode="nearest-exact")
    value = functional.conv2d(around[:, :, 1:-1, 1:-1], weight, None if bias is None else bias.to(x.dtype))
    return activate(value, activation).contiguous(memory_format=memory_format(x))


def upsample_fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return torch.empty(upsampled_shape(x, weight), dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def validate(call: Call) -> None:
    """Shapes and options that no implementation could serve."""
    x, weight, bias = call.operands
    activation, stride, left, right, top, bottom, border = call.options
    check_one_of("activation", activation, ACTIVATIONS)
    check_one_of("border", border, BORDERS)
    _check_pixels(x, weight)
    check_vector("bias", bias, weight.shape[0])
    if stride < 1 or min(left, right, top, bottom) < 0:
        raise ValueError(f"stride {stride} and padding {[left, right, top, bottom]} make no sense")
    reason = border_obstacle(x, (left, right, top, bottom), border)
    if reason is not None or min(result_shape(x, weight, stride, (left, right, top, bottom))[2:]) < 1:
        raise ValueError(f"x: {reason or f'{list(x.shape)} is smaller than the taps'}")


def upsample_validate(call: Call) -> None:
    x, weight, *_ = call.operands
    _check_pixels(x, weight)
    check_rest(call)


def _check_pixels(x: Tensor, weight: Tensor) -> None:
    if x.ndim != 4 or weight.ndim != 4 or weight.shape[1:] != (x.shape[1], 3, 3) or not x.numel():
        raise ValueError(
            f"x: {list(x.shape)} does not go with the weight {list(weight.shape)}: pixels and [n, c, 3, 3] are expected"
        )


# --------------------------------------------------------------------------------------------------------- the kernel

UNIT = "bordered_conv"


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    x, weight, bias = call.operands
    stride = call.options[1]
    yield from wrong_dtype((torch.float16,), x=x, weight=weight)
    if stride not in CUTS:
        yield f"stride {stride}: the kernels have 1 and 2"
        return
    yield from wrong_dtype((torch.float16, torch.float32), bias=bias)
    yield from picture_obstacles(x, weight, bias, result_shape(x, weight, stride, call.options[2:6]))


def upsample_obstacles(call: Call) -> Iterator[str]:
    x, weight, bias, folded = call.operands
    yield from wrong_dtype((torch.float16,), x=x, weight=weight, folded=folded)
    if folded is None:
        yield "no folded weight was given: make one with fold_upsample(weight)"
        return
    yield from wrong_dtype((torch.float16, torch.float32), bias=bias)
    yield from picture_obstacles(x, folded, bias, upsampled_shape(x, weight))


def ways(call: Call) -> list[Tactic]:
    stride = call.options[1]
    return cuts_for(call.operands[1].shape[0], CUTS[stride], stride == 1, call.policy.sums)


def plan(call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    x, weight, _ = call.operands
    activation, stride, left, _, top, _, border = call.options
    fields = {
        "height": x.shape[2],
        "width": x.shape[3],
        "top": top,
        "left": left,
        "border": BORDERS.index(border),
        "activation": ACTIVATIONS.index(activation),
        **ONE_FRAME,
    }
    name = f"bordered_3x3{'_stride_2' if stride == 2 else ''}_{(tactic or ways(call)[0]).kernel}"
    shape = result_shape(x, weight, stride, call.options[2:6])
    return convolving(call, card, card.kernel(UNIT, name), "x weight bias", shape, fields)


def upsample_plan(call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
    name = f"bordered_2x2_{(tactic or upsample_ways(call)[0]).kernel}"
    return upsampling(call, card, UNIT, name, border=BORDERS.index("replicate"))


# ----------------------------------------------------------------------------------------- torch's, and one pass behind it


def behind(call: Call, larger: Tensor) -> Call:
    """conv's own call of the picture with its border."""
    _, weight, bias = call.operands
    activation, stride = call.options[:2]
    tensors = (larger.unsqueeze(2), weight.unsqueeze(2), bias, None, None)
    return Call("conv", tensors, (activation, 1, 0, stride, 0, 0, 0, 0), call.policy)


def fused_obstacles(call: Call) -> Iterator[str]:
    x = call.first
    left, right, top, bottom = call.options[2:6]
    shape = (*x.shape[:2], x.shape[2] + top + bottom, x.shape[3] + left + right)
    larger = torch.empty(shape, dtype=x.dtype, device="meta", memory_format=torch.channels_last)
    yield from conv_torch.obstacles(behind(call, larger))


def fused_plan(call: Call, card: Card, tactic: object = None) -> Plan:
    x = call.first
    left, right, top, bottom, border = call.options[2:]
    padding = (left, right, top, bottom)
    theirs = conv_torch.plan(behind(call, with_border(x, padding, border)), card, tactic, conv_flat.flat)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        larger = with_border(x, padding, border).unsqueeze(2)
        out: Tensor = theirs(larger, weight.unsqueeze(2), bias, None, None)
        return out.squeeze(2)

    return run


def shape_class(call: Call) -> str:
    """Channels exactly, pixels to a power of two."""
    x, weight, *_ = call.operands
    pixels = round_up(x.shape[0] * x.shape[2] * x.shape[3])
    parts = [word(x), f"{x.shape[1]} to {weight.shape[0]}", f"{pixels} pixels", call.policy.sums, call.options[0]]
    parts += ["last" if channels_adjacent(x) else "first", "bias" if call.tensors[2] is not None else "no bias"]
    if len(call.options) > 1:
        parts += [f"stride {call.options[1]}", call.options[-1]]
    elif call.tensors[3] is None:
        parts.append("unfolded")
    return " ".join(parts)


BORDERED_CONV = Op(
    name="bordered_conv",
    schema=(
        "(Tensor x, Tensor weight, Tensor? bias, str activation, int stride, int left, int right, int top, int bottom, "
        "str border, str policy) -> Tensor"
    ),
    reference=reference,
    fake=fake,
    candidates=(
        CudaCandidate("cuda", obstacles, plan, ways, unit=UNIT),
        StockCandidate(stock, begins=conv_torch.begins),
        CudaCandidate("cudnn + fused pass", fused_obstacles, fused_plan, ours=False, begins=conv_torch.begins),
    ),
    shape_class=shape_class,
    validate=validate,
    kernels={
        UNIT: (
            *(f"bordered_3x3_{tactic}" for tactic in kernels_of(CUTS[1])),
            "bordered_3x3_thin_precise",
            *(f"bordered_3x3_stride_2_{tactic}" for tactic in kernels_of(CUTS[2])),
        ),
        conv_torch.UNIT: ("conv_rest",),
    },
)

BORDERED_UPSAMPLE_CONV = Op(
    name="bordered_upsample_conv",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? folded, str activation, str policy) -> Tensor",
    reference=upsample_reference,
    fake=upsample_fake,
    candidates=(
        CudaCandidate("cuda", upsample_obstacles, upsample_plan, upsample_ways),
        StockCandidate(upsample_stock, begins=conv_torch.begins),
    ),
    shape_class=shape_class,
    validate=upsample_validate,
    kernels={UNIT: tuple(f"bordered_2x2_{tactic}" for tactic in kernels_of(PLAIN))},
)
