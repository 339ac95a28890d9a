"""few_rows: one to sixteen rows times a weight that stays as it is stored, packed or not.

The maths, the layout and the access pattern stand at the head of src/few_rows.cu, the packed types in packed_blocks.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int, c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call, Plan, round_up
from ...launcher import Card, Launch, Pointer, output, parameter_struct
from ...plans import floats, plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..quant.packed_blocks import BLOCK_TYPES, unpacked, unpacked_shape
from ..quant.to_half import reference as as_half
from ..views.checks import (
    check_one_of,
    check_result,
    check_scale,
    check_vector,
    misplaced,
    scattered,
    word,
    wrong_dtype,
)
from ..views.parts import PARTS

MOST_ROWS = 16  # of x: two tiles of a tensor core
ROWS = 16  # kRows: of the weight, of a block of threads
THREADS = 256  # kThreads
WARPS = THREADS // 32  # kWarps: they share the steps
TOKEN_ROWS = 2  # of x, that a token's kernel takes
RESIDENT = 2  # of its blocks, on a multiprocessor
# What is not packed, by the names that files have for it.
PLAIN = {
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SCALED = ("I8", "F8_E4M3", "F8_E5M2")
WRITTEN = (torch.float16, torch.float32)


class Step(NamedTuple):
    """What a warp takes of a row at a time."""

    elements: int
    bytes: int


STEPS = {
    **{name: Step(256, BLOCK_TYPES[name].bytes * 256 // BLOCK_TYPES[name].elements) for name in ("Q4_0", "Q8_0")},
    **{name: Step(256, BLOCK_TYPES[name].bytes) for name in ("Q4_K", "Q5_K", "Q6_K")},
    **dict.fromkeys(("I8", "F8_E4M3", "F8_E5M2"), Step(256, 256)),
    **dict.fromkeys(("F16", "BF16"), Step(128, 256)),
}


def few_rows(
    x: Tensor,
    weight: Tensor,
    encoding: str,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
    joined: bool = False,
    out_dtype: torch.dtype | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """residual + factor * x @ weight^T * scale + bias, each part optional: rounded once, to x's type.

    x          [..., k] fp16, contiguous; the kernels take up to 16 rows
    weight     of n rows and k columns: [n, bytes of a row] uint8 of packed blocks, or [n, k] of a type in PLAIN; contiguous, from
               a multiple of 16 bytes on. bf16 counts as the fp16 that it becomes, which saturates
    encoding   what the weight is: a name of BLOCK_TYPES or of PLAIN (the kernels have those of STEPS)
    scale      one element, [n] or [n, 1] fp32: what the rows of an int8 or fp8 weight are multiplied by
    bias       [n], fp16 or fp32
    residual   like the result, fp16 or fp32, contiguous
    factor     a power of two
    joined     x is [2, ..., k], two parts of what is multiplied, whose products are added up: the result is [..., n]
    out_dtype  fp32 instead of x's type: the sums as they are
    """
    result: Tensor = FEW_ROWS((x, weight, scale, bias, residual), (encoding, factor, joined, out_dtype), policy)
    return result


def few_rows_serves(shape: Sequence[int], encoding: str) -> bool:
    """Whether the kernels take an x of this shape, [..., k], and a weight of this encoding."""
    return encoding in STEPS and math.prod(shape[:-1]) <= MOST_ROWS and shape[-1] % STEPS[encoding].elements == 0


# ---------------------------------------------------------------------------------------------------------- the maths


def weight_shape(weight: Tensor, encoding: str) -> tuple[int, ...]:
    """[n, k]."""
    return tuple(weight.shape) if encoding in PLAIN else unpacked_shape(weight, encoding)


def numbers(weight: Tensor, encoding: str, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight, [n, k] in this type."""
    if encoding not in PLAIN:
        return unpacked(weight, encoding, dtype)
    found = (as_half(weight, None) if encoding == "BF16" else weight).to(dtype)
    return found if scale is None else found * scale.to(dtype).reshape(-1, 1)


def compute(
    value: Tensor, bias: Tensor | None, residual: Tensor | None, factor: float = 1.0, *, joined: bool = False
) -> Tensor:
    if joined:
        value = value[0] + value[1]
    if factor != 1:
        value = value * factor
    if bias is not None:
        value = value + bias.to(value.dtype)
    return value if residual is None else value + residual.to(value.dtype)


def reference(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None, encoding: str,
    factor: float = 1.0, joined: bool = False, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The oracle, in fp32 or, for float64 inputs, in float64."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    value = x.to(dtype) @ numbers(weight, encoding, scale, dtype).t()
    return compute(value, bias, residual, factor, joined=joined).to(
        x.dtype if dtype is torch.float64 else out_dtype or x.dtype
    )


def stock(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None, encoding: str,
    factor: float = 1.0, joined: bool = False, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """What has no kernel for it runs: the weight becomes numbers of the result's type, then cuBLAS."""
    dtype = out_dtype or x.dtype
    plain = numbers(weight, encoding, scale, torch.float32).to(dtype)
    alone = bias is not None and not joined and factor == 1
    value = functional.linear(x.to(dtype), plain, bias.to(dtype) if alone and bias is not None else None)
    return compute(value, None if alone else bias, residual, factor, joined=joined).to(dtype)


def fake(x: Tensor, weight: Tensor, *given: Any) -> Tensor:
    *_, joined, out_dtype = given
    return x.new_empty((*leading(x, joined=joined), weight.shape[0]), dtype=out_dtype or x.dtype)


def leading(x: Tensor, *, joined: bool) -> tuple[int, ...]:
    """Of the result's shape, without its rows' length."""
    return tuple(x.shape[1:-1] if joined else x.shape[:-1])


# --------------------------------------------------------------------------------------------------------- the kernel

FewRowsParams = parameter_struct(
    "FewRowsParams",
    (Pointer, "weight x scale bias residual out"),
    (c_int64, "row_bytes"),
    (c_float, "factor"),
    (c_int, "m n k steps scale_step joined bias_is_float residual_is_float out_is_float"),
)


def validate(call: Call) -> None:
    """Shapes and types that no implementation could serve."""
    x, weight, scale, bias, residual = call.operands
    encoding, factor, joined, out_dtype = call.options
    check_scale(factor)
    check_one_of("encoding", encoding, (*BLOCK_TYPES, *PLAIN))
    wanted = PLAIN.get(encoding, torch.uint8)
    if weight.dtype is not wanted:
        raise ValueError(f"weight: {word(weight)} {list(weight.shape)} is not {word(wanted)}, as {encoding} is")
    shape = weight_shape(weight, encoding)
    if len(shape) != 2:
        raise ValueError(f"weight: {list(weight.shape)} is not [n, k], nor n packed rows")
    n, k = shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise ValueError(f"x: {list(x.shape)} does not go with {encoding} rows of {k}")
    if joined and (x.ndim < 2 or x.shape[0] != PARTS):
        raise ValueError(f"x: {list(x.shape)} is not [2, ..., {k}], two parts of what is multiplied")
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype is {word(out_dtype)}, expected float32 or x's own")
    if scale is not None and (encoding not in SCALED or not (scale.numel() == 1 or scale.shape in ((n,), (n, 1)))):
        raise ValueError(f"scale: {list(scale.shape)} is not one for each of {n} rows of I8 or fp8, but of {encoding}")
    check_vector("bias", bias, n)
    check_result("residual", residual, (*leading(x, joined=joined), n))


def obstacles(call: Call) -> Iterator[str]:
    """What keeps the kernels from serving a call."""
    x, weight, scale, bias, residual = call.operands
    encoding = call.options[0]
    if encoding not in STEPS:
        yield f"weights are {encoding}, the kernels take {', '.join(STEPS)}"
    yield from wrong_dtype((torch.float16,), x=x)
    yield from wrong_dtype((torch.float32,), scale=scale)
    yield from wrong_dtype(WRITTEN, bias=bias, residual=residual)
    yield from scattered(x=x, weight=weight, scale=scale, bias=bias, residual=residual)
    yield from misplaced(x=x, weight=weight)
    if _rows(x) > MOST_ROWS:
        yield f"x has {_rows(x)} rows, the kernels take up to {MOST_ROWS}"
    if x.shape[-1] % STEPS[encoding].elements:
        yield f"rows are {x.shape[-1]} long, no multiple of {STEPS[encoding].elements}"
    if weight.shape[0] > 2**30 or x.shape[-1] > 2**26:
        yield "rows or columns by the thousand million"


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix sizes, grid and kernel; what remains per call is the output and the pointers."""
    x, weight, *_ = call.operands
    *_, joined, out_dtype = call.options
    new_out = output((*leading(x, joined=joined), weight.shape[0]), out_dtype or x.dtype, card.index)
    launches = [_prepare(call, card)] if _rows(x) * weight.shape[0] else []
    return plan_of(launches, "x weight scale bias residual", call.tensors, out=new_out)


def _prepare(call: Call, card: Card) -> Launch:
    x, weight, scale, bias, residual = call.operands
    encoding, factor, joined, out_dtype = call.options
    m, n, k = _rows(x), weight.shape[0], x.shape[-1]
    step = STEPS[encoding]
    params = FewRowsParams(
        row_bytes=k // step.elements * step.bytes,
        m=m,
        n=n,
        k=k,
        steps=k // step.elements,
        factor=factor,
        scale_step=scale is not None and scale.numel() > 1,
        joined=m // PARTS if joined else 0,
        out_is_float=out_dtype is torch.float32,
        **floats(bias=bias, residual=residual),
    )
    columns, blocks = kernel_for(m, n, params.steps, card.multiprocessors)
    kernel = card.kernel("few_rows", f"few_rows_{encoding}_{columns}")
    return kernel.prepare(params, grid=(blocks, 1, 1), block=THREADS, shape=call.describe())


def kernel_for(m: int, n: int, steps: int, multiprocessors: int) -> tuple[int, int]:
    """Which kernel: the columns that it makes; and how many blocks it has. A token's has as many as run at once."""
    tiles = -(-n // ROWS)
    if m <= TOKEN_ROWS and n % ROWS == 0 and steps >= WARPS:
        return TOKEN_ROWS, min(tiles, RESIDENT * multiprocessors)
    return (8 if m <= 8 else 16), tiles


def shape_class(call: Call) -> str:
    x, weight, *_ = call.operands
    encoding, _, joined, out_dtype = call.options
    asked = f"{' joined' if joined else ''}{' float32' if out_dtype is torch.float32 else ''}"
    return f"{encoding} {round_up(_rows(x))}x{weight.shape[0]}x{x.shape[-1]}{asked}"


FEW_ROWS = Op(
    name="few_rows",
    schema=(
        "(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, str encoding, float factor, bool joined, "
        "ScalarType? out_dtype, str policy) -> Tensor"
    ),
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(stock)),
    shape_class=shape_class,
    validate=validate,
    kernels={
        "few_rows": tuple(f"few_rows_{encoding}_{columns}" for encoding in STEPS for columns in (TOKEN_ROWS, 8, 16))
    },
)
