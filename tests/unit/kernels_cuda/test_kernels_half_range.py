"""What fp16 does not hold: saturation, infinities and NaN, and sums kept in two parts, without a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from contract.op_samples.quant import gguf_numbers

from fusestream.kernels_cuda import (
    KernelPolicy,
    dequantise,
    gelu_mul,
    int8_to_half,
    join_sums,
    linear,
    linear_pair,
    rms_parts,
    rms_rope_keep,
    rms_rope_sums,
    silu_mul,
    to_half,
)
from fusestream.kernels_cuda.ops.quant.packed_blocks import BLOCK_TYPES, unpacked
from fusestream.kernels_cuda.ops.views.half_range import LARGEST
from fusestream.kernels_cuda.ops.views.parts import split

EPS = 1e-6
OFF = KernelPolicy.of("off")
EITHER = pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


# ------------------------------------------------------------------------------------------------ weights into halves


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


@EITHER
@pytest.mark.parametrize(("dtype", "form"), [(E4M3, (4, 3, 7)), (E5M2, (5, 2, 15))])
def test_every_fp8_code(dtype, form, policy):
    codes = torch.arange(256, dtype=torch.uint8)
    got = to_half(codes.view(dtype), policy=policy)
    for code, value in zip(codes.tolist(), got.tolist(), strict=True):
        want = decoded(code, *form)
        assert (
            math.isnan(value) if want is None else (value == want and math.copysign(1, value) == math.copysign(1, want))
        )


@EITHER
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


@EITHER
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


@EITHER
def test_a_product_fits_though_its_factors_do_not(policy):
    """Stock rounds number and scale to fp16 before it multiplies: zero times a scale of 70000 became NaN."""
    assert to_half(torch.tensor([0.0, 0.5, -2.0]).to(E4M3), torch.tensor(7e4), policy=policy).tolist() == [
        0,
        35008,
        -LARGEST,
    ]
    large = torch.tensor([2.0**17, -(2.0**18), torch.inf])
    for dtype in (torch.bfloat16, torch.float32):
        assert to_half(large.to(dtype), torch.tensor(2.0**-7), policy=policy).tolist() == [1024, -2048, torch.inf]


@EITHER
def test_a_place_of_another_type_cannot_take_it(policy):
    with pytest.raises(ValueError, match=r"^to_half_into: out: torch.float32 \[4, 6\] cannot take \[4, 6\] as float16"):
        to_half(torch.zeros(4, 6).bfloat16(), out=torch.zeros(4, 6), policy=policy)


def test_half_is_copied_not_aliased():
    x = torch.randn(4).half()
    got = to_half(x)
    assert torch.equal(got, x)
    assert got.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("encoding", BLOCK_TYPES)
def test_every_type_of_packed_blocks(encoding):
    """Any bytes at all: scales that are Inf, NaN and denormal among them. In float64 as in fp32: an oracle of products."""
    packed = torch.randint(256, (501 * BLOCK_TYPES[encoding].bytes,), dtype=torch.uint8)
    torch.testing.assert_close(
        dequantise(packed, encoding), gguf_numbers(packed, encoding).half(), rtol=0, atol=0, equal_nan=True
    )
    wide = unpacked(packed, encoding, torch.float64).float()
    assert torch.equal(wide.nan_to_num(), unpacked(packed, encoding).nan_to_num())


@EITHER
def test_what_halves_cannot_hold(policy):
    x = torch.tensor([[127, -128, 0, 1] * 2], dtype=torch.int8)
    assert int8_to_half(x, torch.tensor(1e4), policy=policy)[0, :4].tolist() == [65504, -65504, 0, 10000]
    found = int8_to_half(x, torch.tensor(torch.inf), policy=policy)[0, :4]
    assert found[0].isposinf() and found[1].isneginf() and found[2].isnan()
    assert int8_to_half(x, torch.tensor(torch.nan), policy=policy).isnan().all()


# ---------------------------------------------------------------------------------------------- products and what follows


@EITHER
def test_a_scaled_product_fits(policy):
    """Sums of 2^17 do not fit fp16, an eighth of them does; saturating keeps the largest number instead of infinity."""
    x, weight = torch.full((1, 32), 64.0).half(), torch.full((8, 32), 64.0).half()
    assert linear(x, weight, policy=policy).isinf().all()
    assert (linear(x, weight, scale=0.125, policy=policy) == 16384).all()
    assert (linear(x, weight, saturate=True, policy=policy) == 65504).all()
    assert (linear(x, -weight, saturate=True, policy=policy) == -65504).all()
    assert linear(x * torch.nan, weight, saturate=True, policy=policy).isnan().all()
    assert (linear_pair(x / 4, weight, weight, activation="relu", scale=2.0**-16, policy=policy) == 16384).all()


def test_a_scaled_gate_fits():
    """T5: gate and up fit fp16, their product does not, its 1/16 does, with the same digits."""
    gate = torch.tensor([1000.0, 3.0, 60000.0, 60000.0]).half()
    up = torch.tensor([900.0, 5.0, 60000.0, -60000.0]).half()
    assert gelu_mul(gate, up).tolist()[0] == math.inf
    small = gelu_mul(gate, up, scale=1 / 16)
    assert small[0] == 56250 and small[2] == math.inf
    assert gelu_mul(gate, up, scale=1 / 16, saturate=True).tolist()[2:] == [65504, -65504]
    assert small[1] * 16 == gelu_mul(gate, up)[1]
    nan = torch.tensor([math.nan]).half()
    assert silu_mul(nan, nan, saturate=True).isnan().all()


# ------------------------------------------------------------------------------------------------- sums in two parts


def added(parts):
    assert parts.dtype is torch.float16 and parts.shape[0] == 2 and parts.is_contiguous()
    return parts[0].double() + parts[1].double()


def sums(*shape, scale=1.0):
    """As a product of two parts leaves them: the second is small."""
    return torch.randn(2, *shape) * torch.tensor([scale, scale * 2**-11]).view(2, *[1] * len(shape))


def tables(tokens, d, batch=1):
    angle = torch.rand(batch, 1, tokens, d // 2) * 6
    return angle.cos(), angle.sin()


def test_parts_add_up():
    x = torch.cat((torch.randn(999) * 100, torch.tensor([65503.9, 65519.0, -7e4, math.inf, -math.inf, 1e-9])))
    value, rest = split(x)
    assert torch.equal(value, x.clamp(-LARGEST, LARGEST).half())
    error = (value.double() + rest.double() - x.clamp(-LARGEST, LARGEST).double()).abs()
    assert (error <= x.clamp(-LARGEST, LARGEST).abs() * 2**-22 + 2**-25).all()
    assert not rest[-5:-1].any(), "nothing is left of what is too large"
    assert split(torch.tensor([math.nan])).isnan().all()


def test_large_and_special_values():
    """What does not fit saturates with nothing left, an infinity too; NaN stays where it is."""
    numbers = torch.tensor([1e5, -1e5, math.inf, -math.inf, math.nan, 65504.0, 1.0, 300.0])
    first = torch.stack((numbers, torch.zeros(8)))[:, None]
    want = torch.tensor([LARGEST, -LARGEST, LARGEST, -LARGEST, math.nan, LARGEST, 1.0, 300.0])
    for policy in (KernelPolicy(), OFF):
        parts = join_sums(first, policy=policy)[:, 0]
        torch.testing.assert_close(parts[0].float(), want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(parts[1].isnan(), want.isnan()) and parts[1][~want.isnan()].count_nonzero() == 0
        kept = join_sums(first, first, activation="relu", scale=2.0**-6, policy=policy)[:, 0]
        assert added(kept)[[0, 5]].tolist() == [LARGEST, LARGEST] and added(kept)[7] == 300.0**2 / 64
        normed = rms_parts(torch.tensor([[1.0, 1.0]]), torch.tensor([1e5, math.nan]), eps=0.0, policy=policy)[:, 0]
        assert normed[0, 0] == LARGEST and normed[1, 0] == 0 and normed[:, 1].isnan().all()
        q = sums(1, 1, 2, 4)
        q[0, 0, 0, 0, 1] = math.nan
        ones = torch.ones(4) * 1e6
        turned, _ = rms_rope_sums(q, q, ones, ones, *tables(1, 4), eps=EPS, policy=policy)
        assert turned[0, 0, 0].isnan().all() and turned[0, 0, 1].isfinite().all()
        assert turned[0, 0, 1].abs().max() == LARGEST


def test_the_value_alone_is_the_first_part():
    first, second = sums(3, 5, 16, scale=3.0).chunk(2, -1)
    for policy in (KernelPolicy(), OFF):
        for other in (None, second):
            value = join_sums(first, other, activation="silu", parts=False, policy=policy)
            assert value.is_contiguous()
            assert torch.equal(value, join_sums(first, other, activation="silu", policy=policy)[0])


def test_what_a_cache_keeps_saturates():
    q = torch.full((1, 1, 1, 1, 8), 1e15)
    keys, values = (torch.zeros(1, 2, 1, 8).half() for _ in range(2))
    large, angle = torch.full((8,), 1e30), torch.zeros(2, 4)
    at = torch.ones(1, dtype=torch.int32)
    got = rms_rope_keep(q, q, q, large, large, angle.cos(), angle.sin(), keys, values, at, eps=1e-6)
    assert {float(t.max()) for t in (got, keys, values)} == {65504.0} and not keys[:, 0].any()


@EITHER
def test_what_lies_behind_the_last_place_is_not_kept(policy):
    q, table = torch.randn(1, 2, 3, 2, 8), torch.rand(5, 4)
    weight, at = torch.ones(8), torch.tensor([4], dtype=torch.int32)
    keys, values = (torch.full((2, 5, 2, 8), 7.0).half() for _ in range(2))
    got = rms_rope_keep(q, q, q, weight, weight, table.cos(), table.sin(), keys, values, at, eps=EPS, policy=policy)
    assert (keys[:, :4] == 7).all() and (values[:, :4] == 7).all()
    assert torch.equal(values[:, 4], q[0, :, 0].half()) and torch.equal(keys[:, 4], got[:, 0])
    assert got[:, 0].all() and not got[:, 1:].any(), "queries that have no place are zero"
