"""A packed matrix as one of stock's quantised tensors, with ggml's blocks as they are in the file.

Stock's operations know quantised tensors. Where they have no product for one they dequantise it, by
the layout's own function. So a packed matrix computes wherever a tensor does, in stock's blocks and
in ours, and is unpacked only for the duration of a product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import comfy.quant_ops
import torch
from comfy.quant_ops import QuantizedTensor, register_layout_class
from torch import Tensor

from ...kernels_cuda import few_rows, few_rows_serves
from ...memory import Extent
from ...memory.encoding import ENCODINGS
from .ggml_blocks import AT_ONCE, unpacked

NAME = "FuseStreamPackedLayout"
# Without comfy-kitchen stock has no quantised tensors, so packed matrices are unpacked on arrival.
CAN_HOLD = hasattr(QuantizedTensor, "dequantize")
# Stock's base class for layouts, which answers for those that have nothing of their own to say.
LAYOUT: Any = getattr(comfy.quant_ops, "QuantizedLayout", object)


@dataclass(frozen=True)
class PackedParams:
    """encoding: name of a ggml type. orig_dtype, orig_shape: of the matrix, as stock calls them."""

    encoding: str
    orig_dtype: torch.dtype
    orig_shape: tuple[int, ...]

    def to_device(self, _device: torch.device) -> PackedParams:
        return self

    def clone(self) -> PackedParams:
        return replace(self)

    def copy_from(self, source: PackedParams, non_blocking: bool = False) -> None:  # noqa: ARG002 - stock's signature
        if (source.encoding, source.orig_shape) != (self.encoding, self.orig_shape):
            raise ValueError(
                f"{source.encoding} {source.orig_shape} does not go into {self.encoding} {self.orig_shape}"
            )


class PackedLayout(LAYOUT):
    """The layout as stock asks for it. qdata: uint8 [bytes]."""

    Params = PackedParams

    @classmethod
    def quantize(cls, tensor: Tensor, **_options: Any) -> Any:
        raise NotImplementedError(f"{list(tensor.shape)}: nothing is packed while a model runs")

    @classmethod
    def dequantize(cls, qdata: Tensor, params: PackedParams) -> Tensor:
        return unpacked(qdata, params.encoding).view(params.orig_shape).to(params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: Any) -> tuple[Tensor, ...]:
        return (qtensor._qdata,)

    @classmethod
    def state_dict_tensors(cls, qdata: Tensor, params: PackedParams) -> dict[str, Tensor]:
        return {"": cls.dequantize(qdata, params)}

    @classmethod
    def requantize_kwargs(cls, _qtensor: Any) -> dict[str, Any]:
        return {}

    @classmethod
    def supports_fast_matmul(cls) -> bool:
        return False

    @classmethod
    def linear_input_act(cls, weight: Any, x: Tensor, *_more: Any, **_options: Any) -> Any:  # noqa: ARG003
        """Decline newer stock's product of an activated input: stock computes activation and
        product itself."""
        return NotImplemented

    @classmethod
    def optimize_for_gemv(cls, weight: Any, storage: Tensor) -> Any:  # noqa: ARG003 - stock's signature
        """Return the weight as it is, because our product of a few rows reads it so."""
        return weight


def _linear(weight: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., k] @ weight^T + bias. A few rows on a card, as while text is being written, are
    multiplied with the blocks as stored; otherwise the weight is unpacked for this call."""
    encoding = weight._params.encoding
    if x.is_cuda and x.dtype is torch.float16 and few_rows_serves(x.shape, encoding):
        stored = in_rows(weight)
        if stored is not None:
            return few_rows(x.contiguous(), stored, encoding, bias=bias, policy=AT_ONCE)
    return torch.nn.functional.linear(x, weight.dequantize().to(x.dtype), bias)


def _on_linear(_first: Any, args: Any, kwargs: Any) -> Any:
    """Serve aten.linear for the layout, with the signature that stock calls."""
    x, weight, bias = (*args, *kwargs.values(), None)[:3]
    if isinstance(x, QuantizedTensor):
        x = x.dequantize()
    return _linear(weight, x, bias) if is_held(weight) else torch.nn.functional.linear(x, weight, bias)


register_layout_class(NAME, PackedLayout)
if CAN_HOLD:
    from comfy.quant_ops import register_layout_op

    register_layout_op(torch.ops.aten.linear.default, PackedLayout)(_on_linear)


def held(stored: Tensor, extent: Extent, dtype: torch.dtype) -> Any:
    """A packed tensor of a file, uint8 [bytes], as a quantised tensor of this type and the file's
    shape."""
    return QuantizedTensor(stored, NAME, PackedParams(extent.dtype, dtype, tuple(extent.shape)))


def is_held(tensor: Any) -> bool:
    """Whether a tensor is a packed matrix of this layout."""
    return isinstance(tensor, QuantizedTensor) and tensor._layout_cls == NAME


def half(tensor: Any) -> Tensor:
    """The matrix as a new fp16 tensor in its shape."""
    found: Tensor = unpacked(tensor._qdata, tensor._params.encoding).view(tensor._params.orig_shape)
    return found


def in_rows(tensor: Any) -> Tensor | None:
    """The bytes row by row, uint8 [n, bytes of a row]; None: a row is not a whole number of blocks,
    as in GGUF files of U-Nets, whose narrow matrices are packed in rows of 256."""
    params = tensor._params
    n, *rest = params.orig_shape
    if math.prod(rest) % ENCODINGS[params.encoding].elements:
        return None
    found: Tensor = tensor._qdata.view(n, -1)
    return found


def rows(tensor: Any, numbers: Tensor) -> Tensor:
    """The rows of a packed matrix with these numbers [n]: fp16 [n, width]."""
    params = tensor._params
    stored = tensor._qdata.view(params.orig_shape[0], -1).index_select(0, numbers)
    return unpacked(stored.view(-1), params.encoding).view(-1, params.orig_shape[1])
