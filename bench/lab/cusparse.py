"""cuSPARSE's product of a weight in compressed rows or columns with dense activations: torch calls it for rows alone."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ...gpu.streams import raw_stream

INDEX_32, BASE_ZERO, PLAIN = 2, 0, 0  # cusparseIndexType_t, cusparseIndexBase_t, cusparseOperation_t
FLOAT, HALF = 0, 2  # cudaDataType
BY_COLUMNS = 1  # cusparseOrder_t
DEFAULT = 0  # cusparseSpMMAlg_t


@functools.cache
def library() -> ctypes.CDLL:
    """The library that torch has loaded."""
    return ctypes.CDLL("libcusparse.so.12")


def call(name: str, *arguments: Any) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with {status}")


@functools.cache
def handle() -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    call("cusparseCreate", ctypes.byref(made))
    return made


def pointer(t: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())


def dense(t: Tensor) -> ctypes.c_void_p:
    """[rows, k] with adjacent elements as the library sees it: k rows, by columns."""
    made, (rows, k) = ctypes.c_void_p(), t.shape
    sizes = (ctypes.c_int64(size) for size in (k, rows, k))
    call("cusparseCreateDnMat", ctypes.byref(made), *sizes, pointer(t), HALF, BY_COLUMNS)
    return made


class SparseProduct:
    """x [m, k] fp16 times a weight [n, k] in CSR or CSC with 32-bit indices, into [m, n] fp16; sums are fp32."""

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self.x, self.weight = x, weight
        (n, k), m = weight.shape, x.shape[0]
        by_rows = weight.layout is torch.sparse_csr
        parts = (
            (weight.crow_indices(), weight.col_indices()) if by_rows else (weight.ccol_indices(), weight.row_indices())
        )
        self.parts = (*parts, weight.values())
        self.out = torch.empty(m, n, dtype=torch.float16, device=x.device)
        self.sparse = ctypes.c_void_p()
        sizes = (ctypes.c_int64(size) for size in (n, k, len(self.parts[2])))
        create = "cusparseCreateCsr" if by_rows else "cusparseCreateCsc"
        places = (pointer(part) for part in self.parts)
        call(create, ctypes.byref(self.sparse), *sizes, *places, INDEX_32, INDEX_32, BASE_ZERO, HALF)
        self.operands = self.sparse, dense(x), dense(self.out)
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)
        size = ctypes.c_size_t()
        self._product("cusparseSpMM_bufferSize", ctypes.byref(size))
        self.buffer = torch.empty(max(size.value, 1), dtype=torch.uint8, device=x.device)

    def _product(self, name: str, last: Any) -> None:
        sparse, x, out = self.operands
        one, zero = ctypes.byref(self.one), ctypes.byref(self.zero)
        call("cusparseSetStream", handle(), ctypes.c_void_p(raw_stream(self.x.device.index or 0)))
        call(name, handle(), PLAIN, PLAIN, one, sparse, x, zero, out, FLOAT, DEFAULT, last)

    def __call__(self) -> Tensor:
        self._product("cusparseSpMM", pointer(self.buffer))
        return self.out
