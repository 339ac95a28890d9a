"""Weights for a product in 8 bits, which `auto` and `turbo` permit: a scale for each row, rows
rotated or not.

    as stored   numbers, scales and rotation of an INT8 file (ConvRot), not copied
    rounded     INT8 weights that a LoRA changes, and with `turbo` any other storage: converted to
                fp16 by `operands`, then rounded at each use with the largest rotation that fits the
                rows. The result is not kept, because the streaming window needs the room, and a
                LoRA's strength may change

With `auto`, layers for which the file asks full precision (`full_precision_matrix_mult`) are
multiplied in fp16, as ComfyUI does.

A LoRA on an INT8 file is added to the fp16 copy, and the sum is rounded with a scale for each row,
because the file's own scale may be a single one for the whole weight.

Where the rule (`kernels_cuda/ops/matmul/int8_rule.py`) declines, an operation's weights are those
of `operands`.
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
from .lora import Added
from .operands import Weights, bias_of, is_here, operands
from .patches import Applied
from .storage import storage_of


class Int8Weights(NamedTuple):
    """matrix [n, k] of 8-bit numbers, bias [n] fp16 or None: both on the input's device."""

    matrix: Int8Matrix
    bias: Tensor | None


def multiplies_bytes(policy: KernelPolicy, device: Any) -> bool:
    """Whether INT8 weights are multiplied in 8 bits: the policy does not forbid it, and the card is
    faster that way."""
    if policy.int8_products == "never" or any(policy.mode(op) == "off" for op in OPS):
        return False
    device = torch.device(device)
    return device.type != "cuda" or int8_pays(torch.cuda.get_device_capability(device))


@contextlib.contextmanager
def int8_operands(x: Tensor, policy: KernelPolicy, *modules: Any) -> Iterator[list[Weights | Int8Weights]]:
    """The weights of some of ComfyUI's Linears for x [batch, ..., k]: in 8 bits where the tier
    multiplies so, else those of `operands`. Valid within the context only."""
    rounded = [_in_int8(x, module, policy) for module in modules]
    others = [module for module, own in zip(modules, rounded, strict=True) if own is None]
    with operands(x, policy, *others) as found:
        left = iter(found)
        yield [next(left) if own is None else own for own in rounded]


def _in_int8(x: Tensor, module: Any, policy: KernelPolicy) -> Int8Weights | None:
    """An operation's weights in 8 bits; None: this product is computed in fp16."""
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
        # A weight from another device lies in a buffer that the next one reuses.
        bias = own.bias if own.bias is None or is_here(module, x.device) else own.bias.clone()
        return Int8Weights(Int8Matrix(numbers, scales, rotation), bias)


def is_in_int8_but_for_loras(module: Any) -> bool:
    """Whether a Linear's weight is stored in 8 bits, and changed by LoRAs and merges only. ComfyUI
    rounds those sums to the file's type, but multiplies in fp16 when functions of other nodes
    changed the weight."""
    changed = module.weight_function
    return all(isinstance(function, (Added, Applied)) for function in changed) and (
        storage_of(module.weight).int8() is not None
    )


def _as_stored(module: Any, x: Tensor) -> Int8Matrix | None:
    if module.weight_function or not is_here(module, x.device):
        return None
    return storage_of(module.weight).int8()
