"""dequantise: packed blocks, as GGUF files have them, become fp16.

The maths, the layout and the access pattern stand at the head of src/dequantise.cu, the types in packed_blocks.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int64, c_uint

import torch
from torch import Tensor

from ...call import Call, Plan, round_up
from ...launcher import MAX_GRID, Card, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_into, misplaced, scattered, word
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


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(packed: Tensor, encoding: str) -> Tensor:
    return unpacked(packed, encoding).half()


def fake(packed: Tensor, encoding: str) -> Tensor:
    return packed.new_empty(unpacked_shape(packed, encoding), dtype=torch.float16)


# --------------------------------------------------------------------------------------------------------- the kernel

DequantiseParams = parameter_struct(
    "DequantiseParams",
    (Pointer, "packed index out"),
    (c_int64, "rows blocks"),
    (c_uint, "chunks"),
)


def validate(call: Call) -> None:
    """Shapes and types that no implementation could serve."""
    packed, *rest = call.operands
    (encoding,) = call.options
    if packed.dtype is not torch.uint8:
        raise ValueError(f"packed: {word(packed)} {list(packed.shape)} is not uint8")
    check_into(rest, unpacked_shape(packed, encoding), torch.float16, packed=packed)


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    named = dict(zip(("packed", "out"), call.present, strict=False))
    yield from scattered(**named)
    yield from misplaced(**named)
    if _chunks(call) > MAX_GRID[0]:
        yield f"{call.describe()} is more than a launch can cover"


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix sizes, grid and kernel; what remains per call is the output and the pointers."""
    (encoding,) = call.options
    new_out = output(unpacked_shape(call.first, encoding), torch.float16, card.index)
    chunks = _chunks(call)
    if not chunks:
        return plan_of((), "packed out", call.tensors, out=new_out)
    params = DequantiseParams(rows=1, blocks=_blocks(call), chunks=chunks)
    kernel = card.kernel("dequantise", f"dequantise_{encoding}")
    launch = kernel.prepare(params, grid=(chunks, 1, 1), block=THREADS, shape=call.describe())
    return plan_of(launch, "packed out", call.tensors, out=new_out)


def _blocks(call: Call) -> int:
    """Of the whole tensor, which is one row."""
    return call.first.numel() // block_type(call.options[0]).bytes


def _chunks(call: Call) -> int:
    return math.ceil(_blocks(call) * block_type(call.options[0]).elements / CHUNK)


def shape_class(call: Call) -> str:
    return f"{call.options[0]}[1x{round_up(_blocks(call))}]"


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

DEQUANTISE_INTO = DEQUANTISE.into("dequantise_into", at=1)
