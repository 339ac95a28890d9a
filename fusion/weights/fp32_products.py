"""Products and values of an FP32 stream in fewer bits, on a card without BF16.

30 of ComfyUI's 98 classes of models have no FP16, because what passes through them may be larger than
65504. On an RTX 20 stock computes these in FP32, at an eighth of the speed of FP16. Here the stream
stays FP32, and only what is multiplied is narrower:

    integers  x becomes BF16, which has FP32's range, and its rows are rounded for the weight. The
              sums leave as FP32 with the bias added
    halves    each row of x is divided by a power of two so that it fits FP16 (`Scaled`). The sums
              leave as FP32 and are multiplied by that power, to which FP32 adds nothing

A file's BF16 or fp8 weights are exact in FP16 but for numbers below 6e-8. The error of halves is the
rounding of x to 11 bits, where the model's own BF16 has 8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import comfy.model_management
import torch
from comfy.cli_args import args
from torch import Tensor

from ...kernels_cuda import KernelPolicy, linear, multiply, obstacle
from ...kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from ...kernels_cuda.ops.views.half_range import LARGEST
from .integer_weights import stored_integers
from .operands import bias_of, operands
from .storage import product_bits

MULTIPLE = 8  # of which sizes of a product of halves are
FITS = 2.0**15  # the largest number of a row that was divided
MOST_POWERS = 113  # of two, that bring the largest FP32 number there


class Scaled(NamedTuple):
    """numbers * factor is x to 11 bits. numbers: fp16 of x's shape. factor: fp32 powers of two, 1
    where x fits, with one element for all that was reduced."""

    numbers: Tensor
    factor: Tensor


def narrows(x: Tensor) -> bool:
    """Whether products of x may have fewer bits."""
    return narrows_on(x.device, x.dtype)


def narrows_on(device: Any, dtype: torch.dtype) -> bool:
    """Whether a network computes in FP32 on a card for want of BF16, and not by the user's wish."""
    if dtype is not torch.float32 or torch.device(device).type != "cuda":
        return False
    return not (args.force_fp32 or args.fp32_unet) and _is_ours_without_bf16(torch.device(device))


@functools.cache
def _is_ours_without_bf16(device: torch.device) -> bool:
    """Whether our kernels run on a card that has FP16 and no BF16. GTX 16 has neither: ComfyUI computes
    in FP32 there because FP16 is broken."""
    stock = comfy.model_management
    return obstacle(device) is None and stock.should_use_fp16(device) and not stock.should_use_bf16(device)


def scaled(x: Tensor, dims: tuple[int, ...] = (-1,)) -> Scaled:
    """x fp32 as halves, with a factor for each of the other dims' places."""
    largest = torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True) if x.numel() else x.new_zeros(())
    powers = torch.frexp(largest / FITS).exponent.clamp_(0, MOST_POWERS)
    factor = torch.ldexp(torch.ones_like(largest), powers)
    room = torch.empty(x.shape, dtype=torch.float16, device=x.device)  # one pass, without an FP32 copy
    return Scaled(torch.mul(x, factor.reciprocal(), out=room), factor)


def multiplies_fp32(operation: Any) -> bool:
    """Whether our products take the sizes of one of stock's Linears."""
    return all(size % MULTIPLE == 0 for size in (operation.in_features, operation.out_features))


def product_of_fp32(x: Tensor, operation: Any, policy: KernelPolicy) -> Tensor:
    """One of stock's Linears of x [..., k] fp32, as [..., n] fp32."""
    if product_bits(operation) is not None:
        wide = x.to(torch.bfloat16)
        if (own := stored_integers(wide, operation, policy)) is not None:
            return multiply(wide, own.matrix, bias_of(operation, x), out_dtype=torch.float32, policy=policy)
    numbers, factor = scaled(x)
    with operands(numbers, policy, operation) as [held]:
        sums = linear(numbers, held.matrix, out_dtype=torch.float32, policy=policy)
    bias = bias_of(operation, x)
    return sums.mul_(factor) if bias is None else torch.addcmul(bias, sums, factor)


def attention_of_fp32(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, most: int = CHUNK_BYTES
) -> Tensor:
    """attend(q, k, v, mask) of halves as FP32, for q, k, v [batch, tokens, heads, d] fp32. Queries and
    keys that are larger than 65504 stay there, because scores of such numbers leave one key; values
    are scaled by head. A query that a finite mask hides from all keys sees all, as they are.

    most: bytes that the halves may take at once, or those of one head of keys; so many heads are
    computed together.
    """
    batch, tokens, heads, d = q.shape
    key_heads, share = k.shape[2], heads // k.shape[2]
    of_a_head = torch.float16.itemsize * batch * d * (2 * share * tokens + 2 * k.shape[1])
    step = max(1, most // max(1, of_a_head))
    if step >= key_heads:
        return _attended(attend, q, k, v, mask)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for at in range(0, key_heads, step):
        some, theirs = slice(at, at + step), slice(share * at, share * (at + step))
        own = mask if mask is None or mask.shape[1] == 1 else mask[:, theirs]
        out[:, :, theirs] = _attended(attend, q[:, :, theirs], k[:, :, some], v[:, :, some], own)
    return out


def mask_of_halves(mask: Tensor) -> Tensor:
    """A mask beside halves. What it adds saturates, because a stream's type forbids with its lowest
    number; infinities stay."""
    if mask.dtype in (torch.bool, torch.float16):
        return mask
    return torch.where(mask.isinf(), mask, mask.clamp(-LARGEST, LARGEST)).half()


def _attended(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    numbers, factor = scaled(v, (1, 3))
    if mask is not None:
        mask = mask_of_halves(mask)
    q16, k16 = (one.half().clamp_(-LARGEST, LARGEST) for one in (q, k))
    out = attend(q16, k16, numbers, mask)
    return out.float().mul_(factor.expand(-1, -1, v.shape[2], -1).repeat_interleave(q.shape[2] // v.shape[2], 2))
