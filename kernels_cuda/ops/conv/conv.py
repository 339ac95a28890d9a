"""conv3d and conv2d: a convolution and what is done to its result, over channels-last images and videos.

The maths, the layout and the access pattern stand at the head of src/conv.cu; the operands and what stock runs in
conv_operands.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int, c_int64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...call import Call, Plan, by_name, round_up
from ...launcher import MAX_GRID, Card, Kernel, Pointer, output, parameter_struct
from ...plans import floats, plan_of, strides
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..matmul.linear import Activation
from ..matmul.linear_operands import ACTIVATIONS
from ..views.checks import bias_obstacles, word, wrong_dtype
from . import conv_flat, conv_torch
from .conv_operands import (
    Operands,
    Padding,
    channels_adjacent,
    compute,
    is_one_pixel,
    last_format,
    memory_format,
    stock_compute,
    validate,
)

PACK = 8  # elements of an access: channels are brought to a multiple, and strides are multiples
PATCH = 16  # kPatchPixels: of an image row that a block computes
MOST = 2**31 - 2**20  # elements of a frame, its strides included
THIN = 16  # results' channels up to which `thin` serves

# What a block computes: image rows by channels. 8x128 is for float sums alone: with half sums it would spill.
Cuts = tuple[tuple[int, int], ...]
PLAIN: Cuts = ((16, 96), (8, 96))
PRECISE_ONLY = (8, 128)
# Taps of the image, their stride -> cuts, best known first.
CUTS: dict[tuple[tuple[int, int], int], Cuts] = {
    ((3, 3), 1): (*PLAIN, PRECISE_ONLY),
    ((3, 3), 2): ((4, 96),),
    ((1, 1), 1): PLAIN,
}
THIN_TAPS = ((3, 3), (1, 1))


def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cache: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation = "none",
    time_stride: int = 1,
    before: int | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """residual + activation(causal convolution of x + bias), each part optional; rows and columns padded by zeros.

    x         [b, c, t, h, w] fp16, channels-last, or frames of such a tensor
    weight    [n, c, taps, 3, 3] or [n, c, taps, 1, 1] fp16, in torch.channels_last_3d
    bias      [n], fp16 or fp32
    cache     [b, c, frames, h, w], the frames just before x, read where they are
    residual  [b, n, t, h, w] fp16, channels-last
    before    frames that the first result sees before x, taps - 1 unless given; those that are not cached are zeros
    Returns [b, n, (t + before - taps) // time_stride + 1, h, w] in x's format, rounded once. No workspace, no copies
    of x, unless c is no multiple of 8: then x and weight are padded to one.
    """
    taps, down, across = weight.shape[2:]
    before = taps - 1 if before is None else before
    options = (activation, time_stride, before, 1, across // 2, across // 2, down // 2, down // 2)
    out: Tensor = CONV((x, weight, bias, cache, residual), options, policy)
    return out


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: Padding | None = None,
    residual: Tensor | None = None,
    activation: Activation = "none",
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """residual + activation(convolution of x + bias), each part optional.

    x         [b, c, h, w] fp16, channels-last
    weight    [n, c, 3, 3] or [n, c, 1, 1] fp16, in torch.channels_last. A batch norm behind the convolution belongs in
              weight and bias: see `fold_batch_norm`
    stride    1 or 2
    padding   zeros (left, right, top, bottom); unless given, half the taps on each side, and (0, 1, 0, 1) for a stride
              of 2, as autoencoders do it
    residual  like the result, or one pixel of it for each batch, expanded: it is read where it lies
    Returns [b, n, h', w'] in x's format, rounded once.
    """
    if padding is None:
        down, across = weight.shape[2] // 2, weight.shape[3] // 2
        padding = (across, across, down, down) if stride == 1 else (0, across, 0, down)
    tensors = [t.unsqueeze(2) for t in (x, weight)]
    with_residual = None if residual is None else residual.unsqueeze(2)
    out: Tensor = CONV((*tensors, bias, None, with_residual), (activation, 1, 0, stride, *padding), policy)
    return out.squeeze(2)


def fold_batch_norm(
    weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution that has the batch norm behind it in them. Computed in fp32.

    weight [n, ...]; bias, scale, shift, mean, variance [n]. Returns them in weight's dtype and format, bias in fp32.
    """
    factor = scale.float() * (variance.float() + eps).rsqrt()
    spread = factor.reshape(-1, *[1] * (weight.ndim - 1))
    offset = -mean.float() if bias is None else bias.float() - mean.float()
    return (weight.float() * spread).to(weight.dtype), offset * factor + shift.float()


# --------------------------------------------------------------------------------------------------------- the kernel

ConvParams = parameter_struct(
    "ConvParams",
    (Pointer, "x cache weight bias residual out"),
    (c_int64, "x_batch x_frame cache_batch cache_frame residual_batch residual_frame out_batch out_frame"),
    (c_int, "x_row x_pixel cache_row cache_pixel residual_row residual_pixel out_row out_pixel"),
    (c_int, "height width out_height out_width top left channels n"),
    (c_int, "time_taps time_step before cached frames activation bias_is_float border"),
)


@dataclass(frozen=True)
class Tactic:
    """The cut, and how the tensor cores accumulate."""

    cut: str
    precision: str

    def __str__(self) -> str:
        return f"{self.cut} {self.precision}"

    @property
    def kernel(self) -> str:
        """What follows the taps in a kernel's name."""
        return f"{self.cut}_{self.precision}"


def taps_of(o: Operands) -> tuple[int, int]:
    return o.weight.shape[3], o.weight.shape[4]


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call. Later checks rely on earlier ones having passed."""
    o = Operands.of_call(call)
    yield from wrong_dtype((torch.float16,), x=o.x, weight=o.weight, cache=o.cache, residual=o.residual)
    yield from wrong_dtype((torch.float16, torch.float32), bias=o.bias)
    if not o.x.numel() or not o.weight.numel():
        if o.weight.shape[0] and min(o.shape) > 0:
            yield "there are no channels to add up"
        return
    if (taps_of(o), o.stride) not in CUTS:
        down, across = taps_of(o)
        yield f"{down}x{across} taps with stride {o.stride}: the kernels are 3x3 with stride 1 or 2, and 1x1"
    yield from image_obstacles(x=o.x, cache=o.cache, residual=o.residual)
    yield from picture_obstacles(o.x, o.weight, o.bias, o.shape)


def picture_obstacles(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Iterator[str]:
    """Places of x, of the weight that is read and of the bias that do not serve; too large results."""
    yield from image_obstacles(x=x)
    if math.prod(x.shape[-2:]) * _wide(x.shape[1]) > MOST and x.shape[1] % PACK:
        yield f"x: a frame with {_wide(x.shape[1])} channels, as it is read, spans more than {MOST} elements"
    yield from weight_obstacles(weight)
    yield from bias_obstacles(bias)
    b, n, *frames, h, w = shape
    if b * math.prod(frames) > MAX_GRID[1] or max(weight[0].numel(), h * w * n) > MOST:
        yield f"a result of {list(shape)} exceeds a grid"


def image_obstacles(**tensors: Tensor | None) -> Iterator[str]:
    """Tensors [b, c, .., h, w] that are not channels-last, or cannot be read 16 bytes at a time."""
    for name, t in tensors.items():
        if t is None or not t.numel():
            continue
        steps = [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
        if not channels_adjacent(t):
            yield f"{name} is not channels-last (strides {t.stride()})"
        elif t.shape[1] % PACK == 0 and (t.data_ptr() % 16 or any(s % PACK for s in steps if s != 1)):
            yield f"{name}: pixels do not start at multiples of 16 bytes (strides {t.stride()})"
        elif sum((size - 1) * stride for size, stride in zip(t.shape[-2:], t.stride()[-2:], strict=True)) > MOST:
            yield f"{name}: a frame spans more than {MOST} elements"


def weight_obstacles(weight: Tensor) -> Iterator[str]:
    last = last_format(weight)
    if not weight.is_contiguous(memory_format=last) or weight.data_ptr() % 16:
        yield f"weight is not in {last}"


def ways(call: Call) -> list[Tactic]:
    """Half sums are an offer: where the card's fp32 sums are as quick, it may lose."""
    o = Operands.of_call(call)
    thin = taps_of(o) in THIN_TAPS and o.stride == 1
    return cuts_for(o.shape[1], CUTS[taps_of(o), o.stride], thin, call.policy.sums)


def cuts_for(n: int, cuts: Cuts, thin: bool, precision: str) -> list[Tactic]:
    """Tactics, best known first: few channels are served by `thin`, else what leaves the fewest computed in vain."""
    if thin and n <= THIN:
        return [Tactic("thin", "precise")]
    order = sorted(cuts, key=lambda cut: -(-n // cut[1]) * cut[1])  # sorted keeps the order of ties
    ways = [(cut, each) for each in dict.fromkeys((precision, "precise")) for cut in order]
    return [Tactic(f"{cut[0]}x{cut[1]}", each) for cut, each in ways if cut != PRECISE_ONLY or each == "precise"]


def plan(call: Call, card: Card, tactic: Tactic | None = None) -> Plan:
    """Fix sizes, strides, grid and kernel; what remains per call is the output and the pointers."""
    o = Operands.of_call(call)
    names = "x weight bias cache residual"
    if not o.x.numel() or not o.weight.numel():
        return plan_of((), names, call.tensors, out=output_in_format(o.shape, memory_format(o.x), card))
    out = torch.empty(o.shape, device="meta", memory_format=memory_format(o.x))
    cache, residual = (o.x if o.cache is None else o.cache), (out if o.residual is None else o.residual)
    left, _, top, _ = o.padding
    fields = {
        "height": o.x.shape[3],
        "width": o.x.shape[4],
        "top": top,
        "left": left,
        "time_taps": o.weight.shape[2],
        "time_step": o.time_stride,
        "before": o.before,
        "cached": o.cached,
        "frames": o.shape[2],
        "activation": ACTIVATIONS.index(o.activation),
        **strides(IMAGE, cache=widened_place(cache), residual=residual),
    }
    kernel = card.kernel("conv", kernel_name(o, tactic or ways(call)[0]))
    return convolving(call, card, kernel, names, o.shape, fields)


IMAGE = "batch - frame row pixel"  # dimensions of [b, c, t, h, w], by their strides in the struct
ONE_FRAME = {"time_taps": 1, "time_step": 1, "frames": 1}  # fields of a picture


def convolving(
    call: Call, card: Card, kernel: Kernel, names: str, shape: tuple[int, ...], fields: dict[str, Any], phases: int = 1
) -> Plan:
    """The plan of a convolution by one of the kernels that take ConvParams.

    names   the pointers of the call's tensors, the first of which is x, and the third the bias
    shape   of the result: [b, n, t, h, w] or [b, n, h, w]
    fields  of the struct, but for what follows from these and from where x lies
    phases  4 where x is upsampled: odd and even rows and columns of the result, each a convolution
    """
    x, _, bias, *_ = call.operands
    b, n, *frames, height, width = shape
    height, width = (height, width) if phases == 1 else (height // 2, width // 2)
    seen, last = widened_place(x), memory_format(x)
    images = [
        t if t.ndim == 5 else t.unsqueeze(2) for t in (seen, torch.empty(shape, device="meta", memory_format=last))
    ]
    params = ConvParams(
        out_height=height,
        out_width=width,
        channels=seen.shape[1],
        n=n,
        **strides(IMAGE, x=images[0], out=images[1]),
        **floats(bias=bias),
        **fields,
    )
    rows, columns, threads, shared_bytes = kernel.cut
    tiles = -(-n // columns) * -(-width // PATCH) * -(-height // rows)
    grid = (tiles, b * math.prod(frames), phases)
    launch = kernel.prepare(params, grid=grid, block=threads, shape=call.describe(), shared_bytes=shared_bytes)
    run = plan_of(launch, names, call.tensors, out=output_in_format(shape, last, card))
    if seen is x:
        return run
    wider = {i for i, name in enumerate(names.split()) if name in ("x", "weight", "cache")}
    return lambda *tensors: run(*(widened(t) if i in wider else t for i, t in enumerate(tensors)))


def widened_place(t: Tensor) -> Tensor:
    """t, or if its channels are no multiple of 8 what `widened` will make of it, without numbers."""
    return widened(t.to("meta")) if t.shape[1] % PACK else t


def widened(t: Any) -> Any:
    """[.., c, ...] with zero channels up to a multiple of 8, channels-last. None stays."""
    if t is None:
        return None
    b, c, *image = t.shape
    wide = torch.empty(b, _wide(c), *image, dtype=t.dtype, device=t.device, memory_format=last_format(t))
    wide[:, :c] = t
    wide[:, c:] = 0
    return wide


def _wide(channels: int) -> int:
    return -(-channels // PACK) * PACK


def output_in_format(shape: tuple[int, ...], last: torch.memory_format, card: Card) -> Callable[[], Tensor]:
    """A maker of tensors of this shape, channels-last or contiguous."""
    strides = torch.empty(shape, device="meta", memory_format=last).stride()
    flat = output((torch.Size(shape).numel(),), torch.float16, card.index)
    return lambda: flat().as_strided(shape, strides)


def kernel_name(o: Operands, tactic: Tactic) -> str:
    down, across = taps_of(o)
    return f"conv_{down}x{across}{'_stride_2' if o.stride == 2 else ''}_{tactic.kernel}"


def shape_class(call: Call) -> str:
    """Channels and taps exactly, pixels to a power of two, and what is done to the product."""
    o = Operands.of_call(call)
    pixels = round_up(math.prod((o.shape[0], *o.shape[2:])))
    parts = [word(o.x), "x".join(map(str, o.weight.shape)), f"{pixels} pixels", call.policy.sums, o.activation]
    parts.append("last" if channels_adjacent(o.x) else "first")
    parts += [f"stride {o.time_stride},{o.stride}"] if (o.time_stride, o.stride) != (1, 1) else []
    parts += [f"{o.cached} cached"] if o.cached else []
    if o.residual is not None:
        parts += ["one residual" if is_one_pixel(o.residual) else "residual"]
    parts += ["no bias"] if o.bias is None else []
    return " ".join(parts)


# ------------------------------------------------------------------------------------------------------------ the op


def empty(o: Operands) -> Tensor:
    return torch.empty(o.shape, dtype=o.x.dtype, device=o.x.device, memory_format=memory_format(o.x))


reference, stock, fake = (by_name(Operands.of, 5, run) for run in (compute, stock_compute, empty))


def kernel_names() -> tuple[str, ...]:
    kinds = {f"{d}x{a}" + ("_stride_2" if stride == 2 else ""): cuts for ((d, a), stride), cuts in CUTS.items()}
    names = [f"conv_{kind}_{tactic}" for kind, cuts in kinds.items() for tactic in kernels_of(cuts)]
    return (*names, *(f"conv_{d}x{a}_thin_precise" for d, a in THIN_TAPS))


def kernels_of(cuts: Cuts) -> list[str]:
    """`16x96_precise`: what follows the taps in the names of kernels."""
    ways = [(cut, each) for cut in cuts for each in ("precise", "fast")]
    return [f"{cut[0]}x{cut[1]}_{each}" for cut, each in ways if cut != PRECISE_ONLY or each == "precise"]


CONV = Op(
    name="conv",
    schema=(
        "(Tensor x, Tensor weight, Tensor? bias, Tensor? cache, Tensor? residual, str activation, int time_stride, "
        "int before, int stride, int left, int right, int top, int bottom, str policy) -> Tensor"
    ),
    reference=reference,
    fake=fake,
    candidates=(
        CudaCandidate("cuda", obstacles, plan, ways, unit="conv"),
        StockCandidate(stock, begins=conv_torch.begins),
        conv_torch.FUSED,
        conv_flat.FLAT,
    ),
    others_race=True,  # 9x9 taps, which none of ours has: torch is not the same in all of its ways
    shape_class=shape_class,
    validate=validate,
    kernels={"conv": kernel_names(), conv_torch.UNIT: ("conv_rest",)},
)
