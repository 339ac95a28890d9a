"""attention in 8 bits on the GPU: the numbers bit for bit, what attention makes of them to rounding, the whole to its bound."""

from __future__ import annotations

import math
import os

import pytest
import torch
from gpu.support import locate, on
from gpu.test_attention import check, configurations, inputs, laid_out, options_of, oracle, reference
from hypothesis import HealthCheck, given, seed, settings

from fusestream.kernels_cuda import choose_blocks
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card
from fusestream.kernels_cuda.ops.attention import attention as op
from fusestream.kernels_cuda.ops.attention import int8_heads
from fusestream.kernels_cuda.ops.attention.attention_operands import Operands, arguments
from fusestream.kernels_cuda.ops.attention.int8_heads import Int8Heads

EXAMPLES = int(os.environ.get("FUSESTREAM_EXAMPLES") or 2500)
HEADS = int8_heads.HEADS
TACTICS = (op.PRECISE, op.FAST, op.TURBO, op.TURBO_HALF)
ROUNDED_HEADS = int8_heads.ROUNDED_HEADS


@pytest.fixture
def isa(every_isa, request):
    """Pascal has both products in 8 bits alone, and heads of up to 128."""
    given = request.node.callspec.params
    if every_isa == "sm_61" and ("tactic" in given or given.get("d") == op.ONLY_INT8):
        pytest.skip("not made for Pascal")
    return every_isa


@pytest.fixture(params=[op.TURBO, op.TURBO_HALF], ids=str)
def tactic(request):
    return request.param


def sums_of(tactic):
    """Whose bound holds: values that are summed in FP16 have that of `fast`."""
    return "fast" if tactic in (op.FAST, op.TURBO_HALF) else "precise"


def call_of(isa, q, k, v, mask=None, **asked):
    return Call("attention", *arguments(q, k, v, mask, **asked), on(isa, "turbo"))


def converted(isa, call):
    """Queries and keys in 8 bits, as the kernels make them."""
    o = Operands.of(call.tensors, call.options)
    q8, k8, _ = int8_heads.plan(card(0, isa), o, "test")(o.q, o.k, o.key_lengths, None)
    return Int8Heads(*q8), Int8Heads(*k8)


def meant(heads, together, d):
    """What 8-bit rows stand for, [batch, tokens, heads, d] in float64."""
    scales = heads.scales.double().repeat_interleave(together, 2)[:, :, : heads.numbers.shape[2]]
    return (heads.numbers[..., :d].double() * scales[..., None]).transpose(1, 2)


@given(configurations())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_random_configurations(isa, tactic, c):
    """Against float64 attention over what the numbers stand for: nothing is lost but what `precise` or `fast` lose."""
    d = c["sizes"][-1]
    if d not in HEADS:
        return
    q, k, v = inputs(*c["sizes"], size=c["size"], layout=c["layout"])
    mask, asked = options_of(c)
    call = call_of(isa, q, k, v, mask, **asked)
    assert next(op.obstacles(call), None) is None
    q8, k8 = converted(isa, call)
    wide = meant(q8, 1, d), meant(k8, int8_heads.TOGETHER, d), v.double()
    like = mask if mask is None or mask.dtype is torch.bool else mask.double()
    exact, magnitudes = (reference(*wide[:2], value, like, **asked) for value in (wide[2], wide[2].abs()))
    got = op.plan(call, card(0, isa), tactic)(*call.tensors)
    scale = d**-0.5 if c["scale"] is None else c["scale"]
    reach = float(q8.scales.max() * k8.scales.max()) * 127 * 127 * d * scale if exact.numel() else 0.0
    check(got, exact, magnitudes, sums_of(tactic), reach * 2e-6, str(c))


@pytest.mark.parametrize("asked", ["plain", "general", "blocks"])
@pytest.mark.parametrize("d", HEADS)
@pytest.mark.parametrize(("s", "t"), [(1, 1), pytest.param(65, 33, marks=pytest.mark.sanitize), (130, 100)])
def test_ends_and_corners(isa, tactic, d, s, t, asked):
    """Small, with everything on: what the sanitizers see."""
    c = {"sizes": (2, s, t, 2, 1, d), "scale": None, "lengths": [t, t // 2], "blocks": asked == "blocks"}
    if asked == "general":
        c |= {"causal": True, "window": (50, -1), "mask": "bias", "distance": True}
    q, k, v = inputs(*c["sizes"], layout="beginning")
    mask, asked_for = options_of(c)
    call = call_of(isa, q, k, v, mask, **asked_for)
    got = op.plan(call, card(0, isa), tactic)(*call.tensors)
    exact, sizes = oracle(q, k, v, mask, **asked_for)
    check(got, exact, sizes, sums_of(tactic), 0.05, str(c))


@pytest.mark.parametrize("layout", ["plain", "packed", "heads first", "beginning"])
@pytest.mark.parametrize("d", HEADS)
@pytest.mark.parametrize(("s", "t"), [(1, 1), (33, 65), (700, 1100)])
def test_numbers_are_the_references(isa, d, s, t, layout):
    """Queries bit for bit. Keys too, less the mean that the kernel's own sums give: where that falls between two numbers they
    may differ by one."""
    q, k, v = inputs(2, s, t, 3, 3, d, layout=layout)
    k = laid_out(k + 2 * torch.randn(1, 1, 3, d, device="cuda").half(), layout)
    q8, k8 = converted(isa, call_of(isa, q, k, v))
    want = int8_heads.to_int8(q)
    assert torch.equal(q8.numbers[..., :d], want.numbers) and not q8.numbers[..., d:].any()
    torch.testing.assert_close(q8.scales, want.scales, rtol=1e-6, atol=0)
    mean = k.double().mean(1).float()
    want = int8_heads.to_int8(k, mean, int8_heads.TOGETHER)
    off = (k8.numbers[..., :d].int() - want.numbers.int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 2e-3, locate(off)
    torch.testing.assert_close(k8.scales, want.scales, rtol=1e-5, atol=0)


@pytest.mark.parametrize("d", HEADS)
def test_a_bias_of_all_keys_and_outliers_cost_little(isa, tactic, d):
    """What the mean and the rotation are for. Of normal numbers the error is 1.0-1.1 %, with a bias the same; with two channels
    twelve times as loud as the others 1.9-2.2 %, without the rotation 7 %."""
    q, k, v = inputs(1, 1024, 2048, 4, 4, d)
    bias = 2 * torch.randn(1, 1, 4, d, device="cuda").half()
    loud = torch.ones(d, device="cuda").half().index_fill(0, torch.tensor([5, 40], device="cuda"), 12.0)
    for what, (a, b) in {"plain": (q, k), "bias": (q, k + bias), "outliers": (q / loud, k * loud)}.items():
        exact = reference(a.double(), b.double(), v.double())
        call = call_of(isa, a, b, v)
        got = op.plan(call, card(0, isa), tactic)(*call.tensors)
        error = float((got.double() - exact).norm() / exact.norm())
        assert error < (0.026 if what == "outliers" else 0.0118), f"{what}: {error}"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_spoils_what_it_must(isa, tactic, value):
    """A query's row; of a key every row. Keys beyond their length are never met."""
    q, k, v = inputs(1, 70, 200, 1, 1, 128)
    lengths = torch.tensor([150], dtype=torch.int32, device="cuda")
    k[0, 170] = value
    call = call_of(isa, q, k, v, key_lengths=lengths)
    plan = op.plan(call, card(0, isa), tactic)
    assert plan(*call.tensors).isfinite().all()
    q[0, 5, 0, 7] = value
    got = plan(*call.tensors)
    assert got[0, 5].isnan().all() and got[0, torch.arange(70, device="cuda") != 5].isfinite().all()
    k[0, 20, 0, 3] = value
    assert plan(*call.tensors).isnan().all()


def test_zeros_and_repeats(isa, tactic):
    q, k, v = inputs(2, 130, 90, 2, 2, 64)
    call = call_of(isa, torch.zeros_like(q), k, v)
    got = op.plan(call, card(0, isa), tactic)(*call.tensors)
    torch.testing.assert_close(got, v.float().mean(1, keepdim=True).expand_as(q).half(), rtol=2e-3, atol=1e-3)
    call = call_of(isa, q, torch.zeros_like(k), v)
    plan = op.plan(call, card(0, isa), tactic)
    one, again = plan(*call.tensors), plan(*call.tensors)
    assert torch.equal(one, again) and math.isfinite(float(one.float().norm()))


def test_queries_of_the_smallest_bf16_see_all_keys_alike(isa):
    """And none that does not exist: a scale of zero times minus infinity is no number, and no weight of zero."""
    q, k, v = (t.bfloat16() for t in inputs(1, 70, 1029, 2, 2, 64))
    call = call_of(isa, (q.sign().double() * 1e-40).bfloat16(), k * 1e-3, v)
    got = op.plan(call, card(0, isa), op.TURBO_INT8)(*call.tensors)
    torch.testing.assert_close(got.float(), v.float().mean(1, keepdim=True).expand_as(q), rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("asked", ["plain", "grouped", "general", "sparse"])
def test_some_heads_at_a_time(isa, tactic, asked, monkeypatch):
    """What is rounded of a long video would not fit: by pieces of the heads the result is the same, bit for bit."""
    h, hk = (6, 3) if asked == "grouped" else (5, 5)
    q, k, v = inputs(2, 300, 1100, h, hk, 128, layout="packed")
    mask, more = None, {}
    if asked == "general":
        mask = torch.randn(2, h, 300, 1100, device="cuda").half()
        more = {"distance_bias": torch.randn(h, 1399, device="cuda"), "window": (700, -1)}
    if asked == "sparse":
        blocks, tail = choose_blocks(q, k, v, most=5, policy=on(isa))
        more = {"blocks": blocks, "tail": tail}
    call = call_of(isa, q, k, v, mask, **more)
    whole = op.plan(call, card(0, isa), tactic)(*call.tensors)
    monkeypatch.setattr(int8_heads, "MOST_BYTES", 2 * 1400 * 128 * 2)
    assert len(list(int8_heads.pieces(q, k))) > 1
    assert torch.equal(op.plan(call, card(0, isa), tactic)(*call.tensors), whole)


# ------------------------------------------------------------------------------------------------- values in 8 bits too


def meant_values(values, tokens):
    """What rounded values stand for, [batch, tokens, heads, d] in float64: their mean is that of all tokens, exactly."""
    flat = values.numbers.transpose(-1, -2).flatten(2, 3)[:, :, :tokens].double()
    return flat.transpose(1, 2) * values.scales.double()[:, None]


def rounded(isa, call):
    """Queries, keys and values as the kernels make them, and in float64 what they stand for."""
    o = Operands.of(call.tensors, call.options)
    code = card(0, isa)
    made = int8_heads.plan(code, o, "test", int8_heads.TILE)(o.q, o.k, o.key_lengths, None)
    values, _ = int8_heads.plan_values(code, o, "test")(o.v, o.key_lengths, None)
    q8, k8 = (Int8Heads(*one) for one in made[:2])
    d, tokens = o.q.shape[3], o.k.shape[1]
    lengths = torch.full((o.q.shape[0],), tokens, device="cuda") if o.key_lengths is None else o.key_lengths
    off = values.scales.double() * values.sums / lengths.clamp(min=1)[:, None, None]
    v = meant_values(values, tokens) + (values.means.double() - off)[:, None]
    return q8, k8, values, (meant(q8, 1, d), meant(k8, int8_heads.TILE, d)[:, :tokens], v)


@given(configurations())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_both_products_of_random_configurations(isa, c):
    """Against float64 over what the numbers stand for. A weight is off by half of a 254th of its tile's largest, and so a row by
    that share of the values' magnitudes, less their mean."""
    b, s, t, h, hk, d = c["sizes"]
    if d not in ROUNDED_HEADS:
        d = 128 if isa == "sm_61" else op.ONLY_INT8
    q, k, v = inputs(b, s, t, h, hk, d, size=c["size"], layout=c["layout"])
    mask, asked = options_of(c | {"sizes": (b, s, t, h, hk, d)})
    call = call_of(isa, q, k, v, mask, **asked)
    _q8, _k8, values, wide = rounded(isa, call)
    like = mask if mask is None or mask.dtype is torch.bool else mask.double()
    exact = reference(*wide, like, **asked)
    # The largest magnitude of each channel less its mean bounds what rounded weights may move.
    group = h // hk
    reach = (values.scales.double() * 127).repeat_interleave(group, 1)[:, None]
    got = op.plan(call, card(0, isa), op.TURBO_INT8)(*call.tensors).double()
    assert got.isfinite().all(), str(c)
    # At worst every weight of a tile is off by half a step of 254, and the sum with it.
    allowed = reach * 2 * int8_heads.TILE / 254 + exact.abs() * 2.0**-10 + 1e-3
    assert ((got - exact).abs() <= allowed).all(), f"{c}: {locate((got - exact).abs() - allowed)}"
    if exact.numel() > 5000:
        error = float((got - exact).square().mean().sqrt())
        assert error <= 0.01 * float(reach.mean()) + 2.0**-10 * float(exact.abs().mean()) + 1e-4, f"{c}: rms {error}"


@pytest.mark.parametrize("layout", ["plain", "packed", "heads first", "beginning"])
@pytest.mark.parametrize("d", ROUNDED_HEADS)
@pytest.mark.parametrize("t", [1, pytest.param(65, marks=pytest.mark.sanitize), 1100])
def test_values_are_the_references(isa, d, t, layout):
    """Bit for bit, less the mean that the kernel found."""
    q, k, v = inputs(2, 3, t, 3, 3, d, layout=layout)
    _, _, found, _ = rounded(isa, call_of(isa, q, k, v))
    torch.testing.assert_close(found.means, v.double().mean(1).float(), rtol=1e-5, atol=1e-5)
    wide = v.float()
    most = torch.maximum(wide.amax(1) - found.means, found.means - wide.amin(1))
    want = int8_heads.values_to_int8(v, found.means, most)
    for name, one, other in zip(found._fields, found, want, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("asked", ["plain", "general", "blocks"])
@pytest.mark.parametrize("d", ROUNDED_HEADS)
@pytest.mark.parametrize(("s", "t"), [(1, 1), pytest.param(65, 33, marks=pytest.mark.sanitize), (130, 100)])
def test_both_products_at_ends_and_corners(isa, d, s, t, asked):
    c = {"sizes": (2, s, t, 2, 1, d), "scale": None, "lengths": [t, t // 2], "blocks": asked == "blocks"}
    if asked == "general":
        c |= {"causal": True, "window": (50, -1), "mask": "bias", "distance": True}
    q, k, v = inputs(*c["sizes"], layout="beginning")
    mask, more = options_of(c)
    call = call_of(isa, q, k, v, mask, **more)
    got = op.plan(call, card(0, isa), op.TURBO_INT8)(*call.tensors).double()
    exact, _ = oracle(q, k, v, mask, **more)
    assert got.isfinite().all() and (got - exact).abs().max() < 0.12, locate((got - exact).abs())
    assert not got[exact == 0].any(), "rows without keys are zero"


@pytest.mark.parametrize("d", ROUNDED_HEADS)
def test_both_products_err_little_more_than_the_first(isa, d):
    """The promise of `turbo`: at most 1.5 of the error of 8-bit scores alone for normal numbers, which is where values in 8 bits
    cost most."""
    q, k, v = inputs(1, 512, 8192, 2, 2, d)
    exact = reference(q.double(), k.double(), v.double())
    call = call_of(isa, q, k, v)
    _q8, _k8, _, wide = rounded(isa, call)
    alone = reference(wide[0], wide[1], v.double())
    got = op.plan(call, card(0, isa), op.TURBO_INT8)(*call.tensors)
    error = float((got.double() - exact).norm())
    assert error <= 1.5 * float((alone - exact).norm()), error


@pytest.mark.parametrize("asked", ["plain", "grouped", "bias", "mask", "sparse"])
@pytest.mark.parametrize("d", ROUNDED_HEADS)
def test_bf16_is_rounded_as_halves_of_the_same_numbers(isa, d, asked):
    """Numbers that both types hold: the results differ by their last rounding alone, of which bf16 has the coarser one."""
    h, hk = (4, 2) if asked == "grouped" else (3, 3)
    q, k, v = (((t * 16).round() / 16) for t in inputs(2, 200, 1100, h, hk, d, layout="packed"))
    halves, more = None, {}
    if asked == "bias":
        halves = (torch.randn(2, 1, 200, 1100, device="cuda") * 4).round().half() / 4
    if asked == "mask":
        halves = torch.rand(2, 1, 1, 1100, device="cuda") < 0.7
    if asked == "sparse":
        blocks, tail = choose_blocks(q, k, v, most=5, policy=on(isa))
        means = (tail.k.bfloat16(), tail.v.bfloat16())
        more = {"blocks": blocks, "tail": tail._replace(k=means[0].half(), v=means[1].half())}
    wanted = attended(isa, q, k, v, halves, **more)
    if more:
        more["tail"] = more["tail"]._replace(k=means[0], v=means[1])
    other = halves if halves is None or halves.dtype is torch.bool else halves.bfloat16()
    got = attended(isa, *(t.bfloat16() for t in (q, k, v)), other, **more)
    assert got.dtype is torch.bfloat16
    step = (2.0**-8 + 2.0**-10) * wanted.float().abs() + 1e-6
    assert ((got.float() - wanted.float()).abs() <= step).all()


def attended(isa, *given, **asked):
    call = call_of(isa, *given, **asked)
    assert next(op.obstacles(call), None) is None
    return op.plan(call, card(0, isa), op.TURBO_INT8)(*call.tensors)


@pytest.mark.parametrize("d", ROUNDED_HEADS)
def test_bf16_beyond_the_largest_half(isa, d):
    q, k, v = (t.bfloat16() for t in inputs(1, 130, 1100, 2, 2, d))
    exact = reference(q.double(), k.double(), v.double())
    got = attended(isa, q, k, v * 2.0**20).double() / 2**20
    assert got.isfinite().all() and float((got - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_both_products_carry_what_is_no_number(isa, value):
    q, k, v = inputs(1, 70, 200, 1, 1, 128)
    lengths = torch.tensor([150], dtype=torch.int32, device="cuda")
    k[0, 170], v[0, 180] = value, value
    call = call_of(isa, q, k, v, key_lengths=lengths)
    plan = op.plan(call, card(0, isa), op.TURBO_INT8)
    assert plan(*call.tensors).isfinite().all()
    q[0, 5, 0, 7] = value
    got = plan(*call.tensors)
    assert got[0, 5].isnan().all() and got[0, torch.arange(70, device="cuda") != 5].isfinite().all()
    v[0, 20, 0, 3] = value
    got = plan(*call.tensors)
    assert got[..., 3].isnan().all() and got[0, 6, 0, 4:].isfinite().all()
    k[0, 20, 0, 3] = value
    assert plan(*call.tensors).isnan().all()
