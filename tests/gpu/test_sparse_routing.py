"""Sparse attention on the GPU: the means and the choice against the reference, the tail against float64 in every tier."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from gpu.support import STEPS, on
from gpu.test_attention import LENGTHS, check, inputs, oracle, reference, score_error
from gpu.test_attention_turbo import TACTICS, meant, rounded, sums_of
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fusestream.kernels_cuda import BlockList, Tail, attention, choose_blocks
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card
from fusestream.kernels_cuda.ops.attention import attention as op
from fusestream.kernels_cuda.ops.attention import int8_heads, sparse_routing
from fusestream.kernels_cuda.ops.attention.attention import TURBO, TURBO_INT8
from fusestream.kernels_cuda.ops.attention.attention_operands import Operands, arguments
from fusestream.kernels_cuda.ops.attention.int8_heads import Int8Heads

EXAMPLES = int(os.environ.get("FUSESTREAM_EXAMPLES") or 1250)
MORE = {"max_examples": EXAMPLES, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
HEADS, IN_HALVES = sparse_routing.HEADS, int8_heads.HEADS
ASKED = ("most", "near", "sinks", "deviations", "left", "scale")


EACH = pytest.mark.parametrize("tactic", (*TACTICS, TURBO_INT8), ids=str)  # in the fixture's stead


@pytest.fixture(params=TACTICS, ids=str)
def tactic(request):
    return request.param


@st.composite
def choices(draw, sizes=HEADS):
    d = draw(st.sampled_from(sizes))
    long = st.one_of(LENGTHS, st.integers(700, 3000))
    heads = draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)]))
    return {
        "sizes": (draw(st.integers(1, 2)), draw(LENGTHS), draw(long), *heads, d),
        "layout": draw(st.sampled_from(["plain", "packed", "heads first", "beginning"])),
        "most": draw(st.integers(0, 12)),
        "near": draw(st.sampled_from([0, 1, 2, None])),
        "sinks": draw(st.integers(0, 3)),
        **draw(
            st.sampled_from(
                [{}, *({"deviations": n} for n in (0.0, 1.0, -0.5)), *({"left": n} for n in (0.02, 0.1, 0.4))]
            )
        ),
        "scale": draw(st.sampled_from([None, 0.02, 1.0])),
        "dtype": draw(st.sampled_from([torch.float16, torch.float16, torch.bfloat16])),
    }


def asked_of(c):
    return {name: c.get(name) for name in ASKED}


def with_a_tail(c):
    """The same, but where a short last block is not visited in any case: no mean could stand for it there."""
    return c if c["near"] is not None else c | {"near": 0}


def chosen_of(blocks, tail):
    """Which blocks a row visits, by its bits; its list must say the same, in order."""
    chosen = ~tail.unvisited
    assert torch.equal(chosen.sum(-1), blocks.counts)
    places = torch.arange(blocks.keys.shape[-1], device="cuda")
    listed = torch.where(places < blocks.counts[..., None], blocks.keys, chosen.shape[-1]).long()
    assert (listed.diff(dim=-1)[places[1:].expand(*listed.shape[:-1], -1) < blocks.counts[..., None]] > 0).all()
    marks = torch.zeros(*chosen.shape[:-1], chosen.shape[-1] + 1, dtype=torch.bool, device="cuda").scatter_(
        -1, listed, True
    )
    assert torch.equal(marks[..., :-1], chosen)
    return chosen


@pytest.mark.sanitize
def test_a_row_of_nan_has_room_for_all_that_it_visits(isa):
    q, k, v = inputs(1, 2530, 2530, 2, 2, 64)
    q[0, -30:] = torch.nan
    blocks, tail = choose_blocks(q, k, v, most=10, sinks=3, policy=on(isa))
    assert (chosen_of(blocks, tail)[:, :, -1].sum(-1) > 10).all()
    out = attention(q, k, v, blocks=blocks, tail=tail, policy=on(isa))
    assert out[0, -30:].isnan().all() and out[0, :2432].isfinite().all()


@given(choices())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(**MORE)
def test_the_choice(isa, c):
    """Means to their rounding. The choice: as the reference's in float64, but where scores are nearly equal."""
    q, k, v = (t.to(c["dtype"]) for t in inputs(*c["sizes"], layout=c["layout"]))
    step = STEPS[c["dtype"]][0]
    asked = asked_of(c) | {"left": None}
    blocks, tail = choose_blocks(q, k, v, **asked, policy=on(isa))
    for mean, x in ((tail.k, k), (tail.v, v)):
        want = sparse_routing.block_means(x.double(), 64).transpose(1, 2)
        assert (mean.double() - want).abs().max() <= step * want.abs().max() * 1.01 + 1e-6
    chosen = chosen_of(blocks, tail)
    q_means = sparse_routing.block_means(q.double(), 128).to(c["dtype"]).double()
    group = q.shape[2] // k.shape[2]
    scores = q_means @ tail.k.double().transpose(1, 2).repeat_interleave(group, 1).transpose(-1, -2)
    asked["scale"] = 1.0
    want, _, visited, _, _ = sparse_routing.reference(q.double(), k.double(), v.double(), *asked.values())
    other = chosen != ~Tail(tail.k, tail.v, visited).unvisited
    if other.any():
        # How far a score lies from the last that was taken, and from the bar. Blocks that are visited in any case come first.
        rest = {"deviations": None, "left": None, "scale": 1.0}
        always = sparse_routing.reference(q, k, v, most=0, near=c["near"], sinks=c["sinks"], **rest)[2]
        taken = ~Tail(tail.k, tail.v, always).unvisited
        ranked = scores.masked_fill(taken, torch.inf).sort(dim=-1, descending=True).values
        edges = [ranked[..., at : at + 1] for at in (c["most"] - 1, c["most"]) if 0 <= at < scores.shape[-1]]
        if asked["deviations"] is not None:
            edges.append(
                scores.mean(-1, keepdim=True) + asked["deviations"] * scores.std(-1, correction=0, keepdim=True)
            )
        gaps = torch.stack([(scores - edge).abs() for edge in edges]).amin(0)
        reach = (
            q_means.abs() @ tail.k.double().abs().transpose(1, 2).repeat_interleave(group, 1).transpose(-1, -2)
        ).amax()
        # The score, the row's mean and its deviation, each by the rounding of both means.
        assert gaps[other].max() <= 6 * step * reach + 1e-6, str(c)


@given(choices(), st.sampled_from([0.02, 0.1, 0.4, 1.0]))
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(**MORE)
def test_the_choice_by_weight(isa, c, left):
    """By float64 over the kernel's own means of keys: what is left weighs no more than asked, and without the worst block that is
    visited for its weight it would weigh more. What is visited is the best."""
    q, k, v = (t.to(c["dtype"]) for t in inputs(*c["sizes"], layout=c["layout"]))
    asked = asked_of(c) | {"most": 0, "deviations": None, "left": left}
    blocks, tail = choose_blocks(q, k, v, **asked, policy=on(isa))
    chosen, few = chosen_of(blocks, tail), choose_blocks(q, k, v, **asked | {"left": None}, policy=on(isa))
    by_weight = chosen & few[1].unvisited
    halves = sparse_routing.block_means(q.double(), 64).to(c["dtype"]).double()
    k_means = tail.k.double().transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1)
    scores, scale = halves @ k_means.transpose(-1, -2), c["sizes"][-1] ** -0.5 if c["scale"] is None else c["scale"]
    weights = sparse_routing.block_weights(scores, q.shape[1], k.shape[1], scale)
    # A mean of queries may be rounded otherwise, when its sum lies between two of its type: by so much a weight may be off.
    off = 2 * STEPS[c["dtype"]][0] * float((halves.abs() @ k_means.abs().transpose(-1, -2)).amax()) + 1e-6
    much = math.expm1(min(2 * off * scale, 50)) + 1e-5
    rest = (weights * ~chosen).sum(-1)
    assert (rest <= left + much).all(), str(c)
    least = weights.masked_fill(~by_weight, torch.inf).amin(-1, keepdim=True)
    assert (weights.masked_fill(chosen, 0) <= least * (1 + much) ** 2).all(), str(c)
    assert (rest[..., None] + least + much > left)[by_weight.any(-1)].all(), str(c)


@given(choices(IN_HALVES))
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(**MORE)
def test_the_tail(isa, tactic, c):
    """Attention over lists and means, against float64 over the same lists and means (and the same numbers in 8 bits)."""
    q, k, v = inputs(*c["sizes"], layout=c["layout"])
    blocks, tail = choose_blocks(q, k, v, **asked_of(with_a_tail(c)), policy=on(isa))
    call = Call("attention", *arguments(q, k, v, blocks=blocks, tail=tail), on(isa, "turbo"))
    assert next(op.obstacles(call), None) is None
    got = op.plan(call, card(0, isa), tactic)(*call.tensors)
    wide_q, wide_k, tail_k = q.double(), k.double(), tail.k.double()
    error = score_error(q, torch.cat((k, tail.k), 1), tactic.precision)
    if tactic.in_8_bits:
        o = Operands.of(call.tensors, call.options)
        made = int8_heads.plan(card(0, isa), o, "test")(q, k, None, tail.k)
        q8, k8, tail8 = (Int8Heads(*one) for one in made)
        d = q.shape[-1]
        wide_q, wide_k, tail_k = meant(q8, 1, d), meant(k8, 32, d), meant(tail8, 32, d)
        error = float(q8.scales.max() * max(k8.scales.max(), tail8.scales.max())) * 127 * 127 * d * d**-0.5 * 2e-6
    want = [
        reference(wide_q, wide_k, value, blocks=blocks, tail=Tail(tail_k, mean, tail.visited))
        for value, mean in ((v.double(), tail.v.double()), (v.double().abs(), tail.v.double().abs()))
    ]
    check(got, *want, sums_of(tactic), error, str(c))


@given(choices(IN_HALVES))
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(**MORE | {"max_examples": EXAMPLES // 5})
def test_the_tail_with_values_in_8_bits(isa, c):
    """As near as scores in 8 bits alone, but for what rounding values and weights costs."""
    q, k, v = inputs(*c["sizes"], layout=c["layout"])
    blocks, tail = choose_blocks(q, k, v, **asked_of(with_a_tail(c)), policy=on(isa))
    call = Call("attention", *arguments(q, k, v, blocks=blocks, tail=tail), on(isa, "turbo"))
    exact, sizes = oracle(q, k, v, blocks=blocks, tail=tail)
    alone, both = (
        float((op.plan(call, card(0, isa), tactic)(*call.tensors).double() - exact).norm())
        for tactic in (TURBO, TURBO_INT8)
    )
    assert both <= 2 * alone + 0.01 * float(sizes.norm()), str(c)


@pytest.mark.parametrize("left", [None, 0.3])
@pytest.mark.parametrize(
    ("tactic", "d"), [*itertools.product(TACTICS, IN_HALVES), *((TURBO_INT8, d) for d in HEADS)], ids=str
)
@pytest.mark.parametrize(("s", "t"), [(1, 1), pytest.param(130, 200, marks=pytest.mark.sanitize)])
def test_ends_and_corners(isa, tactic, d, s, t, left):
    """Small: what the sanitizers see."""
    q, k, v = inputs(2, s, t, 2, 1, d, layout="beginning")
    end = {"deviations": 1.0} if left is None else {"left": left}
    blocks, tail = choose_blocks(q, k, v, most=1, near=0, **end, policy=on(isa))
    chosen_of(blocks, tail)
    call = Call("attention", *arguments(q, k, v, blocks=blocks, tail=tail), on(isa, "turbo"))
    got = op.plan(call, card(0, isa), tactic)(*call.tensors)
    exact, sizes = oracle(q, k, v, blocks=blocks, tail=tail)
    error = 0.05 if tactic.in_8_bits else score_error(q, torch.cat((k, tail.k), 1), tactic.precision)
    check(got, exact, sizes, sums_of(tactic), error, "ends")


@EACH
def test_nothing_but_the_tail(isa, tactic):
    """A row that visits no block: its means are all that it sees."""
    q, k, v = inputs(1, 256, 640, 2, 2, 128)
    blocks, tail = choose_blocks(q, k, v, most=1, near=0, sinks=0, policy=on(isa))
    counts, visited = blocks.counts.clone(), tail.visited.clone()
    counts[..., 0], visited[..., 0, :] = 0, 0
    blocks, tail = blocks._replace(counts=counts), tail._replace(visited=visited)
    call = Call("attention", *arguments(q, k, v, blocks=blocks, tail=tail), on(isa, "turbo"))
    got = op.plan(call, card(0, isa), tactic)(*call.tensors)
    exact, sizes = oracle(q, k, v, blocks=blocks, tail=tail)
    if tactic.rounds_values:  # means have the scale of the values, of which they are an eighth
        assert (got.double() - exact).abs().max() < 0.06
        return
    error = 0.05 if tactic.in_8_bits else score_error(q, torch.cat((k, tail.k), 1), tactic.precision)
    check(got, exact, sizes, sums_of(tactic), error, "tail alone")


def test_special_values(isa):
    """A block with a NaN is visited by all; equal scores go to the earlier block; a NaN of a value spoils its column."""
    q, k, v = inputs(1, 1280, 1280, 1, 1, 128)
    k[:] = 1
    blocks, tail = choose_blocks(q, k, v, most=5, near=0, sinks=0, policy=on(isa))
    assert chosen_of(blocks, tail)[0, 0, 9].nonzero().flatten().tolist() == [0, 1, 2, 18, 19]
    v[0, 700, 0, 9] = torch.nan
    blocks, tail = choose_blocks(q, k, v, most=3, near=0, sinks=0, policy=on(isa))
    got = attention(q, k, v, blocks=blocks, tail=tail, policy=on(isa))
    assert got[..., 9].isnan().all() and got[..., :9].isfinite().all()
    k[0, 700] = torch.nan
    blocks, tail = choose_blocks(q, k, v, most=3, near=0, sinks=0, policy=on(isa))
    assert chosen_of(blocks, tail)[..., 10].all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_both_products_in_8_bits_carry_what_is_no_number(isa, value):
    """As dense attention does: of a value its channel, of a key all rows that meet it, in its block or its mean; of a query its
    row."""
    q, k, v = inputs(1, 1280, 1280, 1, 1, 128)

    def attended():
        blocks, tail = choose_blocks(q, k, v, most=3, near=0, sinks=0, policy=on(isa))
        call = Call("attention", *arguments(q, k, v, blocks=blocks, tail=tail), on(isa, "turbo"))
        return op.plan(call, card(0, isa), TURBO_INT8)(*call.tensors)

    v[0, 700, 0, 9] = value
    got = attended()
    assert got[..., 9].isnan().all() and got[..., :9].isfinite().all() and got[..., 10:].isfinite().all()
    q[0, 300, 0, 5] = value
    got = attended()
    others = torch.arange(1280, device="cuda") != 300
    assert got[0, 300].isnan().all() and got[0, others, 0, :9].isfinite().all()
    k[0, 700] = value
    assert attended().isnan().all()


@pytest.mark.parametrize("d", HEADS)
@pytest.mark.parametrize("share", [1, 64, 65, 1300])
def test_both_products_in_8_bits_of_one_list_for_all_heads(isa, d, share):
    """Odd lengths, grouped heads, rows that lie apart, blocks of one key and lists of one block, in any order: against float64 over
    what the numbers stand for, as dense attention in 8 bits is."""
    q, k, v = inputs(2, 300, share, 4, 2, d, layout="packed")
    count = -(-share // 64)
    order = torch.rand(1, 1, 3, count, device="cuda").argsort(-1).int()
    for many in {1, count // 2, count} - {0}:
        blocks = BlockList(order, torch.full((1, 1, 3), many, dtype=torch.int32, device="cuda"), 128, 64)
        call = Call("attention", *arguments(q, k, v, blocks=blocks), on(isa, "turbo"))
        got = op.plan(call, card(0, isa), TURBO_INT8)(*call.tensors).double()
        _, _, values, wide = rounded(isa, call)
        exact = reference(*wide, blocks=blocks)
        reach = (values.scales.double() * 127).repeat_interleave(2, 1)[:, None]
        allowed = reach * 2 * int8_heads.TILE / 254 + exact.abs() * 2.0**-10 + 1e-3
        assert ((got - exact).abs() <= allowed).all() and got.isfinite().all()


@EACH
@pytest.mark.parametrize("size", [128, 192, 512])
def test_blocks_of_many_keys_are_as_many_of_64(isa, tactic, size):
    """The last block ends behind the last key, and memory there holds what is no scale."""
    q, k, v = inputs(1, 300, 1030, 2, 2, 64)
    each, count = size // 64, -(-1030 // size)
    order = torch.rand(1, 2, 3, count, device="cuda").argsort(-1).int()
    small = (order[..., None] * each + torch.arange(each, device="cuda")).flatten(-2).int()
    there = small < -(-1030 // 64)
    small = small.gather(-1, (~there).int().argsort(dim=-1, stable=True))
    lists = (
        BlockList(order, torch.full((1, 2, 3), count, dtype=torch.int32, device="cuda"), 128, size),
        BlockList(small.contiguous(), there.sum(-1).int(), 128, 64),
    )
    del order, there
    found = []
    for blocks in lists:
        rest = [torch.full((n,), -torch.nan, device="cuda") for n in range(16, 512, 16) for _ in range(4)]
        del rest
        call = Call("attention", *arguments(q, k, v, blocks=blocks), on(isa, "turbo"))
        found.append(op.plan(call, card(0, isa), tactic)(*call.tensors))
    torch.testing.assert_close(*found, atol=2e-3, rtol=2e-3)


@EACH
def test_all_blocks_are_dense_attention(isa, tactic):
    q, k, v = inputs(1, 1300, 1300, 2, 2, 128)
    blocks, tail = choose_blocks(q, k, v, most=99, policy=on(isa))
    assert torch.equal(blocks.keys, choose_blocks(q, k, v, most=0, near=2**31 - 1, policy=on(isa))[0].keys)
    calls = (
        Call("attention", *arguments(q, k, v, **listed), on(isa, "turbo"))
        for listed in ({}, {"blocks": blocks}, {"blocks": blocks, "tail": tail})
    )
    dense, listed, tailed = (op.plan(call, card(0, isa), tactic)(*call.tensors) for call in calls)
    assert torch.equal(dense, listed) and torch.equal(dense, tailed)


def test_graph_and_repeats(isa):
    q, k, v = inputs(1, 900, 900, 2, 2, 64)

    def run(q, k, v):
        blocks, tail = choose_blocks(q, k, v, most=4, left=0.5, policy=on(isa))
        return attention(q, k, v, blocks=blocks, tail=tail, policy=on(isa))

    run(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    want = run(q, k, v)
    assert torch.equal(captured, want) and torch.equal(want, run(q, k, v))


def test_lists_of_all_heads(isa):
    """Radial lists are made once, for all heads and rows of the batch."""
    q, k, v = inputs(2, 700, 700, 3, 3, 128)
    keys = torch.randn(1, 1, 6, 11, device="cuda").argsort(-1).int()
    blocks = BlockList(keys, torch.full((1, 1, 6), 4, dtype=torch.int32, device="cuda"), 128, 64)
    exact, sizes = oracle(q, k, v, blocks=blocks)
    got = attention(q, k, v, blocks=blocks, policy=on(isa))
    check(got, exact, sizes, "precise", score_error(q, k, "precise"), "one list for all")
