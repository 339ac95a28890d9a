"""Numbers in ggml's blocks, unpacked to fp16 for callers that cannot use the packed form
(`ggml_tensor.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels_cuda import STANDARD, KernelPolicy, dequantise
from ...memory import Encoding, Extent
from ...memory.layer import DTYPES

UNPACKED = torch.float16
# On a device the kernel is not chosen by timing, because the pager's copies must not wait.
AT_ONCE = KernelPolicy.of("on")


def type_of(extent: Extent) -> torch.dtype | None:
    """The torch type of a file's tensor, fp16 for a packed one; None: torch has no such type."""
    return UNPACKED if extent.is_packed else DTYPES.get(extent.dtype)


def unpacked(stored: Tensor, encoding: str, out: Tensor | None = None) -> Tensor:
    """Unpack adjacent blocks, uint8 [bytes], to fp16 [numbers], into `out` if given."""
    return dequantise(stored, encoding, out=out, policy=AT_ONCE if stored.is_cuda else STANDARD)


def numbers(stored: Tensor, extent: Extent) -> Tensor:
    """A tensor's bytes from its file, uint8 [bytes], as numbers in its shape. Unpacked numbers are
    not copied."""
    kind = type_of(extent)
    assert kind is not None, f"{extent.name} is of type {extent.dtype}"
    if extent.is_packed:
        return unpacked(stored, extent.dtype).view(extent.shape)
    return stored.view(kind).view(extent.shape)


def rows(stored: Tensor, extent: Extent) -> Tensor:
    """Some rows of a table: uint8 [bytes of these rows] becomes [rows, width]."""
    kind = type_of(extent)
    assert kind is not None, f"{extent.name} is of type {extent.dtype}"
    found = unpacked(stored, extent.dtype) if extent.is_packed else stored.view(kind)
    return found.view(-1, extent.shape[-1])


def convert(stored: Tensor, out: Tensor, encoding: Encoding) -> None:
    """The pager's conversion of a tensor that comes packed, in another type or in another order."""
    if not encoding.is_packed:
        out.copy_(stored)
    elif out.dtype is UNPACKED and out.is_contiguous():
        unpacked(stored, encoding.name, out.view(-1))
    else:
        out.copy_(unpacked(stored, encoding.name).view(out.shape))
