"""rows_to_int4 and linear_int4 on the GPU, in both instruction classes: rounding and sums bit for bit, the rest to a rounding."""

from __future__ import annotations

import pytest
import torch
from gpu.support import HALF_STEP, SMALLEST, apart, on, until_chosen

from fusestream.kernels_cuda import LEDGER, Int4Rows, linear_int4, linear_int4_, rows_to_int4
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card
from fusestream.kernels_cuda.ops.matmul import integer_product
from fusestream.kernels_cuda.ops.matmul import linear_int4 as op
from fusestream.kernels_cuda.ops.matmul.linear_operands import ACTIVATIONS
from fusestream.kernels_cuda.ops.quant.integer_rows import unpacked
from fusestream.kernels_cuda.ops.quant.rotation import GROUPS
from fusestream.kernels_cuda.ops.quant.rows_to_int4 import INT4_ROWS

PLAIN = ("none", 1.0, False, 0, torch.float32)
SMALL = [pytest.param(*shape, marks=pytest.mark.sanitize) for shape in ((1, 8, 32), (65, 136, 160))]


@pytest.fixture
def isa(every_isa):
    return every_isa


@pytest.fixture(params=list(op.CUTS), ids=lambda cut: f"{cut.rows}x{cut.columns}")
def cut(request, isa):
    if request.param not in op.INT4.product.cuts_of(isa):
        pytest.skip("not made for Pascal")
    return request.param


def half(*shape):
    return torch.randn(*shape, device="cuda").half()


def any_bytes(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")


def with_cut(cut, tensors, options, isa):
    """One way to cut the work, whatever the rule would choose."""
    call = Call("linear_int4", tensors, options, on(isa))
    op.INT4.op.validate(call)
    assert next(integer_product.obstacles(call), None) is None
    return op.INT4.product.plan(call, card(0, isa), integer_product.Tactic(cut))(*tensors)


def check(got, tensors, options):
    """One rounding of the result, and fp32 arithmetic behind the exact sums."""
    exact = op.INT4.op.reference(*tensors, *options[:4], torch.float64)
    x, x_scale, weight, weight_scale, bias, residual, gate = tensors
    sizes = op.INT4.op.reference(
        x, x_scale, weight, weight_scale, None, None, None, "none", *options[1:4], torch.float64
    ).abs() + (0 if bias is None else bias.double().abs())
    sizes = sizes * (1 if gate is None else 1.2 * gate.double().abs())
    sizes = sizes + (0 if residual is None else residual.double().abs())
    step = HALF_STEP * exact.abs() * 1.001 + SMALLEST if got.dtype is torch.float16 else 2e-6 * exact.abs()
    assert ((got.double() - exact).abs() <= step + 4e-6 * (sizes + exact.abs()) + 1e-7).all()


@pytest.mark.parametrize("k", [*(pytest.param(k, marks=pytest.mark.sanitize) for k in (8, 72, 256, 2304)), 8448, 32768])
def test_rows_bit_for_bit(isa, k):
    x = half(2, 37, k)
    x[0, 3] *= 300
    x[1, 5] *= 1e-5
    x[0, 0] = 0
    x[0, 1, 5], x[0, 2, 3], x[1, 0, 0] = torch.nan, torch.inf, 65504
    for group in (0, *GROUPS):
        if group and k % group:
            continue
        for t in (x, apart(x), x[:, ::2]):
            found = rows_to_int4(t, rotation=group, policy=on(isa))
            numbers, scales = INT4_ROWS.reference(t.cpu(), group)
            assert torch.equal(found.numbers.cpu(), numbers), (k, group)
            torch.testing.assert_close(found.scales.cpu(), scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("m", "n", "k"), [*SMALL, (200, 264, 96), (700, 520, 3104), (1000, 136, 27648)])
def test_sums_bit_for_bit(isa, cut, m, n, k):
    """The largest numbers there are among them; and as floats, rounded to the nearest."""
    x, weight = any_bytes(m, k // 2), any_bytes(n, k // 2)
    x[0], weight[0] = 0x77, 0x77  # 7 and 7
    x[m // 2], weight[n // 2] = -120, -120  # -8 and -8
    ones = torch.ones(m, device="cuda")
    want = (unpacked(x).double() @ unpacked(weight).double().t()).float()
    for t, w in ((x, weight), (apart(x), apart(weight))):
        assert torch.equal(with_cut(cut, (t, ones, w, ones[:1], None, None, None), PLAIN, isa), want)


def test_longest_rows(isa, cut):
    """k at its limit, with the largest products: their sums fill 31 bits where bytes are multiplied."""
    k = integer_product.LONGEST // 32 * 32
    x, weight = (torch.full((rows, k // 2), -120, dtype=torch.int8, device="cuda") for rows in (3, 8))
    ones = torch.ones(3, device="cuda")
    assert (with_cut(cut, (x, ones, weight, ones[:1], None, None, None), PLAIN, isa) == 64.0 * k).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 32), SMALL[1], (300, 264, 1536)])
def test_all_that_follows_the_product(isa, cut, activation, m, n, k):
    scales = torch.rand(n, device="cuda") / 100
    tensors = apart(half(m, k)), None, apart(any_bytes(n, k // 2)), scales, half(n), half(m, n).float(), half(m, n)
    for out in (torch.float16, torch.float32):
        options = (activation, 0.5, False, 4, out)
        check(with_cut(cut, tensors, options, isa), tensors, options)


def test_cuts_and_repeats_agree(isa):
    scales = torch.rand(520, device="cuda") / 100
    tensors = half(900, 1536), None, any_bytes(520, 768), scales, half(520), half(900, 520).float(), half(520)
    found = [
        with_cut(cut, tensors, ("gelu_tanh", 1.0, False, 256, None), isa) for cut in op.INT4.product.cuts_of(isa) * 2
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_in_place_and_rounded_before(isa):
    x, weight, scales, gate = half(2, 150, 64), any_bytes(72, 32), torch.rand(72, device="cuda") / 9, half(2, 150, 72)
    stream = half(2, 150, 72).float()
    more = {"gate": gate, "activation": "silu", "policy": on(isa)}
    want = linear_int4(x, weight, scales, residual=stream, rotation=64, **more)
    rounded = rows_to_int4(x, rotation=64, policy=on(isa))
    assert torch.equal(linear_int4(rounded, weight, scales, residual=stream, **more), want)
    linear_int4_(stream, x, weight, scales, residual=stream, rotation=64, **more)
    assert torch.equal(stream, want)


def test_what_is_not_finite_stays_in_its_row(isa, cut):
    x, weight, scales = half(200, 96), any_bytes(136, 48), torch.rand(136, device="cuda")
    clean = with_cut(cut, (x, None, weight, scales, None, None, None), PLAIN, isa)
    x[5, 7], scales[9] = torch.inf, torch.nan
    got = with_cut(cut, (x, None, weight, scales, None, None, None), PLAIN, isa)
    lost = torch.zeros_like(got, dtype=torch.bool)
    lost[5], lost[:, 9] = True, True
    assert got[lost].isnan().all() and torch.equal(got[~lost], clean[~lost])


def test_near_the_product_of_halves(isa):
    """Rounding both operands of unit variance to 4 bits costs about 20 %."""
    x, weight = half(500, 5120), half(256, 5120) / 72
    exact = x.double() @ weight.double().t()
    of_weight = rows_to_int4(weight, rotation=256, policy=on(isa))
    got = linear_int4(x, *of_weight, rotation=256, policy=on(isa))
    assert 0.1 < float((got.double() - exact).norm() / exact.norm()) < 0.3


def test_strides_beyond_32_bits(isa):
    """Rows whose distance times their number exceeds 2^32."""
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GB")
    room = torch.zeros(2**32 + 2**15, device="cuda", dtype=torch.int8)
    x = room.as_strided((3, 64), (2**31 - 2**12, 1))
    x.copy_(any_bytes(3, 64))
    weight, ones = any_bytes(72, 64), torch.ones(3, device="cuda")
    got = linear_int4(Int4Rows(x, ones), weight, ones[:1], out_dtype=torch.float32, policy=on(isa))
    assert torch.equal(got, (unpacked(x).double() @ unpacked(weight).double().t()).float())


def test_auto_tries_all_of_them():
    x, weight, bias, one = half(512, 512), any_bytes(512, 256), half(512), torch.ones(1, device="cuda")
    LEDGER.clear()
    until_chosen(lambda: linear_int4(x, weight, one, bias, activation="gelu_tanh"))
    offered = {"stock", *(f"cuda {way}" for way in op.INT4.product.ways(None))}
    assert offered <= set(LEDGER.choices[-1].seconds)
