"""codes_to_int8: a weight of 4-bit or 6-bit codes, with a scale for each group, becomes rows of 8-bit numbers on arrival.

ComfyUI's `asym_w4a8_int8` files have weights so. Decoded they are those of an INT8 file, with a scale for each row that
stands beside them, and linear_int8 multiplies them. The maths, the layout and the access pattern stand at the head of
src/codes_to_int8.cu, how codes lie at that of src/codes.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_uint

import torch
from torch import Tensor

from ...call import Call, Plan
from ...launcher import Card, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_into, no_multiples, not_contiguous, ragged, word, wrong_dtype
from ..views.rows import row_class
from .codes import check_codes, decoded_shape, in_groups, unsigned

LARGEST = 127
CHUNK = 16  # kChunk
THREADS = 256  # kThreads
AT_ONCE = 4  # kAtOnce
MOST_CHUNKS = 2**32 - 1
BOOK = 16  # codes of 4 bits
COLUMNS = {4: CHUNK, 6: 2 * CHUNK}  # by bits: rows of a multiple of these start at multiples of 8 bytes
SCALES = {torch.float8_e4m3fn: "e4m3", torch.float32: "f32"}


def codes_to_int8(
    codes: Tensor,
    group_scales: Tensor,
    codebook: Tensor | None = None,
    *,
    bits: int,
    group: int = 16,
    out: Tensor | None = None,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """[n, k] int8: each code's value times its group's scale, limited to +-127 and rounded to nearest even; NaN is 0.

    codes         int8 [n, k * bits / 8], contiguous. 4 bits: two codes in a byte, the even column's in the lower four bits.
                  6 bits: the lower four bits of all columns so; behind them, four columns in a byte, the upper two bits
    group_scales  [n, k / group] float8_e4m3fn or fp32
    codebook      [16] fp32: the value of each code of 4 bits; None: the code less 8. Codes of 6 bits are those less 32
    bits          4 or 6
    group         columns of a scale: 4, 8 or a multiple of 16; k is a multiple of it
    out           int8 [n, k], contiguous, from a multiple of 16 bytes on: written instead of a new tensor, and returned.
                  Nothing is allocated then. The launch goes to torch's current stream. With mode `auto` the first call of a
                  shape is measured, which waits for the device; whoever streams forces `on`

    The product is fp32, rounded once before it is rounded to a whole number. Torch leaves open what a NaN is as int8.
    """
    if out is None:
        result: Tensor = CODES_TO_INT8((codes, group_scales, codebook), (bits, group), policy)
        return result
    CODES_TO_INT8_INTO((codes, group_scales, codebook, out), (bits, group), policy)
    return out


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(codes: Tensor, group_scales: Tensor, codebook: Tensor | None, bits: int, group: int) -> Tensor:
    """The kernel's bits. Stock decodes by the same operations."""
    counted = unsigned(codes, bits)
    values = counted.float() - 2 ** (bits - 1) if codebook is None else codebook.float()[counted]
    product = (in_groups(values, group) * group_scales.float()[..., None]).view(values.shape)
    return product.clamp(-LARGEST, LARGEST).round().nan_to_num(0.0).to(torch.int8)


def beside(call: Call) -> int:
    """Bytes that stock's way takes on the way: codes as integers, their values, and products."""
    n, k = decoded_shape(call.first, call.options[0])
    return 12 * n * k


def fake(codes: Tensor, group_scales: Tensor, codebook: Tensor | None, bits: int, group: int) -> Tensor:  # noqa: ARG001
    return codes.new_empty(decoded_shape(codes, bits))


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors CodesToInt8Params in src/codes_to_int8.cu.
CodesToInt8Params = parameter_struct(
    "CodesToInt8Params",
    (Pointer, "codes group_scales codebook out"),
    (c_uint, "chunks chunks_per_row chunks_per_group scales_per_chunk"),
)


def validate(call: Call) -> None:
    """Shapes and types that no implementation could serve."""
    codes, group_scales, codebook, *rest = call.operands
    bits, group = call.options
    if bits not in COLUMNS:
        raise ValueError(f"bits is {bits}, expected 4 or 6")
    if group not in (4, 8) and (group < CHUNK or group % CHUNK):
        raise ValueError(f"group is {group}, expected 4, 8 or a multiple of {CHUNK}")
    check_codes(codes, bits)
    n, k = decoded_shape(codes, bits)
    if k % group or group_scales.shape != (n, k // group):
        raise ValueError(f"group_scales: {list(group_scales.shape)} is not one for each {group} of {[n, k]}")
    if codebook is not None and (bits != 4 or codebook.shape != (BOOK,)):
        raise ValueError(
            f"codebook: {list(codebook.shape)} is not one value for each code of 4 bits, these have {bits}"
        )
    check_into(rest, (n, k), torch.int8, codes=codes, group_scales=group_scales, codebook=codebook)


def obstacles(call: Call) -> Iterator[str]:
    codes, group_scales, codebook, *rest = call.operands
    bits, _ = call.options
    n, k = decoded_shape(codes, bits)
    yield from wrong_dtype(SCALES, group_scales=group_scales)
    yield from wrong_dtype((torch.float32,), codebook=codebook)
    yield from not_contiguous(group_scales=group_scales, codebook=codebook)
    yield from no_multiples(COLUMNS[bits], k=k)
    if n * k // CHUNK > MOST_CHUNKS:
        yield f"{n * k} elements are more than {MOST_CHUNKS * CHUNK}"
    yield from ragged(8, codes=codes)
    yield from ragged(16, out=rest[0] if rest else None)


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix sizes, grid and kernel; what remains per call is the output and the pointers."""
    bits, group = call.options
    n, k = decoded_shape(call.first, bits)
    new_out = output((n, k), torch.int8, card.index)
    chunks = n * k // CHUNK
    if not chunks:
        return plan_of((), "codes group_scales codebook out", call.tensors, out=new_out)
    params = CodesToInt8Params(
        chunks=chunks,
        chunks_per_row=k // CHUNK,
        chunks_per_group=max(group // CHUNK, 1),
        scales_per_chunk=max(CHUNK // group, 1),
    )
    kernel = card.kernel("codes_to_int8", f"codes_to_int8_{bits}_{SCALES[call.operands[1].dtype]}")
    grid = (-(-chunks // (THREADS * AT_ONCE)), 1, 1)
    launch = kernel.prepare(params, grid=grid, block=THREADS, shape=call.describe())
    return plan_of(launch, "codes group_scales codebook out", call.tensors, out=new_out)


def shape_class(call: Call) -> str:
    codes, group_scales, codebook, *_ = call.operands
    bits, group = call.options
    values = "" if codebook is None else " by codebook"
    return f"{row_class(codes)} {bits} bits{values}, group {group} {word(group_scales)}"


KERNELS = {"codes_to_int8": tuple(f"codes_to_int8_{bits}_{scale}" for bits in COLUMNS for scale in SCALES.values())}

CODES_TO_INT8 = Op(
    name="codes_to_int8",
    schema="(Tensor codes, Tensor group_scales, Tensor? codebook, int bits, int group, str policy) -> Tensor",
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(reference, beside=beside)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)

CODES_TO_INT8_INTO = CODES_TO_INT8.into("codes_to_int8_into", at=3)
