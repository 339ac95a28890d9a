"""Products of a few rows, as a token that is being written has them: of weights as they are stored.

A row or two take the time that the weight's bytes take, so a weight is read once, as the file has it: fp16, bf16, fp8 with a
scale or without, 8-bit numbers that were not turned, GGUF's blocks. What is stored otherwise, changed by other nodes or elsewhere
becomes fp16 first (`operands.py`), and so does all where the op is off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels_cuda import (
    KernelPolicy,
    few_rows,
    few_rows_serves,
    linear,
)
from . import int8_matrix
from .ggml_tensor import in_rows, is_held
from .operands import SCALED, Weights, is_here, operands, packed
from .storage import is_quantised, layout_of

ALIGNED = 16  # bytes
ENCODINGS = {
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class Stored(NamedTuple):
    """A weight as `few_rows` takes it. numbers: [n, k], or [n, bytes of a row] of packed blocks."""

    numbers: Tensor
    encoding: str
    scale: Tensor | None = None


def few_products(
    h: Tensor,
    modules: Sequence[Any],
    policy: KernelPolicy,
    *,
    residual: Tensor | None = None,
    factor: float = 1.0,
    joined: bool = False,
) -> Sequence[Tensor]:
    """What several of stock's Linears without bias make of h, fp32 [..., n] each: residual + factor * module(h). A table of
    tokens is one too, for the words that it has rows of.

    h       [..., k] fp16; joined: [2, ..., k], two parts of what is multiplied, and the results are [..., n]
    factor  a power of two
    """

    def made(own: Stored) -> Tensor:
        return _product(h, own, policy, residual=residual, factor=factor, joined=joined)

    with taken(h, modules, policy) as weights:
        one = _whole(weights)
        if one is None:
            return [made(own) for own in weights]
        return made(one).split_with_sizes([own.numbers.shape[0] for own in weights], -1)


@contextlib.contextmanager
def taken(h: Tensor, modules: Sequence[Any], policy: KernelPolicy) -> Iterator[list[Stored]]:
    """The weights of these operations for a few rows like h [..., k] fp16. Valid within the context only."""
    found = [stored(module, h, policy) for module in modules]
    others = [module for module, own in zip(modules, found, strict=True) if own is None]
    with operands(h, policy, *others) as halves:
        rest = iter(halves)
        yield [Stored(next(rest).matrix, "F16") if own is None else own for own in found]


def stored(module: Any, h: Tensor, policy: KernelPolicy) -> Stored | None:
    """An operation's weight as it lies on h's device; None: it must be made fp16 first."""
    weight = module._parameters.get("weight")
    if policy.mode("few_rows") == "off" or module.weight_function or weight is None or not is_here(module, h.device):
        return None
    found = _as_stored(weight)
    return found if found is not None and serves(h, found) else None


def read_in_place(module: Any, x: Tensor, policy: KernelPolicy) -> bool:
    """Whether an operation's weight is read as it lies, for rows x [..., k] in two parts."""
    return stored(module, x.new_empty((2, *x.shape), dtype=torch.float16), policy) is not None


def serves(h: Tensor, own: Stored) -> bool:
    """Whether the kernels take these rows and this weight: from a multiple of 16 bytes on."""
    lies_well = own.numbers.is_contiguous() and own.numbers.data_ptr() % ALIGNED == 0
    return lies_well and few_rows_serves(h.shape, own.encoding)


def _as_stored(weight: Any) -> Stored | None:
    if is_held(weight):
        blocks = in_rows(weight)
        return None if blocks is None else Stored(blocks, weight._params.encoding)
    if is_quantised(weight):
        if (matrix := int8_matrix.matrix_of(weight)) is not None:
            return Stored(matrix.numbers, "I8", matrix.scales) if matrix.rotation == 0 else None
        scale = weight._params.scale if layout_of(weight) in SCALED else None
        if scale is None or scale.numel() != 1 or weight._qdata.dtype not in ENCODINGS:
            return None
        return Stored(weight._qdata, ENCODINGS[weight._qdata.dtype], scale.reshape(1).float())
    plain = type(weight) is nn.Parameter and weight.dtype in ENCODINGS and weight.is_contiguous()
    return Stored(weight, ENCODINGS[weight.dtype]) if plain else None


def _whole(weights: Sequence[Stored]) -> Stored | None:
    """Several as one, where they lie one behind the other and need no scales."""
    first = weights[0]
    if len(weights) == 1 or any(one.encoding != first.encoding or one.scale is not None for one in weights):
        return None
    found = packed([Weights(one.numbers, None) for one in weights])
    return None if found is None else Stored(found.matrix, first.encoding)


def _product(
    h: Tensor, own: Stored, policy: KernelPolicy, *, residual: Tensor | None, factor: float, joined: bool
) -> Tensor:
    if policy.mode("few_rows") != "off" and serves(h, own):
        return few_rows(
            h.contiguous(),
            own.numbers,
            own.encoding,
            scale=own.scale,
            residual=residual,
            factor=factor,
            joined=joined,
            out_dtype=torch.float32,
            policy=at_once(policy) if h.is_cuda else policy,
        )
    out = linear(h, own.numbers, saturate=True, out_dtype=torch.float32, policy=policy)
    out = out[0] + out[1] if joined else out
    out = out if factor == 1 else out * factor
    return out if residual is None else residual + out


@lru_cache(maxsize=64)
def at_once(policy: KernelPolicy) -> KernelPolicy:
    """Where the policy leaves the choice, the kernel. Stock's way, which would be measured beside it, makes numbers of the whole
    weight: of a table of words that is a gigabyte and a half."""
    if policy.mode("few_rows") != "auto":
        return policy
    return replace(policy, ops=(*policy.ops, ("few_rows", "on")))
