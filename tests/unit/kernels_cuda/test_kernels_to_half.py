"""to_half without a GPU: every fp8 code, saturation, infinities, scales, views, compile."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy, KernelRefused, to_half
from fusestream.kernels_cuda.ops.quant.to_half import LARGEST, TYPES, matrix

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


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, 5),
    cols=st.integers(1, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, E4M3, E5M2]),
    scales=st.sampled_from(["none", "0-d", "one", "rows", "column"]),
    gap=st.integers(0, 2),
    power=st.sampled_from([-20, 0, 12, 30]),
    into=st.booleans(),
    policy=st.sampled_from([KernelPolicy(), OFF]),
    seed=st.integers(0, 2**31),
)
def test_the_definition(rows, cols, dtype, scales, gap, power, into, policy, seed):
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols + gap, generator=make).to(dtype)[:, :cols]
    shape = {"0-d": (), "one": (1,), "rows": (rows,), "column": (rows, 1)}.get(scales)
    scale = None if shape is None else torch.randn(shape, generator=make) * 2.0**power
    out = torch.full((rows, cols), torch.nan, dtype=torch.float16) if into else None
    got = to_half(x, scale, out=out, policy=policy)
    assert got.shape == x.shape
    assert got.is_contiguous()
    assert got is out or out is None
    want = x.double() * (1.0 if scale is None else scale.double().reshape(-1, 1))
    if policy is OFF:  # stock rounds the scale and then the product
        if abs(power) < 20:
            torch.testing.assert_close(got.double(), want.clamp(-LARGEST, LARGEST), rtol=2**-9, atol=1e-3)
    else:
        torch.testing.assert_close(got.double(), want.clamp(-LARGEST, LARGEST), rtol=2**-11, atol=2**-24)


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


def test_errors():
    x = torch.zeros(4, 6).bfloat16()
    with pytest.raises(ValueError, match="neither one value nor one for each of 4 rows"):
        to_half(x, torch.ones(6))
    for out in (torch.zeros(6, 4).half(), torch.zeros(4, 6)):
        for policy in (KernelPolicy(), OFF):
            with pytest.raises(ValueError, match="cannot take"):
                to_half(x, out=out, policy=policy)


@pytest.mark.parametrize(
    ("operand", "x", "scale", "out"),
    [
        ("scale", (4, 6), (6,), None),
        ("scale", (4, 6), (1, 4), None),
        ("scale", (4, 6), (4, 6), None),
        ("scale", (4, 6), (0,), None),
        ("scale", (), (2,), None),
        ("scale", (0, 6), (6,), None),
        ("out", (4, 6), None, (6, 4)),
        ("out", (4, 6), None, (24,)),
        ("out", (4, 6), None, (5, 6)),
        ("out", (), None, (1,)),
        ("out", (0, 6), None, (0, 7)),
    ],
)
def test_wrong_operands_are_named(operand, x, scale, out):
    out = None if out is None else torch.empty(out).half()
    scale = None if scale is None else torch.ones(scale)
    op = "to_half" if out is None else "to_half_into"
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=rf"^{op}: {operand}: "):
            to_half(torch.ones(x).bfloat16(), scale, out=out, policy=policy)


@pytest.mark.parametrize("scale", [(), (1,), (1, 1, 1), (4,), (4, 1), (4, 1, 1)])
def test_scales_that_broadcast(scale):
    x = torch.ones(4, 6).bfloat16()
    for policy in (KernelPolicy(), OFF):
        assert to_half(x, torch.ones(scale), policy=policy).shape == x.shape
        out = torch.empty(4, 6).half()
        assert to_half(x, torch.ones(scale), out=out, policy=policy) is out and (out == 1).all()


def test_out_needs_a_place_of_its_own():
    x = torch.ones(8, 6).bfloat16()
    as_half = x.view(torch.float16)
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=r"out: .* share memory"):
            to_half(x, out=torch.empty(1, 6).half().expand(8, 6), policy=policy)
        with pytest.raises(ValueError, match=r"out: .* overlaps x"):
            to_half(x, out=as_half, policy=policy)
        with pytest.raises(ValueError, match=r"out: .* overlaps x"):
            to_half(x[:5], out=as_half[3:], policy=policy)
        to_half(x[:4], out=as_half[4:], policy=policy)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (1,), (2, 3, 4)])
def test_empty_and_any_rank(shape):
    x = torch.randn(shape).bfloat16()
    assert torch.equal(to_half(x), x.half())
    out = torch.empty(shape, dtype=torch.float16)
    assert to_half(x, torch.tensor(2.0), out=out) is out
    assert torch.equal(out, (x.float() * 2).half())


def test_half_is_copied_not_aliased():
    x = torch.randn(4).half()
    got = to_half(x)
    assert torch.equal(got, x)
    assert got.data_ptr() != x.data_ptr()


def test_modes():
    x = torch.randn(4, 8).bfloat16()
    LEDGER.clear()
    OPS["to_half"].forget()
    to_half(x)
    assert [(r.op, r.reason) for r in LEDGER.refusals] == [("to_half", "tensor is on the CPU")]
    for out in (None, torch.empty(4, 8).half()):
        with pytest.raises(KernelRefused, match="on the CPU"):
            to_half(x, out=out, policy=KernelPolicy.of("on"))


@pytest.mark.parametrize("dtype", list(TYPES))
def test_compile_and_registration(dtype):
    x, scale = torch.randn(4, 8).to(dtype), torch.rand(4)

    def load(x, scale, out):
        to_half(x, scale, out=out)
        return out + to_half(x)

    compiled = torch.compile(load, fullgraph=True, backend="aot_eager")
    got = [run(x, scale, torch.empty(4, 8).half()) for run in (compiled, load)]
    torch.testing.assert_close(*got, rtol=0, atol=0)
    if dtype.itemsize > 1:  # torch's checks compare tensors, which fp8 does not do
        torch.library.opcheck(OPS["to_half"].traced, (x, scale, KernelPolicy().token))
        torch.library.opcheck(OPS["to_half_into"].traced, (x, scale, torch.empty(4, 8).half(), KernelPolicy().token))
