"""Weights of stock's Linears as fp16 matrices on the device, whatever they are stored as and wherever they are.

Where the module holds its weight on the device, as a streamed block does, fp16 is taken as it lies, and everything else
becomes fp16 in one saturating pass (`to_half`), a quantised weight from its data and its scale. Else stock's
`cast_bias_weight` brings it, as it is stored, with whatever patches it has on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import comfy.ops
import torch
from torch import Tensor

from ..kernels_cuda import KernelPolicy, to_half
from .blocks import is_quantised

HALVED = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)  # what `to_half` takes
SCALED = ("TensorCoreFP8Layout", "TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout")  # fp8 data and one fp32 scale


@contextlib.contextmanager
def halves(device: torch.device, policy: KernelPolicy, *modules: Any) -> Iterator[list[Tensor]]:
    """The weights [n, k] of these operations, fp16 on the device. Valid within the context."""
    with contextlib.ExitStack() as held:
        yield [_half_of(device, policy, module, held if module is modules[-1] else None) for module in modules]


def _half_of(device: torch.device, policy: KernelPolicy, module: Any, held: contextlib.ExitStack | None) -> Tensor:
    """One of them. Stock brings weights through a few buffers that the next one may get: only the last stays in its, by
    `held`; others are copied out of it."""
    if is_there(device, module):
        return half(module.weight, policy)
    if held is not None:
        return half(held.enter_context(weight_on(device, module)), policy)
    with weight_on(device, module) as weight:
        found = half(weight, policy)
        return found.clone() if found is weight else found


def is_there(device: torch.device, module: Any) -> bool:
    """Whether what the module holds is what it computes with."""
    return module.weight.device == device and not module.weight_function


@contextlib.contextmanager
def weight_on(device: torch.device, module: Any) -> Iterator[Any]:
    """A module's weight on the device, patched, in the type in which it is kept or in a wider one. One at a time."""
    weight = module.weight
    if is_there(device, module):
        yield weight
        return
    # Functions of other nodes, and patches that are applied on the way, compute in fp32 as they do in stock's T5.
    kind = torch.float32 if module.weight_function else weight.dtype
    cast, bias, stream = comfy.ops.cast_bias_weight(
        module, dtype=kind, device=device, bias_dtype=kind, offloadable=True, compute_dtype=torch.float32
    )
    try:
        yield cast
    finally:
        comfy.ops.uncast_bias_weight(module, cast, bias, stream)


def half(weight: Any, policy: KernelPolicy) -> Tensor:
    """A weight as fp16. What is too large for it saturates."""
    if is_quantised(weight):
        layout = weight._layout_cls if isinstance(weight._layout_cls, str) else weight._layout_cls.__name__
        if layout in SCALED and weight._params.scale.numel() == 1:
            return to_half(weight._qdata, weight._params.scale.reshape(1), policy=policy)
        weight = weight.dequantize()
    found: Tensor = to_half(weight, policy=policy) if weight.dtype in HALVED else weight.half()
    return found
