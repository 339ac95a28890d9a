"""The operands of an op: the weights of ComfyUI's operations as fp16 on the device.

    as stored   fp16 on the device, as a streamed block of an fp16 file holds it: not copied. q, k
                and v of a block are one matrix if they are adjacent (`packed`)
    converted   any other storage: one saturating pass (`storage.py`) into new memory
    changed     by functions of other nodes, or by a LoRA that is added to the converted copy
    scaled      by the file's scales of inputs (AWQ), one for each column
    brought     from another device, by ComfyUI's `cast_bias_weight`, which applies patches on the
                way. It reuses a few buffers: the last weight stays in its buffer, the others are
                copied out

Products in 8 bits take theirs from `integer_weights.py`, which converts other storages.

If the input is not fp16 (a VAE in fp32, a bias in an fp32 stream), weights are cast to its dtype,
as ComfyUI casts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import comfy.ops
import torch
from torch import Tensor, nn

from ...kernels_cuda import KernelPolicy
from ..base.hooks import PACKED
from .lora import Added
from .storage import in_file_order, is_quantised, storage_of


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
    """The weights of some of ComfyUI's operations for an input like x. Valid within the context
    only.

    A class rather than a generator, because a block asks some twenty times. A weight that is
    already right costs one look at its parameter.
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
            scale = own.get("pre_quant_scale")
            if scale is None and (weight is None or _lie_as_wanted(module, weight, bias, kind, device)):
                found.append(Weights(weight, bias))
                continue
            self._held = self._held or contextlib.ExitStack()
            made = self._made(module, is_last=module is self._modules[-1])
            found.append(made if scale is None else Weights(made.matrix * scale.to(made.matrix), made.bias))
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
            return Weights(storage_of(brought.matrix).matrix(self._policy), _half_bias(brought.bias))
        with _brought(module, x.device) as brought:
            found = storage_of(brought.matrix).matrix(self._policy)
            return Weights(found.clone() if found is brought.weight else found, _half_bias(brought.bias, copy=True))


def _lie_as_wanted(module: Any, weight: Tensor, bias: Tensor | None, kind: torch.dtype, device: int) -> bool:
    return (
        type(weight) is nn.Parameter  # a quantised weight has a type of its own
        and weight.dtype is kind
        and (bias is None or bias.dtype is kind)
        and weight.get_device() == device
        and not (module.weight_function or module.bias_function)
    )


def is_here(module: Any, device: torch.device) -> bool:
    """Whether a module's weight is on this device."""
    here: bool = module.weight.device == device
    return here


def _changed(module: Any, weight: Any, policy: KernelPolicy) -> Tensor:
    """The weight in fp16 with the module's functions applied. Functions of other nodes compute in
    fp32; a LoRA is added in fp16, to a copy."""
    functions = module.weight_function
    if not functions:
        return storage_of(weight).matrix(policy)
    weight = in_file_order(weight)
    storage = storage_of(weight)
    only_loras = all(isinstance(function, Added) for function in functions)
    made = storage.matrix(policy) if only_loras else storage.wide(policy)
    made = made.clone() if made is weight else made
    for function in functions:
        made = function(made)
    return made.half()


def bias_of(module: Any, x: Tensor) -> Tensor | None:
    """A module's bias [n] in x's type, on its device, with the module's functions applied; None: it has
    none."""
    bias = module._parameters.get("bias")
    if bias is None:
        return None
    # Functions may write to what they are given, as ComfyUI's patches do.
    made: Tensor = bias.to(x.device, x.dtype, copy=bool(module.bias_function))
    for function in module.bias_function:
        made = function(made)
    return made.to(x.dtype)


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
    """The weights on the device, patched, each in its own dtype, or in fp32 if functions change
    it."""
    kind = torch.float32 if module.weight_function else module.weight.dtype
    own_bias = module._parameters.get("bias")
    of_bias = torch.float32 if own_bias is None or module.bias_function else own_bias.dtype
    weight, bias, stream = comfy.ops.cast_bias_weight(
        module, dtype=kind, device=device, bias_dtype=of_bias, offloadable=True, compute_dtype=torch.float32
    )
    try:
        yield Weights(weight, bias)
    finally:
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)


# --------------------------------------------------------------------------------------------------------------- packed


def packed(parts: Sequence[Weights]) -> Weights | None:
    """Several operations on one input as a single one, if their weights are adjacent: a view, no
    copy."""
    first = parts[0].weight
    if first is None or torch.compiler.is_compiling():
        return None
    # The answer is kept on the first tensor, with the addresses for which it holds.
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
    """The tensors as one view along the first dimension; None: they are not adjacent."""
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
    # Not a view of the first tensor, because the result is kept on that tensor and the reference
    # back would form a cycle.
    made = torch.empty(0, dtype=first.dtype, device=first.device)
    return made.set_(first.untyped_storage(), first.storage_offset(), (rows, *first.shape[1:]), first.stride())
