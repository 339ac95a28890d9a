"""codes_to_int8 and codes_to_half: weights of 4 and 6 bits with scales by group, as published files have them.

A weight is decoded whenever it is multiplied, so what these take is to be held against the product behind them.
"""

from __future__ import annotations

from functools import partial

import torch

from ...kernels_cuda.ops.quant import codes_to_half, codes_to_int8
from ..row import Row, Tensors


def codes(n: int, k: int, bits: int) -> torch.Tensor:
    return torch.randint(-128, 128, (n, k * bits // 8), device="cuda", dtype=torch.int8)


def for_numbers(n: int, k: int, bits: int, group: int) -> Tensors:
    scales = (torch.rand(n, k // group, device="cuda") * 20).to(torch.float8_e4m3fn)
    return codes(n, k, bits), scales, torch.randn(16, device="cuda") if bits == 4 else None


def for_halves(n: int, k: int, signed: bool) -> Tensors:
    scales, zeros = (torch.randn(k // 64, n, device="cuda").bfloat16() for _ in range(2))
    columns = (torch.rand(k, device="cuda") + 0.5).bfloat16()
    return codes(n, k, 4), scales, None if signed else zeros, columns if signed else None


def to_numbers(label: str, n: int, k: int, bits: int, group: int) -> Row:
    name = f"{label}: {n}x{k}, {bits} bits, groups of {group}"
    return Row("codes_to_int8", name, partial(for_numbers, n, k, bits, group), (bits, group), codes_to_int8.reference)


def to_halves(label: str, n: int, k: int, signed: bool) -> Row:
    name = f"{label}: {n}x{k}, {'signed, columns' if signed else 'unsigned, zeros'}"
    return Row("codes_to_half", name, partial(for_halves, n, k, signed), (signed, 64), codes_to_half.reference)


ROWS = [
    to_numbers("Wan 1.3B, ffn in", 8960, 1536, 4, 16),
    to_numbers("Wan 14B, q", 5120, 5120, 4, 16),
    *(to_numbers("Wan 14B, ffn in", 13824, 5120, bits, group) for bits, group in ((4, 16), (4, 64), (6, 16))),
    to_halves("Qwen-Image, modulation", 18432, 3072, signed=False),
    to_halves("Qwen-Image, ffn in", 12288, 3072, signed=True),
    to_halves("Qwen-Image, q", 3072, 3072, signed=True),
]
