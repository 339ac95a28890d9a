"""A packed matrix as one of stock's quantised tensors: ggml's blocks as they lie in the file, and what they are to be taken for.

Stock's operations know quantised tensors. What they have no product for they dequantise, by the layout's own function, so a packed
matrix computes wherever a tensor does, in stock's blocks as in ours, and never becomes another one but for the moment of a product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor, register_layout_class
from torch import Tensor

from ..memory import Extent
from .packed import unpacked

NAME = "FuseStreamPackedLayout"
# Without comfy-kitchen stock has no quantised tensors: packed matrices are then unpacked as they arrive.
CAN_HOLD = hasattr(QuantizedTensor, "dequantize")


@dataclass(frozen=True)
class PackedParams:
    """encoding: a name of ggml's types. orig_dtype, orig_shape: of the matrix that the bytes are, as stock calls them."""

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


class PackedLayout:
    """What stock asks of a layout. qdata: uint8 [bytes]."""

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


register_layout_class(NAME, PackedLayout)


def held(stored: Tensor, extent: Extent, dtype: torch.dtype) -> Any:
    """A packed tensor of a file, uint8 [bytes], as a quantised one of this type and its own shape."""
    return QuantizedTensor(stored, NAME, PackedParams(extent.dtype, dtype, tuple(extent.shape)))


def is_held(tensor: Any) -> bool:
    """Whether a tensor is one of these."""
    return isinstance(tensor, QuantizedTensor) and tensor._layout_cls == NAME


def half(tensor: Any) -> Tensor:
    """What it is, fp16 in its shape: a new tensor."""
    found: Tensor = unpacked(tensor._qdata, tensor._params.encoding).view(tensor._params.orig_shape)
    return found
