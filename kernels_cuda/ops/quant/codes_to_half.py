"""codes_to_half: a weight of 4-bit codes, with a scale for each group, becomes fp16 on arrival.

ComfyUI's files have two such layouts. AWQ W4A16 has unsigned codes, scales and zeros. SVDQuant W4A4 has signed codes,
scales, and a factor for each column, which activations are divided by; what two narrow matrices beside them add is not
of this op. Its weights may lie in tiles, which codes.py puts in order. The maths, the layout and the access pattern
stand at the head of src/codes_to_half.cu, how codes lie at that of src/codes.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int, c_uint

import torch
from torch import Tensor

from ...call import Call, Plan
from ...launcher import MAX_GRID, Card, Pointer, output, parameter_struct
from ...plans import plan_of
from ...policy import STANDARD, KernelPolicy
from ...registry import CudaCandidate, Op, StockCandidate
from ..views.checks import check_vector, mixed_dtypes, not_contiguous, ragged, word, wrong_dtype
from ..views.half_range import saturated
from ..views.rows import MOST_ROWS, row_class
from .codes import check_codes, decoded_shape, in_groups, unsigned
from .integer_rows import unpacked

BITS = 4
ZERO = 8  # what is taken from an unsigned code
THREADS = 256  # kThreads
TILE_ROWS, TILE_COLUMNS = 16, 512  # kRows, kColumns
GROUPS = (32, 64, 128, 256, 512)  # that the kernels serve
TURNED_OVER = 0x88888888
TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def codes_to_half(
    codes: Tensor,
    group_scales: Tensor,
    zeros: Tensor | None = None,
    columns: Tensor | None = None,
    *,
    signed: bool,
    group: int = 64,
    policy: KernelPolicy = STANDARD,
) -> Tensor:
    """[n, k] fp16: (value * scale + zero) / column of each code.

    codes         int8 [n, k / 2], contiguous: two codes in a byte, the even column's in the lower four bits
    group_scales  [k / group, n] fp16 or bf16
    zeros         the same, of the same type; None: 0
    columns       [k] of the same type; None: 1
    signed        a code's value is its bits in two's complement; or, unsigned, the code less 8
    group         columns of a scale, which k is a multiple of

    Arithmetic is fp32, rounded to fp16 once; 1 / column is rounded to fp32 before. What is finite and beyond 65504 becomes
    +-65504.
    """
    result: Tensor = CODES_TO_HALF((codes, group_scales, zeros, columns), (signed, group), policy)
    return result


# ---------------------------------------------------------------------------------------------------------- the maths


def reference(
    codes: Tensor, group_scales: Tensor, zeros: Tensor | None, columns: Tensor | None, signed: bool, group: int
) -> Tensor:
    """The kernel's bits. Stock's operations, but in fp32: in the scales' type, as it has them, each would round."""
    values = unpacked(codes) if signed else unsigned(codes, BITS) - ZERO
    value = in_groups(values.float(), group) * group_scales.float().t()[..., None]
    if zeros is not None:
        value = value + zeros.float().t()[..., None]
    value = value.view(values.shape)
    if columns is not None:
        value = value * columns.float().reciprocal()
    return torch.where(value.isfinite(), saturated(value), value).half()


def beside(call: Call) -> int:
    """Bytes that stock's way takes on the way: fp32 numbers, and those of the next step."""
    n, k = decoded_shape(call.first, BITS)
    return 8 * n * k


def fake(
    codes: Tensor,
    group_scales: Tensor,  # noqa: ARG001 - codes say it all
    zeros: Tensor | None,  # noqa: ARG001
    columns: Tensor | None,  # noqa: ARG001
    signed: bool,  # noqa: ARG001
    group: int,  # noqa: ARG001
) -> Tensor:
    return codes.new_empty(decoded_shape(codes, BITS), dtype=torch.float16)


# --------------------------------------------------------------------------------------------------------- the kernel

# Mirrors CodesToHalfParams in src/codes_to_half.cu.
CodesToHalfParams = parameter_struct(
    "CodesToHalfParams",
    (Pointer, "codes group_scales zeros columns out"),
    (c_uint, "rows k tiles"),
    (c_int, "group_log2"),
    (c_uint, "turned_over"),
)


def validate(call: Call) -> None:
    """Shapes and types that no implementation could serve."""
    codes, group_scales, zeros, columns = call.operands
    group = call.options[1]
    check_codes(codes, BITS)
    n, k = decoded_shape(codes, BITS)
    if group < 1 or k % group:
        raise ValueError(f"group: rows of {k} do not divide into groups of {group}")
    for name, t in (("group_scales", group_scales), ("zeros", zeros)):
        if t is not None and t.shape != (k // group, n):
            raise ValueError(f"{name}: {list(t.shape)} is not [groups of {group}, rows] of {[n, k]}")
    check_vector("columns", columns, k)


def obstacles(call: Call) -> Iterator[str]:
    codes, group_scales, zeros, columns = call.operands
    _, group = call.options
    named = {"group_scales": group_scales, "zeros": zeros, "columns": columns}
    present = {name: t for name, t in named.items() if t is not None}
    yield from wrong_dtype(TYPES, **present)
    yield from mixed_dtypes(present)
    if group not in GROUPS:
        yield f"group is {group}, the kernels take {', '.join(map(str, GROUPS))}"
    yield from not_contiguous(group_scales=group_scales, zeros=zeros)
    yield from ragged(4, codes=codes)
    yield from ragged(16, columns=columns)
    if max(decoded_shape(codes, BITS)) > MOST_ROWS or _tiles(call) > MAX_GRID[0]:
        yield f"{call.describe()} is more than a launch can cover"


def plan(call: Call, card: Card, _tactic: object) -> Plan:
    """Fix sizes, grid and kernel; what remains per call is the output and the pointers."""
    signed, group = call.options
    n, k = decoded_shape(call.first, BITS)
    new_out = output((n, k), torch.float16, card.index)
    tiles = _tiles(call)
    if not tiles:
        return plan_of((), "codes group_scales zeros columns", call.tensors, out=new_out)
    params = CodesToHalfParams(
        rows=n,
        k=k,
        tiles=-(-k // TILE_COLUMNS),
        group_log2=group.bit_length() - 1,
        turned_over=TURNED_OVER if signed else 0,
    )
    kernel = card.kernel("codes_to_half", f"codes_to_half_{TYPES[call.operands[1].dtype]}")
    launch = kernel.prepare(params, grid=(tiles, 1, 1), block=THREADS, shape=call.describe())
    return plan_of(launch, "codes group_scales zeros columns", call.tensors, out=new_out)


def _tiles(call: Call) -> int:
    n, k = decoded_shape(call.first, BITS)
    return -(-n // TILE_ROWS) * -(-k // TILE_COLUMNS)


def shape_class(call: Call) -> str:
    codes, group_scales, zeros, columns = call.operands
    signed, group = call.options
    more = "".join(f" {name}" for name, t in (("zeros", zeros), ("columns", columns)) if t is not None)
    return f"{row_class(codes)} {'signed' if signed else 'unsigned'}, group {group} {word(group_scales)}{more}"


KERNELS = {"codes_to_half": tuple(f"codes_to_half_{name}" for name in TYPES.values())}

CODES_TO_HALF = Op(
    name="codes_to_half",
    schema=(
        "(Tensor codes, Tensor group_scales, Tensor? zeros, Tensor? columns, bool signed, int group, str policy) -> Tensor"
    ),
    reference=reference,
    fake=fake,
    candidates=(CudaCandidate("cuda", obstacles, plan), StockCandidate(reference, beside=beside)),
    shape_class=shape_class,
    validate=validate,
    kernels=KERNELS,
)
