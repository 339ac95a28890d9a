"""linear_int8_pair and linear_int4_pair on the GPU, in both instruction classes: every tile against the maths in float64."""

from __future__ import annotations

import pytest
import torch
from gpu.support import STEPS, apart, on, until_chosen

from fusestream.kernels_cuda import LEDGER
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card
from fusestream.kernels_cuda.ops.matmul import integer_product, linear_int4, linear_int8
from fusestream.kernels_cuda.ops.matmul.integer_operands import ROUNDINGS
from fusestream.kernels_cuda.ops.matmul.linear_operands import ACTIVATIONS

KINDS = {"int8": linear_int8.INT8, "int4": linear_int4.INT4}
CUTS = [(kind, cut) for kind, of in KINDS.items() for cut in of.product.cuts]
PLAIN = ("none", 1.0, False, 0, torch.float32)
SMALL = [pytest.param(*shape, marks=pytest.mark.sanitize) for shape in ((1, 8, 32), (65, 136, 160))]


def in_byte_of(kind):
    return ROUNDINGS[KINDS[kind].product.unit].in_byte


def half(*shape):
    return torch.randn(*shape, device="cuda").half()


def any_bytes(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")


def scales_of(*shape):
    return torch.rand(*shape, device="cuda") / 400


def with_cut(kind, cut, tensors, options, isa):
    """One way to cut the work, whatever the rule would choose."""
    of = KINDS[kind]
    call = Call(of.pair_op.name, tensors, options, on(isa))
    of.pair_op.validate(call)
    assert next(integer_product.obstacles(call), None) is None
    return of.product.plan(call, card(0, isa), integer_product.Tactic(cut))(*tensors)


def check(kind, got, tensors, options):
    """One rounding of the result, and fp32 arithmetic behind the exact sums of both products."""
    op = KINDS[kind].pair_op
    exact = op.reference(*tensors, *options[:4], torch.float64)
    # The sizes of both products: what the error of the one is multiplied with is the other.
    gate = op.reference(*tensors[:4], *tensors[2:4], "none", 1.0, False, options[3], torch.float64).sqrt()
    up = op.reference(*tensors[:2], *tensors[4:], *tensors[4:], "none", 1.0, False, options[3], torch.float64).sqrt()
    step, smallest = STEPS.get(got.dtype, (2e-6, 0.0))
    step = step * exact.abs() * 1.001 + smallest
    assert ((got.double() - exact).abs() <= step + 4e-6 * (1 + gate.abs()) * up.abs() + 1e-7).all()


@pytest.fixture
def isa(every_isa, request):
    given = request.node.callspec.params
    if "cut" in given and given["cut"] not in KINDS[given["kind"]].product.cuts_of(every_isa):
        pytest.skip("not made for Pascal")
    return every_isa


@pytest.mark.parametrize(("kind", "cut"), CUTS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [*SMALL, (700, 520, 3104)])
def test_sums_bit_for_bit(isa, kind, cut, m, n, k):
    """Sums are exact in fp32, and so their product is rounded once."""
    in_byte = in_byte_of(kind)
    x, weight, up = (any_bytes(rows, k // in_byte) % 3 for rows in (m, n, n))
    ones = torch.ones(m, device="cuda")
    tensors = (x, ones, weight, ones[:1], up, ones[:1])
    want = KINDS[kind].pair_op.reference(*tensors, *PLAIN[:4], torch.float64)
    for one in (tensors, (apart(x), ones, apart(weight), ones[:1], apart(up), ones[:1])):
        assert torch.equal(with_cut(kind, cut, one, PLAIN, isa), want.float())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "cut"), CUTS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [SMALL[1], (300, 264, 1536)])
def test_all_that_follows_the_products(isa, kind, cut, activation, m, n, k):
    both = any_bytes(2 * n, k // in_byte_of(kind))
    tensors = (apart(half(m, k)), None, both[:n], scales_of(n), both[n:], scales_of(n))
    for out in (torch.float16, torch.bfloat16, torch.float32):
        options = (activation, 0.5, False, 4, out)
        check(kind, with_cut(kind, cut, tensors, options, isa), tensors, options)


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_and_repeats_agree(isa, kind):
    in_byte, product = in_byte_of(kind), KINDS[kind].product
    weight, up = (any_bytes(520, 1536 // in_byte) for _ in range(2))
    tensors = (half(900, 1536), None, weight, scales_of(520), up, scales_of(520))
    cuts = product.cuts_of(isa) * 2
    found = [with_cut(kind, cut, tensors, ("silu", 1.0, True, 256, None), isa) for cut in cuts]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_before_written_to_its_place_and_saturated(isa, kind):
    in_byte, of = in_byte_of(kind), KINDS[kind]
    x = half(2, 150, 64)
    both = any_bytes(144, 64 // in_byte)
    scales = scales_of(144) * 4000  # beyond 65504 in some places
    weights = (both[:72], scales[:72], both[72:], scales[72:])
    want = of.pair(x, *weights, rotation=64, saturate=True, policy=on(isa))
    assert (want.abs() == 65504).any() and want.isfinite().all()
    rows = of.round_rows(x, rotation=64, policy=on(isa))
    assert torch.equal(of.pair(rows, *weights, saturate=True, policy=on(isa)), want)
    room = torch.full((2, 150, 96), 7.0, device="cuda").half()
    of.pair_(room[..., 8:80], x, *weights, rotation=64, saturate=True, policy=on(isa))
    assert torch.equal(room[..., 8:80], want) and (room[..., :8] == 7).all() and (room[..., 80:] == 7).all()


@pytest.mark.parametrize(("kind", "cut"), CUTS, ids=str)
def test_what_is_not_finite_stays_in_its_row(isa, kind, cut):
    in_byte = in_byte_of(kind)
    x, weight, up, scales = half(200, 96), any_bytes(136, 96 // in_byte), any_bytes(136, 96 // in_byte), scales_of(136)
    tensors = (x, None, weight, scales, up, scales.clone())
    clean = with_cut(kind, cut, tensors, PLAIN, isa)
    x[5, 7], scales[9], tensors[5][11] = torch.inf, torch.nan, torch.nan
    got = with_cut(kind, cut, tensors, PLAIN, isa)
    lost = torch.zeros_like(got, dtype=torch.bool)
    lost[5], lost[:, 9], lost[:, 11] = True, True, True
    assert got[lost].isnan().all() and torch.equal(got[~lost], clean[~lost])


@pytest.mark.parametrize("kind", KINDS)
def test_auto_tries_all_of_them(kind):
    in_byte, of = in_byte_of(kind), KINDS[kind]
    x, both, scales = half(512, 512), any_bytes(1024, 512 // in_byte), scales_of(1024)
    LEDGER.clear()
    until_chosen(lambda: of.pair(x, both[:512], scales[:512], both[512:], scales[512:]))
    assert {"stock", *(f"cuda {way}" for way in of.product.ways(None))} <= set(LEDGER.choices[-1].seconds)
