"""to_half without a GPU: every fp8 code, saturation, infinities, views."""

from __future__ import annotations

import math

import pytest
import torch

from fusestream.kernels_cuda import KernelPolicy, to_half
from fusestream.kernels_cuda.ops.quant.to_half import LARGEST, matrix

OFF = KernelPolicy.of("off")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def decoded(code, exponent_bits, mantissa_bits, bias):
    """An fp8 code by the definition of the format; None for NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    top = (1 << exponent_bits) - 1
    if exponent_bits == 5 and exponent == top:
        return sign * math.inf if mantissa == 0 else None
    if exponent_bits == 4 and exponent == top and mantissa == 7:
        return None
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize("policy", [KernelPolicy(), OFF])
@pytest.mark.parametrize(("dtype", "form"), [(E4M3, (4, 3, 7)), (E5M2, (5, 2, 15))])
def test_every_fp8_code(dtype, form, policy):
    codes = torch.arange(256, dtype=torch.uint8)
    got = to_half(codes.view(dtype), policy=policy)
    for code, value in zip(codes.tolist(), got.tolist(), strict=True):
        want = decoded(code, *form)
        assert (
            math.isnan(value) if want is None else (value == want and math.copysign(1, value) == math.copysign(1, want))
        )


@pytest.mark.parametrize("policy", [KernelPolicy(), OFF])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_out_of_range(dtype, policy):
    x = torch.tensor([65504, 65519, 65520, 1e6, 3e38, -65536, -3e38, torch.inf, -torch.inf, torch.nan, 1e-30, -0.0])
    got = to_half(x.to(dtype), policy=policy)
    if dtype is torch.float32:
        assert got[:7].tolist() == [LARGEST] * 5 + [-LARGEST] * 2
    assert got[:7].isfinite().all()
    assert got[7:9].tolist() == [torch.inf, -torch.inf]
    assert got[9].isnan()
    assert (got[10], math.copysign(1, got[11])) == (0, -1)


@pytest.mark.parametrize("policy", [KernelPolicy(), OFF])
def test_scaled_out_of_range(policy):
    x = torch.tensor([448, -448, 1, 0]).to(E4M3)
    assert to_half(x, torch.tensor(3e4), policy=policy).tolist() == [LARGEST, -LARGEST, 30000, 0] or policy is OFF
    assert to_half(x, torch.tensor([1000.0]), policy=policy).tolist() == [LARGEST, -LARGEST, 1000, 0]
    special = to_half(
        torch.tensor([torch.inf, -torch.inf, torch.nan, 57344]).to(E5M2), torch.tensor(2.0), policy=policy
    )
    assert special[:2].tolist() == [torch.inf, -torch.inf]
    assert special[2].isnan()
    assert special[3] == LARGEST
    infinite = to_half(x, torch.tensor(torch.inf), policy=policy)
    assert infinite[:3].tolist() == [torch.inf, -torch.inf, torch.inf]
    assert infinite[3].isnan()


def test_views():
    x = torch.zeros(4, 6, 8)
    assert matrix(x, False) == (1, 192, 192)
    assert matrix(x, True) == (4, 48, 48)
    assert matrix(x[0, :, :5], False) == (6, 5, 8)
    assert "neither contiguous" in matrix(x[:, :3], False)
    assert "neither contiguous" in matrix(x[0].t(), False)


def test_a_place_of_another_type_cannot_take_it():
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(
            ValueError, match=r"^to_half_into: out: torch.float32 \[4, 6\] cannot take \[4, 6\] as float16"
        ):
            to_half(torch.zeros(4, 6).bfloat16(), out=torch.zeros(4, 6), policy=policy)


def test_half_is_copied_not_aliased():
    x = torch.randn(4).half()
    got = to_half(x)
    assert torch.equal(got, x)
    assert got.data_ptr() != x.data_ptr()
