"""What torch's own convolution can do of `conv`, beside plain stock: the products alone, and one pass of ours behind them.

torch adds a bias behind cuDNN's convolution in a pass of its own; activation and residual are two more. The maths and the access
pattern of the pass stand at the head of src/conv_rest.cu. What cuDNN has added up is rounded before it, and once behind it: stock
rounds after each of its passes.

A residual that is one pixel for each of a batch goes to the bias first, in the pass: it is read where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_int, c_int64, c_uint32
from functools import partial

import torch
from torch import Tensor

from ...call import Begun, Call, Plan
from ...launcher import MAX_GRID, Card, Pointer, parameter_struct
from ...plans import floats, plan_of
from ...registry import CudaCandidate
from ...tune.warm_up import begin
from ..matmul.linear_operands import ACTIVATIONS
from ..views.checks import bias_obstacles, wrong_dtype
from .conv_operands import Operands, channels_adjacent, convolved, is_one_pixel

UNIT = "conv_rest"
PACK = 8  # channels of an access
THREADS = 256  # kThreads
HELD = 4  # kHeld
MOST = 2**32 - THREADS * HELD  # packs of a result, or of one of its pictures

# Mirrors ConvRestParams in src/conv_rest.cu.
ConvRestParams = parameter_struct(
    "ConvRestParams",
    (Pointer, "out bias residual added"),
    (c_int64, "added_step"),
    (c_uint32, "packs across"),
    (c_int, "activation bias_is_float"),
)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps torch and the pass from serving a call. Later checks rely on earlier ones having passed."""
    o = Operands.of_call(call)
    yield from wrong_dtype((torch.float16,), x=o.x, weight=o.weight, cache=o.cache, residual=o.residual)
    yield from wrong_dtype((torch.float16, torch.float32), bias=o.bias)
    if not o.x.numel() or not o.weight.numel():
        yield "there is nothing to compute"
        return
    if o.bias is None and (o.residual is None or o.activation == "none"):
        yield "there is nothing to fuse: torch has one pass for it at most"
    n = o.shape[1]
    if n % PACK:
        yield f"{n} channels of the result are no multiple of {PACK}"
    if not channels_adjacent(o.x):
        yield f"x is not channels-last (strides {o.x.stride()})"
    if o.residual is not None and not _joins_bias(o) and (not is_dense(o.residual) or o.residual.data_ptr() % 16):
        yield f"residual is not dense and channels-last (strides {o.residual.stride()})"
    if o.residual is not None and (o.residual.data_ptr() % 16 or (o.shape[0] > 1 and o.residual.stride(0) % PACK)):
        yield f"residual: rows do not start at multiples of 16 bytes (strides {o.residual.stride()})"
    yield from bias_obstacles(o.bias)
    pictures, packs = _cut(o)
    if pictures > MAX_GRID[1] or packs > MOST:
        yield f"a result of {list(o.shape)} exceeds a grid"


def _joins_bias(o: Operands) -> bool:
    """Whether the residual is one pixel, added where the bias is: without an activation between the two."""
    return o.residual is not None and o.activation == "none" and is_one_pixel(o.residual)


def _cut(o: Operands) -> tuple[int, int]:
    """Pictures that the pass tells apart, and packs of each: all are one, unless each has something of its own."""
    pictures = o.shape[0] if _joins_bias(o) else 1
    return pictures, torch.Size(o.shape).numel() // pictures // PACK


def is_dense(t: Tensor) -> bool:
    """Whether t [b, c, t, h, w] lies as a channels-last tensor of its own does. How far apart there would be a second one of what
    there is one of does not count: rows of a picture are dense."""
    own = torch.empty(t.shape, device="meta", memory_format=torch.channels_last_3d).stride()
    return all(size == 1 or step == dense for size, step, dense in zip(t.shape, t.stride(), own, strict=True))


def plan(call: Call, card: Card, _tactic: object = None, products: Callable[[Operands], Tensor] = convolved) -> Plan:
    """Fix sizes, grid and kernel; what remains per call is torch's convolution (products) and the pointers."""
    o, options = Operands.of_call(call), call.options
    joins, (pictures, packs) = _joins_bias(o), _cut(o)
    params = ConvRestParams(
        added_step=o.residual.stride(0) if joins and o.residual is not None else 0,
        packs=packs,
        across=o.shape[1] // PACK,
        activation=ACTIVATIONS.index(o.activation),
        **floats(bias=o.bias),
    )
    grid = (-(-packs // (THREADS * HELD)), pictures, 1)
    launch = card.kernel(UNIT, "conv_rest").prepare(params, grid=grid, block=THREADS, shape=call.describe())

    add = plan_of(launch, "out bias added" if joins else "out bias residual", (o.x, o.bias, o.residual))

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, cache: Tensor | None, residual: Tensor | None) -> Tensor:
        made = products(Operands.of((x, weight, None, cache, None), options))
        out = made.contiguous(memory_format=torch.channels_last_3d)
        add(out, bias, residual)
        return out

    return run


def begins(call: Call) -> Begun:
    """cuDNN, and what it looks up at its first convolution."""
    x = call.first
    return begin(("convolution", x.device, x.dtype), x.device, partial(_first, x.device, x.dtype))


def _first(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = (torch.zeros(64, 64, size, size, dtype=dtype, device=device) for size in (8, 3))
    last = torch.channels_last
    torch.nn.functional.conv2d(x.to(memory_format=last), weight.to(memory_format=last), padding=1)


FUSED = CudaCandidate("cudnn + fused pass", obstacles, plan, ours=False, begins=begins)
