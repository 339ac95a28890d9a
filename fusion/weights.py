"""Weights of a streamed block's operations as our ops take them, with everything that stock would do to them first.

A weight may be stored in another type, quantised, or changed on its way by functions of other nodes. Stock's
`cast_bias_weight` knows all that, and is asked. Where nothing of it applies, which is so for fp16 files, the weight is what
the module holds, and q, k and v of a block are one matrix that nobody had to copy.

Only for weights that are where the input is: stock brings others through a few buffers, of which it holds one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import comfy.ops
import torch
from torch import Tensor

from .blocks import is_quantised


class Weights(NamedTuple):
    """weight [n, k] or [n] of a norm, bias [n] or None: both of the input's type, on its device."""

    weight: Tensor | None
    bias: Tensor | None


@contextlib.contextmanager
def taken(x: Tensor, *modules: Any) -> Iterator[list[Weights]]:
    """The weights of these operations for an input like x. Valid within the context only."""
    with contextlib.ExitStack() as held:
        yield [held.enter_context(_cast(module, x)) if _needs_cast(module, x) else _as_is(module) for module in modules]


def _as_is(module: Any) -> Weights:
    return Weights(module.weight, getattr(module, "bias", None))


def _needs_cast(module: Any, x: Tensor) -> bool:
    if module.weight is None:  # a norm without weights
        return False
    if is_quantised(module.weight) or module.weight_function or module.bias_function:
        return True
    bias = getattr(module, "bias", None)
    return any(t is not None and t.dtype is not x.dtype for t in (module.weight, bias))


@contextlib.contextmanager
def _cast(module: Any, x: Tensor) -> Iterator[Weights]:
    weight, bias, stream = comfy.ops.cast_bias_weight(module, x, offloadable=True, compute_dtype=x.dtype)
    try:
        yield Weights(weight.dequantize() if is_quantised(weight) else weight, bias)
    finally:
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)


def packed(parts: Sequence[Weights]) -> Weights | None:
    """Several operations on one input as a single one, if their weights lie one behind the other; nothing is copied."""
    weights = _joined([part.weight for part in parts])
    if weights is None:
        return None
    if all(part.bias is None for part in parts):
        return Weights(weights, None)
    biases = _joined([part.bias for part in parts])
    return None if biases is None else Weights(weights, biases)


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors as one view along the first dimension: of one memory, each right behind the one before."""
    first = tensors[0]
    if first is None or torch.compiler.is_compiling():
        return None
    home, at, rows = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for tensor in tensors:
        if tensor is None or tensor.dtype is not first.dtype or tensor.shape[1:] != first.shape[1:]:
            return None
        if tensor.untyped_storage().data_ptr() != home or tensor.data_ptr() != at or not tensor.is_contiguous():
            return None
        at += tensor.nbytes
        rows += tensor.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())
