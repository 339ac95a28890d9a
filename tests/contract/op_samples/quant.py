"""How weights are stored, and back."""

from __future__ import annotations

import numpy as np
import torch
from contract.op_contract import BF16, HALF, LARGEST, SINGLE, Contract, Draw, Operands, ones
from gguf import GGMLQuantizationType
from gguf import dequantize as by_gguf
from torch import Tensor

from fusestream.kernels_cuda import (
    codes_to_half,
    codes_to_int8,
    dequantise,
    int8_to_half,
    rows_to_int4,
    rows_to_int8,
    to_half,
)
from fusestream.kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES
from fusestream.kernels_cuda.ops.quant.rotation import GROUPS

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def turned(x: Tensor, group: int) -> Tensor:
    """Each group of a row times ConvRot's matrix: a Kronecker power of the regular one of 4, over its root."""
    if not group:
        return x
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64) / 2
    whole = four
    while len(whole) < group:
        whole = torch.kron(whole, four)
    return (x.unflatten(-1, (-1, group)) @ whole).flatten(-2)


def _stored(draw: Draw) -> Operands:
    rows, cols = draw.size(1, 5), draw.size(1, 9)
    x = draw.apart(draw.normal(rows, cols, dtype=draw.of(torch.bfloat16, SINGLE, *FP8), scale=draw.of(1.0, 30.0)))
    shape = draw.of(None, (), (1,), (rows,), (rows, 1))
    return {
        "x": x,
        "scale": None if shape is None else draw.normal(*shape, scale=2.0 ** draw.of(-12, 0, 12), dtype=SINGLE),
    }


def _halved(x: Tensor, scale: Tensor | None) -> Tensor:
    """What is finite and does not fit becomes the largest number."""
    by = torch.ones(()) if scale is None else scale.double()
    by = by.reshape(()) if by.numel() == 1 else by.reshape(-1, *[1] * (x.ndim - 1))
    value = x.double() * by
    return torch.where(x.double().isfinite() & by.isfinite(), value.clamp(-LARGEST, LARGEST), value)


def _packed(draw: Draw) -> Operands:
    """Any bytes at all: scales that are Inf, NaN and denormal among them."""
    encoding = draw.of(*BLOCK_TYPES)
    shape = *draw.of((), (draw.size(1, 4),)), draw.size(1, 7) * BLOCK_TYPES[encoding].bytes
    return {"packed": draw.whole(*shape, low=0, high=256, dtype=torch.uint8), "encoding": encoding}


def gguf_numbers(packed: Tensor, encoding: str) -> Tensor:
    """As the gguf package has them, in float64."""
    kind = BLOCK_TYPES[encoding]
    if not packed.numel():
        return torch.empty(*packed.shape[:-1], packed.shape[-1] // kind.bytes * kind.elements, dtype=torch.float64)
    with np.errstate(all="ignore"):
        return torch.from_numpy(by_gguf(packed.numpy(), GGMLQuantizationType[encoding])).double()


def _rounded(draw: Draw) -> Operands:
    group = draw.of(0, *GROUPS)
    rows, k = draw.size(1, 7), draw.of(1, 2) * (group or draw.of(1, 8, 40))
    scale = draw.uniform(*draw.of((), (1,), (rows,), (rows, 1))) * draw.of(1.0, 300.0)
    return {"x": draw.whole(rows, k, low=-128, high=128), "scale": scale, "rotation": group}


def _unrounded(x: Tensor, scale: Tensor, rotation: int) -> Tensor:
    by = scale.double().reshape(()) if scale.numel() == 1 else scale.double().reshape(-1, 1)
    value = turned(x.double(), rotation) * by
    return torch.where(by.isfinite(), value.clamp(-LARGEST, LARGEST), value)


def _to_round(draw: Draw) -> Operands:
    """Few whole numbers of each group, 127 the largest: fp16 and bf16 hold them turned too, none is halfway between two others."""
    group = draw.of(0, *GROUPS)
    leading = [draw.size(1, 5) for _ in range(draw.of(1, 2))]
    each = group or draw.of(1, 8, 40)
    numbers = draw.whole(*leading, draw.of(1, 2), each, low=-7, high=8).double()
    numbers[..., 4:] = 0
    numbers[..., 0] = 127
    return {"x": draw.apart(turned(numbers.flatten(-2) * 2.0 ** draw.of(-6, -3, 0), group).half()), "rotation": group}


def _to_numbers(x: Tensor, rotation: int, largest: int = 127) -> tuple[Tensor, Tensor]:
    wide = turned(x.double(), rotation)
    most = wide.abs().amax(-1, keepdim=True)
    scales = most / largest
    return (wide / scales).round(), scales.squeeze(-1)


def _to_round_to_4_bits(draw: Draw) -> Operands:
    given = _to_round(draw)
    return given if given["x"].shape[-1] % 2 == 0 else {**given, "x": torch.cat((given["x"], given["x"]), -1)}


def numbers_of_4_bits(packed: Tensor) -> Tensor:
    """As ComfyUI's files have them: of two neighbours the first in the lower bits, as two's complement."""
    wide = packed.long() & 255
    pairs = torch.stack((wide % 16, wide // 16), -1).flatten(-2)
    return torch.where(pairs > 7, pairs - 16, pairs).to(torch.int8)


def counted(codes: Tensor, bits: int) -> Tensor:
    """Codes as ComfyUI's files have them, from 0: of 4 bits, and behind those of a row the upper two of 6."""
    wide = codes.long() & 255
    half = wide.shape[1] * 4 // bits
    lower = torch.stack((wide[:, :half] % 16, wide[:, :half] // 16), -1).flatten(-2)
    if bits == 4:
        return lower
    return lower + 16 * torch.stack([wide[:, half:] // 4**i % 4 for i in range(4)], -1).flatten(-2)


def _coded(draw: Draw) -> Operands:
    """Products that fp32 holds: halves between two whole numbers are such in float64, too."""
    bits, group = draw.of(4, 6), draw.of(4, 8, 16, 48, 64)
    n, groups = draw.size(1, 5), draw.size(1, 4)
    scales = draw.uniform(n, groups, dtype=torch.bfloat16) * draw.of(1.0, 30.0, 300.0)
    book = draw.whole(16, low=-64, high=65).float() / 64
    return {
        "codes": draw.whole(n, groups * group * bits // 8, low=-128, high=128),
        "group_scales": scales.to(draw.of(torch.float8_e4m3fn, SINGLE)),
        "codebook": book if bits == 4 and draw.of(True, False) else None,
        "bits": bits,
        "group": group,
    }


def _decoded(codes: Tensor, group_scales: Tensor, codebook: Tensor | None, bits: int, group: int) -> Tensor:
    found = counted(codes, bits)
    values = found.double() - 2 ** (bits - 1) if codebook is None else codebook.double()[found]
    return (values * group_scales.double().repeat_interleave(group, 1)).clamp(-127, 127).round()


def _coded_for_halves(draw: Draw) -> Operands:
    dtype, group, signed = draw.of(HALF, BF16), draw.of(8, 32, 64, 128), draw.of(True, False)
    n, groups = draw.size(1, 20), draw.size(1, 9)
    k = group * groups
    scale = draw.of(1.0, 1e-3, 3e4)
    return {
        "codes": draw.whole(n, k // 2, low=-128, high=128),
        "group_scales": draw.normal(groups, n, dtype=dtype, scale=scale),
        "zeros": draw.maybe(lambda: draw.normal(groups, n, dtype=dtype, scale=scale)),
        "columns": draw.maybe(lambda: draw.uniform(k, dtype=dtype) + 0.25),
        "signed": signed,
        "group": group,
    }


def _of_codes(
    codes: Tensor, group_scales: Tensor, zeros: Tensor | None, columns: Tensor | None, signed: bool, group: int
) -> Tensor:
    values = numbers_of_4_bits(codes).double() if signed else counted(codes, 4).double() - 8
    each = [0.0 if t is None else t.double().t().repeat_interleave(group, 1) for t in (group_scales, zeros)]
    value = (values * each[0] + each[1]) / (1.0 if columns is None else columns.double())
    return torch.where(value.isfinite(), value.clamp(-LARGEST, LARGEST), value)


_CODES = {"codes": ones(4, 24, dtype=torch.int8), "group_scales": torch.ones(4, 3), "bits": 4}
_BYTES = {"packed": torch.zeros(144, dtype=torch.uint8), "encoding": "Q4_K"}

CONTRACTS: dict[str, Contract] = {
    "to_half": Contract(
        to_half,
        _stored,
        _halved,
        stock=1e-3,
        special=("x", "scale"),
        base={"x": torch.ones(4, 6).bfloat16()},
        wrong=[
            (r"scale: \[6\] is neither one value nor one for each of 4 rows", {"scale": torch.ones(6)}),
            *(("scale: ", {"scale": torch.ones(shape)}) for shape in ((1, 4), (4, 6), (0,))),
            ("scale: ", {"x": ones(), "scale": torch.ones(2)}),
            ("scale: ", {"x": ones(0, 6), "scale": torch.ones(6)}),
        ],
    ),
    "dequantise": Contract(
        dequantise,
        _packed,
        lambda packed, encoding: gguf_numbers(packed, encoding).half().double(),
        slack=0.0,
        stock=0.0,
        base=_BYTES,
        wrong=[
            ("encoding is 'Q9_K', expected one of Q4_0", {"encoding": "Q9_K"}),
            (
                r"packed: \[145\] has no rows of Q4_K blocks, of 144 bytes",
                {"packed": torch.zeros(145, dtype=torch.uint8)},
            ),
            (r"packed: \[3, 72\] has no rows", {"packed": torch.zeros(3, 72, dtype=torch.uint8)}),
            (r"packed: \[\] has no rows", {"packed": torch.zeros((), dtype=torch.uint8)}),
            ("packed: int8 .* is not uint8", {"packed": torch.zeros(144, dtype=torch.int8)}),
        ],
    ),
    "codes_to_int8": Contract(
        codes_to_int8,
        _coded,
        _decoded,
        stock=0.0,
        base=_CODES,
        wrong=[
            ("bits is 5, expected 4 or 6", {"bits": 5}),
            ("group is 12, expected 4, 8 or a multiple of 16", {"group": 12}),
            ("group is 0, expected", {"group": 0}),
            (r"codes: uint8 \[4, 24\] is not int8 \[rows, bytes of 4-bit", {"codes": ones(4, 24, dtype=torch.uint8)}),
            (r"codes: int8 \[96\] is not", {"codes": ones(96, dtype=torch.int8)}),
            (
                r"codes: int8 \[4, 25\] is not int8 \[rows, bytes of 6-bit",
                {"codes": ones(4, 25, dtype=torch.int8), "bits": 6},
            ),
            (r"group_scales: \[4, 3\] is not one for each 32 of \[4, 48\]", {"group": 32}),
            (r"group_scales: \[3, 3\] is not", {"group_scales": torch.ones(3, 3)}),
            (r"codebook: \[64\] is not one value for each code of 4 bits", {"codebook": torch.ones(64)}),
            (
                r"codebook: \[16\] is not .*, these have 6",
                {"codebook": torch.ones(16), "bits": 6, "group_scales": torch.ones(4, 2)},
            ),
        ],
    ),
    "codes_to_half": Contract(
        codes_to_half,
        _coded_for_halves,
        _of_codes,
        stock=4e-7,
        special=("group_scales", "zeros", "columns"),
        base={"codes": ones(4, 64, dtype=torch.int8), "group_scales": ones(2, 4), "signed": True},
        wrong=[
            (r"codes: int8 \[2, 4, 64\] is not", {"codes": ones(2, 4, 64, dtype=torch.int8)}),
            ("group: rows of 128 do not divide into groups of 96", {"group": 96}),
            (r"group_scales: \[4, 2\] is not \[groups of 64, rows\] of \[4, 128\]", {"group_scales": ones(4, 2)}),
            (r"zeros: \[2, 3\] is not", {"zeros": ones(2, 3)}),
            (r"columns: \[64\] is not \[128\]", {"columns": ones(64)}),
        ],
    ),
    "int8_to_half": Contract(
        int8_to_half,
        _rounded,
        _unrounded,
        stock=2e-6,
        special=("scale",),
        base={"x": ones(4, 64, dtype=torch.int8), "scale": torch.ones(4)},
        wrong=[
            (r"x: \[2, 2, 8\] is not \[rows, k\]", {"x": ones(2, 2, 8, dtype=torch.int8)}),
            (r"scale: \[3\] is neither one value nor one for each of 4 rows", {"scale": torch.ones(3)}),
            ("rotation is 8", {"rotation": 8}),
            ("rotation: rows of 64 do not divide into groups of 256", {"rotation": 256}),
        ],
    ),
    "rows_to_int4": Contract(
        rows_to_int4,
        _to_round_to_4_bits,
        lambda x, rotation: _to_numbers(x, rotation, 7),
        slack=1e-6,
        stock=None,
        seen=lambda numbers, scales: (numbers_of_4_bits(numbers), scales),
        base={"x": ones(3, 64)},
        wrong=[
            ("x: .* has no rows with elements", {"x": ones(3, 0)}),
            ("x: rows of 63 do not fill bytes of 2 numbers", {"x": ones(3, 63)}),
            ("rotation is 8, expected 0 or one of 4, 16, 64, 256", {"rotation": 8}),
            ("rotation: rows of 64 do not divide into groups of 256", {"rotation": 256}),
        ],
    ),
    "rows_to_int8": Contract(
        rows_to_int8,
        _to_round,
        _to_numbers,
        slack=1e-6,
        stock=None,
        bf16=True,
        base={"x": ones(3, 64)},
        wrong=[
            ("x: .* has no rows with elements", {"x": ones(3, 0)}),
            ("x: .* has no rows with elements", {"x": ones()}),
            ("rotation is 8, expected 0 or one of 4, 16, 64, 256", {"rotation": 8}),
            ("rotation: rows of 64 do not divide into groups of 256", {"rotation": 256}),
        ],
    ),
}
