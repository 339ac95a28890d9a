"""dequantise: packed blocks, as GGUF files have them, become fp16; dequantise_rows: chosen rows of a packed table.

The maths, the layout and the access pattern stand at the head of src/dequantise.cu, the types in packed_blocks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from ctypes import c_int64, c_uint

import torch
from torch import Tensor

from ...call import Call, Plan, round_up
from ...launcher import (
    MAX_GRID,
    Card,
    Launch,
    Pointer,
    output,
    parameter_struct,
)
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_written, word
from .packed_blocks import BLOCK_TYPES, block_type, unpacked, unpacked_shape

THREADS = 256  # kThreads
CHUNK = THREADS * 4 * 8  # kElements: what a block of threads makes


def dequantise(packed: Tensor, encoding: str, *, out: Tensor | None = None, policy: KernelPolicy = STANDARD) -> Tensor:
    """Rows of blocks as fp16: [..., bytes of a row] becomes [..., elements].

    packed    uint8, contiguous, from a multiple of 16 bytes on
    encoding  a name of BLOCK_TYPES, such as "Q4_K"
    out       fp16, contiguous, of the result's shape, from a multiple of 16 bytes on: written instead of a new tensor, and
              returned. Nothing is allocated then. The launch goes to torch's current stream. With mode `auto` the first
              call of a shape is measured, which waits for the device; whoever streams forces `on`

    The formula in fp32, rounded to fp16 once: the bits that numpy makes of it.
    """
    if out is None:
        result: Tensor = DEQUANTISE((packed,), (encoding,), policy)
        return result
    DEQUANTISE_INTO((packed, out), (encoding,), policy)
    return out


def dequantise_rows(packed: Tensor, encoding: str, index: Tensor, *, policy: KernelPolicy = STANDARD) -> Tensor:
    """Chosen rows of a table of packed rows, as fp16: [*index's shape, elements].

    packed    [rows, bytes of a row], uint8, contiguous, from a multiple of 16 bytes on
    index     int64, of any shape. One that is not in the table is an IndexError on the CPU, and a row of NaN on a card
    """
    result: Tensor = DEQUANTISE_ROWS((packed, index), (encoding,), policy)
    return result


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(packed: Tensor, encoding: str) -> Tensor:
    return unpacked(packed, encoding).half()


def fake(packed: Tensor, encoding: str) -> Tensor:
    return packed.new_empty(unpacked_shape(packed, encoding), dtype=torch.float16)


def reference_into(packed: Tensor, out: Tensor, encoding: str) -> None:
    out.copy_(reference(packed, encoding))


def fake_into(packed: Tensor, out: Tensor, encoding: str) -> None:
    check_out(packed, out, encoding)


def stock_rows(packed: Tensor, index: Tensor, encoding: str) -> Tensor:
    return reference(packed[index], encoding)


def reference_rows(packed: Tensor, index: Tensor, encoding: str) -> Tensor:
    if index.device.type == "cpu" and bool((index < 0).any()):  # torch would count from the end
        raise IndexError(f"index {int(index.min())} is not in a table of {packed.shape[0]} rows")
    return stock_rows(packed, index, encoding)


def fake_rows(packed: Tensor, index: Tensor, encoding: str) -> Tensor:
    return packed.new_empty((*index.shape, unpacked_shape(packed, encoding)[-1]), dtype=torch.float16)


def check_out(packed: Tensor, out: Tensor, encoding: str) -> None:
    shape = unpacked_shape(packed, encoding)
    if out.shape != shape or out.dtype is not torch.float16:
        raise ValueError(f"out: {out.dtype} {list(out.shape)} cannot take {list(shape)} as float16")


# --------------------------------------------------------------------------------------------------------- the kernel

DequantiseParams = parameter_struct(
    "DequantiseParams",
    (Pointer, "packed index out"),
    (c_int64, "rows blocks"),
    (c_uint, "chunks"),
)


def validate(call: Call) -> None:
    """Shapes and types that no implementation could serve."""
    packed, *rest = call.tensors
    (encoding,) = call.options
    assert packed is not None
    if packed.dtype is not torch.uint8:
        raise ValueError(f"packed: {word(packed)} {list(packed.shape)} is not uint8")
    unpacked_shape(packed, encoding)
    if call.op == "dequantise_into":
        assert rest[0] is not None
        check_out(packed, rest[0], encoding)
        check_written({"out": rest[0]}, {"packed": packed})
    if call.op == "dequantise_rows":
        index = rest[0]
        assert index is not None
        if packed.ndim != 2:
            raise ValueError(f"packed: {list(packed.shape)} is not a table, [rows, bytes]")
        if index.dtype is not torch.int64:
            raise ValueError(f"index: {word(index)} {list(index.shape)} is not int64")


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    names = {"dequantise": ("packed",), "dequantise_into": ("packed", "out"), "dequantise_rows": ("packed", "index")}
    for name, t in zip(names[call.op], call.present, strict=True):
        if not t.is_contiguous():
            yield f"{name} is not contiguous (strides {t.stride()})"
        if name != "index" and t.data_ptr() % 16:
            yield f"{name} does not start at a multiple of 16 bytes"
    if math.prod(_grid(call)) > MAX_GRID[0]:
        yield f"{call.describe()} is more than a launch can cover"


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix sizes, grid and kernel; what remains per call is the output and the pointers."""
    launch = _prepare(call, card)
    packed, *rest = call.tensors
    (encoding,) = call.options
    assert packed is not None
    if call.op == "dequantise_into":

        def into(packed: Tensor, out: Tensor) -> None:
            launch(packed.data_ptr(), 0, out.data_ptr())

        return into
    if call.op == "dequantise_rows":
        assert rest[0] is not None
        new_rows = output(fake_rows(packed, rest[0], encoding).shape, torch.float16, card.index)

        def of_rows(packed: Tensor, index: Tensor) -> Tensor:
            out = new_rows()
            launch(packed.data_ptr(), index.data_ptr(), out.data_ptr())
            return out

        return of_rows
    new_out = output(unpacked_shape(packed, encoding), torch.float16, card.index)

    def run(packed: Tensor) -> Tensor:
        out = new_out()
        launch(packed.data_ptr(), 0, out.data_ptr())
        return out

    return run


def _nothing(*_: int) -> None:
    """The launch for a tensor without elements."""


def _rows_and_blocks(call: Call) -> tuple[int, int]:
    """How many rows are made, and the blocks of each. A whole tensor is one row."""
    packed, *rest = call.tensors
    assert packed is not None
    size = block_type(call.options[0]).bytes
    if call.op == "dequantise_rows":
        assert rest[0] is not None
        return rest[0].numel(), packed.shape[-1] // size
    return 1, packed.numel() // size


def _grid(call: Call) -> tuple[int, int]:
    """Rows, and the chunks of each."""
    rows, blocks = _rows_and_blocks(call)
    return rows, math.ceil(blocks * block_type(call.options[0]).elements / CHUNK)


def _prepare(call: Call, card: Card) -> Launch | Callable[..., None]:
    packed = call.tensors[0]
    assert packed is not None
    rows, chunks = _grid(call)
    if rows * chunks == 0:
        return _nothing
    table = packed.shape[0] if call.op == "dequantise_rows" else 1
    params = DequantiseParams(rows=table, blocks=_rows_and_blocks(call)[1], chunks=chunks)
    kernel = card.kernel("dequantise", f"dequantise_{call.options[0]}")
    return kernel.prepare(params, grid=(rows * chunks, 1, 1), block=THREADS, shape=call.describe())


def shape_class(call: Call) -> str:
    rows, blocks = _rows_and_blocks(call)
    return f"{call.options[0]}[{round_up(rows)}x{round_up(blocks)}]"


KERNELS = {"dequantise": tuple(f"dequantise_{encoding}" for encoding in BLOCK_TYPES)}

# Stock reads no GGUF file; what other packs run is a chain of torch's operations, as the reference is.
DEQUANTISE = Op(
    name="dequantise",
    schema="(Tensor packed, str encoding, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(reference)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)

DEQUANTISE_INTO = Op(
    name="dequantise_into",
    schema="(Tensor packed, Tensor(a!) out, str encoding, str policy) -> ()",
    reference=reference_into,
    fake=fake_into,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(reference_into)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)

DEQUANTISE_ROWS = Op(
    name="dequantise_rows",
    schema="(Tensor packed, Tensor index, str encoding, str policy) -> Tensor",
    reference=reference_rows,
    fake=fake_rows,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock_rows)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)
