"""The one way to take a weight: what an op is handed, whatever the module holds and wherever it is.

    as stored     fp16 on the device, as a streamed block of an fp16 file holds it: taken as it lies, and q, k and v of a block are
                  one matrix that nobody had to copy (`packed`)
    made half     bf16, fp32, fp8 with a scale or without, 8-bit numbers turned or not: one saturating pass (`to_half`,
                  `int8_to_half`), into memory of its own. Packed: by the kernel of its type
    changed       by functions of other nodes, or by a LoRA that is added to what a product reads: on such a copy
    brought       weights that are elsewhere, by stock's `cast_bias_weight`, with the patches that it applies on the way. It brings
                  them through a few buffers that the next one may get: only the last stays in its, others are copied out

What `turbo` multiplies in 8 bits is made of this, or taken as the file has it: `int8_weights.py`.

Where the input is not fp16 (a VAE in fp32, a bias in an fp32 stream), weights become what it is, as stock casts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import comfy.ops
import torch
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy, int8_to_half, to_half
from ..base.hooks import PACKED
from . import int8_matrix
from .ggml_tensor import half as packed_half
from .ggml_tensor import is_held
from .lora import Added
from .storage import in_file_order, is_quantised, layout_of

HALVED = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)  # what `to_half` takes
SCALED = ("TensorCoreFP8Layout", "TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout")  # fp8 data and one fp32 scale


class Weights(NamedTuple):
    """weight [n, k] or [n] of a norm, bias [n] or None: both of the input's type, on its device."""

    weight: Tensor | None
    bias: Tensor | None

    @property
    def matrix(self) -> Tensor:
        """The weight of an operation that has one."""
        assert self.weight is not None, "a product has a weight"
        return self.weight


class operands:
    """The weights of some of stock's operations for an input like x. Valid within the context only.

    A class of its own, and looking no further than it must: a block asks some twenty times.
    """

    __slots__ = ("_held", "_modules", "_policy", "_x")

    def __init__(self, x: Tensor, policy: KernelPolicy, *modules: Any) -> None:
        self._x, self._policy, self._modules = x, policy, modules
        self._held: contextlib.ExitStack | None = None

    def __enter__(self) -> list[Weights]:
        kind, device, found = self._x.dtype, self._x.get_device(), []
        for module in self._modules:
            own = module._parameters
            weight, bias = own.get("weight"), own.get("bias")
            if weight is None or _lie_as_wanted(module, weight, bias, kind, device):
                found.append(Weights(weight, bias))
            else:
                self._held = self._held or contextlib.ExitStack()
                found.append(self._made(module, is_last=module is self._modules[-1]))
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held is not None:
            self._held.close()

    def _made(self, module: Any, *, is_last: bool) -> Weights:
        assert self._held is not None
        x = self._x
        if x.dtype is not torch.float16:
            return self._held.enter_context(_as_stock(module, x))
        if is_here(module, x.device):
            return Weights(_changed(module, module.weight, self._policy), bias_of(module, x))
        if is_last:
            brought = self._held.enter_context(_brought(module, x.device))
            return Weights(half(brought.matrix, self._policy), _half_bias(brought.bias))
        with _brought(module, x.device) as brought:
            found = half(brought.matrix, self._policy)
            return Weights(found.clone() if found is brought.weight else found, _half_bias(brought.bias, copy=True))


def _lie_as_wanted(module: Any, weight: Tensor, bias: Tensor | None, kind: torch.dtype, device: int) -> bool:
    return (
        type(weight) is nn.Parameter  # what is quantised is of a type of its own
        and weight.dtype is kind
        and (bias is None or bias.dtype is kind)
        and weight.get_device() == device
        and not (module.weight_function or module.bias_function)
    )


def is_here(module: Any, device: torch.device) -> bool:
    """Whether what the module holds is what it computes with."""
    here: bool = module.weight.device == device
    return here


def half(weight: Any, policy: KernelPolicy) -> Tensor:
    """A weight on the device as fp16. What is too large for it saturates."""
    if is_held(weight):
        return packed_half(weight)
    if is_quantised(weight):
        if (matrix := int8_matrix.matrix_of(weight)) is not None:
            return int8_to_half(matrix.numbers, matrix.scales, rotation=matrix.rotation, policy=policy)
        if layout_of(weight) in SCALED and weight._params.scale.numel() == 1:
            return to_half(weight._qdata, weight._params.scale.reshape(1), policy=policy)
        weight = weight.dequantize()
    if weight.dtype not in HALVED:
        found: Tensor = weight.half()
        return found
    if weight.ndim < 3 or weight.is_contiguous():
        return to_half(weight, policy=policy)
    return to_half(weight.movedim(1, -1), policy=policy).movedim(-1, 1)  # a convolution's, which lies channels-last


def _changed(module: Any, weight: Any, policy: KernelPolicy) -> Tensor:
    """As fp16, with what the module's functions make of it. Those of other nodes compute in fp32, a LoRA that is added on the way
    in fp16, in the copy that is made anyway."""
    functions = module.weight_function
    if not functions:
        return half(weight, policy)
    weight = in_file_order(weight)
    if all(isinstance(function, Added) for function in functions):
        made = half(weight, policy)
        made = made.clone() if made is weight else made
    else:
        made = _wide(weight, policy)
        made = made.clone() if made is weight else made
    for function in functions:
        made = function(made)
    return made.half()


def _wide(weight: Any, policy: KernelPolicy) -> Tensor:
    """In fp32, for functions that round nothing in between. Numbers of 8 bits have no more digits than their fp16."""
    if not is_quantised(weight):
        found: Tensor = weight.float()
        return found
    return (weight.dequantize() if int8_matrix.matrix_of(weight) is None else half(weight, policy)).float()


def bias_of(module: Any, x: Tensor) -> Tensor | None:
    """What of a module's bias lies on the device, as fp16 and with what its functions make of it."""
    bias = module._parameters.get("bias")
    if bias is None:
        return None
    made: Tensor = bias.to(x.device, torch.float16)
    for function in module.bias_function:
        made = function(made)
    return made.half()


def _half_bias(bias: Tensor | None, *, copy: bool = False) -> Tensor | None:
    return None if bias is None else bias.to(torch.float16, copy=copy)


@contextlib.contextmanager
def _as_stock(module: Any, x: Tensor) -> Iterator[Weights]:
    weight, bias, stream = comfy.ops.cast_bias_weight(module, x, offloadable=True, compute_dtype=x.dtype)
    try:
        yield Weights(weight.dequantize() if is_quantised(weight) else weight, bias)
    finally:
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)


@contextlib.contextmanager
def _brought(module: Any, device: torch.device) -> Iterator[Weights]:
    """On the device, patched, in the type in which it is kept or in a wider one."""
    kind = torch.float32 if module.weight_function else module.weight.dtype
    weight, bias, stream = comfy.ops.cast_bias_weight(
        module, dtype=kind, device=device, bias_dtype=kind, offloadable=True, compute_dtype=torch.float32
    )
    try:
        yield Weights(weight, bias)
    finally:
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)


# --------------------------------------------------------------------------------------------------------------- packed


def packed(parts: Sequence[Weights]) -> Weights | None:
    """Several operations on one input as a single one, if their weights lie one behind the other; nothing is copied."""
    first = parts[0].weight
    if first is None or torch.compiler.is_compiling():
        return None
    # Looked for once as long as these tensors live: what was found is kept on the first, beside where they lay.
    at = [tensor.data_ptr() for part in parts for tensor in part if tensor is not None]
    known = first.__dict__.get(PACKED)
    if known is not None and known[0] == at:
        found: Weights | None = known[1]
        return found
    weights = _joined([part.weight for part in parts])
    biases = None if parts[0].bias is None else _joined([part.bias for part in parts])
    plain = all(part.bias is None for part in parts)
    found = None if weights is None or (biases is None and not plain) else Weights(weights, biases)
    first.__dict__[PACKED] = at, found
    return found


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors as one view along the first dimension: of one memory, each right behind the one before."""
    first = tensors[0]
    if first is None:
        return None
    home, at, rows = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for tensor in tensors:
        if tensor is None or tensor.dtype is not first.dtype or tensor.shape[1:] != first.shape[1:]:
            return None
        if tensor.untyped_storage().data_ptr() != home or tensor.data_ptr() != at or not tensor.is_contiguous():
            return None
        at += tensor.nbytes
        rows += tensor.shape[0]
    # No view of the first, which would keep the first alive: one that is kept on it would do so for ever.
    made = torch.empty(0, dtype=first.dtype, device=first.device)
    return made.set_(first.untyped_storage(), first.storage_offset(), (rows, *first.shape[1:]), first.stride())
