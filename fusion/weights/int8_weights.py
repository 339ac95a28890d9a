"""Weights for a product in 8 bits, which `auto` and `turbo` permit: a scale for each row, and rows that may have been turned.

    as stored   numbers, scales and rotation of an INT8 file (ConvRot), as they lie
    rounded     what LoRAs change of such a file, and with `turbo` anything else: made half by `operands`, then
                rounded again at each use, with the largest rotation that there is for its rows. To keep it would take room that
                the window has better use for, and a LoRA's strength may be another one in the next run

Layers of which the file asks for full precision (`full_precision_matrix_mult`) are multiplied as halves by `auto`, as stock does.

A LoRA on an INT8 file is added to the half that is made of it, and the sum is rounded anew: not to the file's own scales, which
may be one for the whole weight, but with a scale for each row.

Where the rule says no (`kernels_cuda/ops/matmul/int8_rule.py`) an operation's weights are those that `operands` hands out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels_cuda import (
    Int8Matrix,
    KernelPolicy,
    best_rotation,
    multiplies_in_int8,
    rows_to_int8,
)
from ...kernels_cuda.binary.arch import int8_pays
from ...kernels_cuda.ops.matmul.int8_rule import OPS
from .int8_matrix import matrix_of
from .lora import Added
from .operands import Weights, bias_of, is_here, operands
from .patches import Applied
from .storage import is_quantised


class Int8Weights(NamedTuple):
    """matrix [n, k] of 8-bit numbers, bias [n] fp16 or None: both on the input's device."""

    matrix: Int8Matrix
    bias: Tensor | None


def multiplies_bytes(policy: KernelPolicy, device: Any) -> bool:
    """Whether weights that a file has in 8 bits are multiplied as they are: nobody has switched that off, and the card gains."""
    if policy.int8_products == "never" or any(policy.mode(op) == "off" for op in OPS):
        return False
    device = torch.device(device)
    return device.type != "cuda" or int8_pays(torch.cuda.get_device_capability(device))


@contextlib.contextmanager
def int8_operands(x: Tensor, policy: KernelPolicy, *modules: Any) -> Iterator[list[Weights | Int8Weights]]:
    """The weights of some of stock's Linears for x [batch, ..., k]: of 8-bit numbers where the tier multiplies those, else as
    `operands` has them. Valid within the context only."""
    rounded = [_in_int8(x, module, policy) for module in modules]
    others = [module for module, own in zip(modules, rounded, strict=True) if own is None]
    with operands(x, policy, *others) as found:
        left = iter(found)
        yield [next(left) if own is None else own for own in rounded]


def _in_int8(x: Tensor, module: Any, policy: KernelPolicy) -> Int8Weights | None:
    """None: this product is one of halves."""
    stored = _as_stored(module, x)
    asks_for_more = getattr(module, "_full_precision_mm", False)
    is_stored = not asks_for_more and (stored is not None or is_in_int8_but_for_loras(module))
    if not multiplies_in_int8(x, module.weight.shape, policy, rounds=stored is None, is_stored=is_stored):
        return None
    if stored is not None:
        return Int8Weights(stored, bias_of(module, x))
    with operands(x, policy, module) as [own]:
        rotation = best_rotation(own.matrix.shape[1])
        numbers, scales = rows_to_int8(own.matrix, rotation=rotation, policy=policy)
        # What was brought lies in a buffer that the next one gets.
        bias = own.bias if own.bias is None or is_here(module, x.device) else own.bias.clone()
        return Int8Weights(Int8Matrix(numbers, scales, rotation), bias)


def is_in_int8_but_for_loras(module: Any) -> bool:
    """Whether the file has a Linear's weight in 8 bits, and only LoRAs and merges change it: stock rounds the sum with those to the
    file's type, and multiplies what other nodes' own functions have changed as halves."""
    changed = module.weight_function
    return (
        is_quantised(module.weight)
        and all(isinstance(function, (Added, Applied)) for function in changed)
        and matrix_of(module.weight) is not None
    )


def _as_stored(module: Any, x: Tensor) -> Int8Matrix | None:
    weight = module.weight
    if not is_quantised(weight) or module.weight_function or not is_here(module, x.device):
        return None
    return matrix_of(weight)
