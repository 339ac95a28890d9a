"""`conv` of one picture by torch's convolution of pictures: what a video's costs beside it is not taken for granted.

conv's operands have time, and stock's candidate gives them to torch's conv3d as they are; this one to conv2d. Ways:

  plain       and bias, activation and residual in torch's passes
  fused pass  and all that in the one pass of ours (conv_torch.py)
  padded      weights with zero channels of the result up to a multiple of 8: cuDNN's tensor cores take no others
  rows        for many taps and few channels: each row of taps is so many channels of one convolution with taps across alone, whose
              rows are then added up in fp32. Of 9x9 taps to 3 channels, 27 (32) instead of 3 (8): a seventh of the arithmetic of
              tiles that are 32 channels wide. The sums of rows are rounded to fp16 before they are added
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan
from ...launcher import Card
from ...registry import CudaCandidate
from ..matmul.linear_operands import activate
from ..views.checks import wrong_dtype
from . import conv_torch
from .conv_operands import Operands, channels_adjacent, memory_format

PLAIN, FUSED_PASS, PADDED, ROWS = "plain", "fused pass", "padded", "rows"
PACK = 8
MOST_ACROSS = 64  # channels that a convolution of rows has at the most
LEAST_DOWN = 5  # rows of taps below which there is little to win


def obstacles(call: Call) -> Iterator[str]:
    """What keeps this from serving a call. Later checks rely on earlier ones having passed."""
    o = Operands.of_call(call)
    yield from wrong_dtype((torch.float16,), x=o.x, weight=o.weight, residual=o.residual)
    if not o.x.numel() or not o.weight.numel():
        yield "there is nothing to compute"
        return
    if o.x.shape[2] != 1 or o.weight.shape[2] != 1 or o.before or o.cache is not None:
        yield "it is a video"
    if not channels_adjacent(o.x):
        yield f"x is not channels-last (strides {o.x.stride()})"


def ways(call: Call) -> list[str]:
    o = Operands.of_call(call)
    n, down = o.weight.shape[0], o.weight.shape[3]
    if n % PACK:
        by_rows = down >= LEAST_DOWN and n * down <= MOST_ACROSS and o.stride == 1
        return [PADDED, *([ROWS] if by_rows else [])]
    return [FUSED_PASS] if next(conv_torch.obstacles(call), None) is None else [PLAIN]


def plan(call: Call, card: Card, tactic: str | None = None) -> Plan:
    tactic = tactic or ways(call)[0]
    if tactic == FUSED_PASS:
        return conv_torch.plan(call, card, products=flat)
    product = {PLAIN: flat, PADDED: padded, ROWS: rows}[tactic]
    options = call.options

    def run(*tensors: Any) -> Tensor:
        o = Operands.of(tensors, options)
        value = activate(product(o), o.activation)
        value = value if o.residual is None else value + o.residual
        return value.to(o.x.dtype).contiguous(memory_format=memory_format(o.x))

    return run


def flat(o: Operands) -> Tensor:
    """[b, n, 1, h, w]: the products, and the bias where there is one."""
    x, padding = _bordered(o)
    bias = None if o.bias is None else o.bias.to(x.dtype)
    return functional.conv2d(x, o.weight.squeeze(2), bias, o.stride, padding).unsqueeze(2)


def padded(o: Operands) -> Tensor:
    """As `flat`, of channels up to a multiple of 8, of which those that were asked for are seen."""
    x, padding = _bordered(o)
    n = o.weight.shape[0]
    weight = functional.pad(o.weight.squeeze(2), (0, 0, 0, 0, 0, 0, 0, -n % PACK))
    bias = None if o.bias is None else functional.pad(o.bias.to(x.dtype), (0, -n % PACK))
    weight = weight.contiguous(memory_format=torch.channels_last)
    return functional.conv2d(x, weight, bias, o.stride, padding)[:, :n].unsqueeze(2)


def rows(o: Operands) -> Tensor:
    """[b, n, 1, h, w] fp32."""
    x, padding = _bordered(o)
    n, c, _, down, across = o.weight.shape
    # [down * n, c, 1, across]: the channels of one row of taps are neighbours.
    weight = o.weight.squeeze(2).permute(2, 0, 1, 3).reshape(down * n, c, 1, across)
    weight = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, -(down * n) % PACK)).contiguous(
        memory_format=torch.channels_last
    )
    parts = functional.conv2d(x, weight, None, 1, padding).contiguous(memory_format=torch.channels_last)
    b, _, h, w = parts.shape
    batch, _, row, pixel = parts.stride()
    # Row y of the result is the sum over d of the parts' row y + d, channels d * n and on.
    seen = parts.as_strided((b, h - down + 1, w, down, n), (batch, row, pixel, row + n, 1))
    value = seen.sum(3, dtype=torch.promote_types(parts.dtype, torch.float32)).movedim(-1, 1)
    if o.bias is not None:
        value = value + o.bias.to(value.dtype).reshape(-1, 1, 1)
    return value.unsqueeze(2)


def _bordered(o: Operands) -> tuple[Tensor, tuple[int, int]]:
    """x as pictures, and the zeros that torch is to see on both sides (down, across)."""
    x, (left, right, top, bottom) = o.x.squeeze(2), o.padding
    if (left, top) == (right, bottom):
        return x, (top, left)
    return functional.pad(x, o.padding), (0, 0)


FLAT = CudaCandidate("cudnn 2d", obstacles, plan, ways, ours=False, begins=conv_torch.begins)
