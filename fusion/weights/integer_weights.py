"""Weights for a product of integers, which `auto` and `turbo` permit: a scale for each row, rows
rotated or not.

    as stored   numbers, scales and rotation of a file of 8 bits (INT8) or 4 (ConvRot W4A4), not
                copied
    rounded     to 8 bits: weights of such files that a LoRA changes, and with `turbo` any other storage: converted to
                fp16 by `operands`, then rounded at each use with the largest rotation that fits the
                rows. The result is not kept, because the streaming window needs the room, and a
                LoRA's strength may change

With `auto`, layers for which the file asks full precision (`full_precision_matrix_mult`) are
multiplied in fp16, as ComfyUI does.

A LoRA on such a file is added to the fp16 copy, and the sum is rounded with a scale for each row,
because the file's own scale may be a single one for the whole weight. It is rounded to 8 bits, also
where the file has 4, because a LoRA is small beside a step of 4 bits.

Where the rule (`kernels_cuda/ops/matmul/integer_rule.py`) declines, an operation's weights are those
of `operands`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels_cuda import (
    IntegerMatrix,
    KernelPolicy,
    best_rotation,
    multiplies_integers,
    rows_to_int8,
    serves_integers,
)
from ...kernels_cuda.binary.arch import int8_pays
from ...kernels_cuda.ops.matmul.integer_rule import OPS
from .lora import Added
from .operands import Weights, bias_of, is_here, operands
from .patches import Applied
from .storage import product_bits, storage_of


class IntegerWeights(NamedTuple):
    """matrix [n, k] of integers, bias [n] of the input's type or None: both on its device."""

    matrix: IntegerMatrix
    bias: Tensor | None


def permits_integers(policy: KernelPolicy, bits: int) -> bool:
    """Whether a policy lets weights of integers be multiplied as they are stored."""
    return policy.int8_products != "never" and all(policy.mode(op) != "off" for op in OPS[bits])


def multiplies_bytes(policy: KernelPolicy, device: Any, bits: int = 8) -> bool:
    """Whether weights of integers are multiplied as they are stored: the policy permits it, and the card is
    faster that way."""
    if not permits_integers(policy, bits):
        return False
    device = torch.device(device)
    return device.type != "cuda" or int8_pays(torch.cuda.get_device_capability(device), is_stored=True)


@contextlib.contextmanager
def integer_operands(x: Tensor, policy: KernelPolicy, *modules: Any) -> Iterator[list[Weights | IntegerWeights]]:
    """The weights of some of ComfyUI's Linears for x [batch, ..., k]: integers where the tier
    multiplies so, else those of `operands`. Valid within the context only."""
    rounded = [_in_integers(x, module, policy) for module in modules]
    others = [module for module, own in zip(modules, rounded, strict=True) if own is None]
    with operands(x, policy, *others) as found:
        left = iter(found)
        yield [next(left) if own is None else own for own in rounded]


def _in_integers(x: Tensor, module: Any, policy: KernelPolicy) -> IntegerWeights | None:
    """An operation's weights as integers; None: this product is computed in fp16."""
    stored = _as_stored(module, x)
    asks_for_more = getattr(module, "_full_precision_mm", False)
    is_stored = not asks_for_more and (stored is not None or is_integer_but_for_loras(module))
    bits = 8 if stored is None else stored.bits
    if not multiplies_integers(x, module.weight.shape, policy, rounds=stored is None, is_stored=is_stored, bits=bits):
        return None
    if stored is not None:
        return IntegerWeights(stored, bias_of(module, x))
    with operands(x, policy, module) as [own]:
        rotation = best_rotation(own.matrix.shape[1])
        numbers, scales = rows_to_int8(own.matrix, rotation=rotation, policy=policy)
        # A weight from another device lies in a buffer that the next one reuses.
        bias = own.bias if own.bias is None or is_here(module, x.device) else own.bias.clone()
        return IntegerWeights(IntegerMatrix(numbers, scales, rotation), bias)


def stored_integers(x: Tensor, module: Any, policy: KernelPolicy) -> IntegerWeights | None:
    """The unchanged weight of one of ComfyUI's Linears for x [..., k], if its file has it as integers
    that our products take, on whatever card. None: it has not, or it asks for more than integers."""
    bits = product_bits(module)
    if bits is None or getattr(module, "_full_precision_mm", False) or not permits_integers(policy, bits):
        return None
    if not serves_integers(x, module.weight.shape, bits):
        return None
    found = _as_stored(module, x)
    return None if found is None else IntegerWeights(found, bias_of(module, x))


def rounds_for(x: Tensor, module: Any, policy: KernelPolicy) -> bool:
    """Whether a weight that is stored otherwise would be rounded for the product with x."""
    return policy.int8_products == "always" and multiplies_integers(x, module.weight.shape, policy, rounds=True)


def is_integer_but_for_loras(module: Any) -> bool:
    """Whether a Linear's weight is stored as integers, and changed by LoRAs and merges only. ComfyUI
    rounds those sums to the file's type, but multiplies in fp16 when functions of other nodes
    changed the weight."""
    changed = module.weight_function
    return all(isinstance(function, (Added, Applied)) for function in changed) and (
        storage_of(module.weight).is_of_integers
    )


def _as_stored(module: Any, x: Tensor) -> IntegerMatrix | None:
    if module.weight_function or not is_here(module, x.device):
        return None
    return storage_of(module.weight).multiplied()
