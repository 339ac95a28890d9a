"""attention on the GPU, in both instruction classes and both ways to accumulate, against float64."""

from __future__ import annotations

import math
import os
import time

import pytest
import torch
from gpu.support import HALF_STEP, SMALLEST, compared, in_turns, locate, on, ratio, tried, until_chosen
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from fusestream.kernels_cuda import LEDGER, OPS, BlockList, KernelPolicy, KernelRefused, attention
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card
from fusestream.kernels_cuda.ops.attention import attention_products
from fusestream.kernels_cuda.ops.attention.attention import HEADS, WIDE
from fusestream.kernels_cuda.ops.attention.attention_operands import Operands, arguments
from fusestream.kernels_cuda.ops.attention.sdpa import run_sdpa

# In all 10,000: half of them in each instruction class, half of those in each way to accumulate.
EXAMPLES = int(os.environ.get("FUSESTREAM_EXAMPLES") or 2500)
LENGTHS = st.one_of(
    st.integers(1, 17),
    st.sampled_from([31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 255, 256, 257, 289]),
    st.integers(18, 700),
)


def laid_out(t, layout):
    """The same values in the layouts callers have, with NaN wherever a kernel has no business."""
    b, s, h, d = t.shape
    if layout == "heads first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        room = torch.full((b, s, 3, h, d), torch.nan, dtype=t.dtype, device="cuda")
        room[:, :, 1] = t
        return room[:, :, 1]
    if layout == "beginning":  # more tokens follow
        room = torch.full((b, s + 70, h, d), torch.nan, dtype=t.dtype, device="cuda")
        room[:, :s] = t
        return room[:, :s]
    return t


def inputs(b, s, t, h, hk, d, size=1.0, layout="plain"):
    parts = (torch.randn(b, n, heads, d, device="cuda").half() for n, heads in ((s, h), (t, hk), (t, hk)))
    q, k, v = (laid_out(p, layout) for p in parts)
    return q * size if layout == "plain" and size != 1 else q, k, v


def oracle(q, k, v, mask=None, **options):
    """float64, and how large an error may be: per output, what rounding the weights and the result costs."""
    wide = [t.double() for t in (q, k, v)]
    mask = mask if mask is None or mask.dtype is torch.bool else mask.double()
    exact = reference(*wide, mask, **options)
    if "tail" in options:
        options["tail"] = options["tail"]._replace(v=options["tail"].v.abs())
    sizes = reference(wide[0], wide[1], wide[2].abs(), mask, **options)
    return exact, sizes


def reference(q, k, v, mask=None, **options):
    """The op's reference on the GPU. The op itself would not choose it there."""
    from fusestream.kernels_cuda.ops.attention import attention as op

    tensors, others = arguments(q, k, v, mask, **options)
    return op.reference(*tensors, *others)


def score_error(q, k, precision, scale=None):
    """How far a score may be off. `fast` sums in fp16: 11 bits of the magnitudes summed, on a grid of 2^-24 for the keys."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    a, b = q.abs().float().transpose(1, 2), k.abs().float().repeat_interleave(group, 2).transpose(1, 2)
    reach = float((a @ b.transpose(-1, -2)).amax()) * scale
    if precision == "precise":
        return reach * 2e-6
    return 3 * HALF_STEP * reach + float(a.sum(-1).amax()) * scale * 2.0**-24 * q.shape[-1] / 16


def below_half_range(q, v):
    """To be added to `sizes`: weights below 2^-14 are rounded on a grid of 2^-24, whatever their size."""
    of_keys = v.double().abs().sum(1, keepdim=True) * 2.0**-25 / (4 * HALF_STEP)
    return of_keys.repeat_interleave(q.shape[2] // v.shape[2], 2)


def check(got, exact, sizes, precision, error, what):
    """What rounding the weights and the result costs, a few half steps of the weighted magnitudes, and the scores' error.

    `fast` also sums the values in fp16, where weights are small enough for its grid near zero to show.
    """
    steps, smallest = (4.0, SMALLEST) if precision == "precise" else (8.0, 2.0**-16)
    allowed = HALF_STEP * (exact.abs() + steps * sizes) + math.expm1(min(2 * error, 50)) * sizes + smallest
    found = (got.double() - exact).abs()
    assert got.double().isfinite().all(), f"{what}: not finite"
    worst = float((found - allowed).max()) if found.numel() else -1.0
    assert worst <= 0, f"{what}: {worst:.3g} over the allowed error at {locate(found - allowed)}"


@st.composite
def configurations(draw):
    """Sizes and everything that may be asked, drawn together so that they fit each other."""
    d = draw(st.sampled_from(HEADS))
    plain = d == WIDE or draw(st.booleans())
    s, t = draw(LENGTHS), draw(LENGTHS)
    h, hk = (1, 1) if d == WIDE else draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)]))
    b = draw(st.integers(1, 3))
    found = {
        "sizes": (b, s, t, h, hk, d),
        "layout": draw(st.sampled_from(["plain", "packed", "heads first", "beginning"])),
        "size": draw(st.sampled_from([1.0, 1.0, 0.01, 6.0])),
        "lengths": draw(st.lists(st.integers(0, t), min_size=b, max_size=b)) if draw(st.booleans()) else None,
        "scale": draw(st.sampled_from([None, None, 0.05])),
    }
    if plain:
        return found
    return found | {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from([(-1, -1), (-1, -1), (40, -1), (-1, 7), (70, 70), (0, 0)])),
        "mask": draw(st.sampled_from(["none", "bool", "bias", "keys", "heads"])),
        "distance": draw(st.booleans()),
        "blocks": draw(st.booleans()),
    }


def options_of(c):
    """The keyword arguments of a configuration, and its mask."""
    b, s, t, h, _, _ = c["sizes"]
    options = {"scale": c["scale"], "causal": c.get("causal", False), "window": c.get("window", (-1, -1))}
    if c["lengths"] is not None:
        options["key_lengths"] = torch.tensor(c["lengths"], dtype=torch.int32, device="cuda")
    if c.get("distance"):
        options["distance_bias"] = torch.randn(h, s + t - 1, device="cuda")
    if c.get("blocks"):
        rows, size = 128, 64
        shape = (1, h, -(-s // rows))
        order = torch.rand(*shape, -(-t // size), device="cuda").argsort(-1).int()
        counts = torch.randint(0, order.shape[-1] + 1, shape, device="cuda", dtype=torch.int32)
        options["blocks"] = BlockList(order, counts, rows, size)
    masks = {
        "bool": lambda: torch.rand(b, 1, s, t, device="cuda") > 0.4,
        "bias": lambda: torch.randn(1, h, s, t, device="cuda").half(),
        "keys": lambda: torch.rand(b, 1, 1, t, device="cuda") > 0.3,
        "heads": lambda: torch.randn(b, h, 1, t, device="cuda").half(),
    }
    return masks.get(c.get("mask", "none"), lambda: None)(), options


@given(configurations())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_random_configurations(isa, precision, c):
    q, k, v = inputs(*c["sizes"], size=c["size"], layout=c["layout"])
    mask, options = options_of(c)
    exact, sizes = oracle(q, k, v, mask, **options)
    sizes = sizes + below_half_range(q, v)
    got = attention(q, k, v, mask, **options, policy=on(isa, precision))
    assert got.is_contiguous() and got.shape == q.shape
    check(got, exact, sizes, precision, score_error(q, k, precision, c["scale"]), str(c))


@pytest.mark.parametrize("asked", ["plain", "general", "blocks"])
@pytest.mark.parametrize("d", HEADS)
@pytest.mark.parametrize(("s", "t"), [(1, 1), pytest.param(65, 33, marks=pytest.mark.sanitize), (257, 100)])
def test_ends_and_corners(isa, precision, d, s, t, asked):
    """Small, with everything on: what the sanitizers see."""
    if d == WIDE and asked != "plain":
        pytest.skip("one kernel serves heads of 384")
    c = {"sizes": (2, s, t, *((1, 1) if d == WIDE else (2, 1)), d), "scale": None, "lengths": [t, t // 2]}
    if asked == "general":
        c |= {"causal": True, "window": (50, -1), "mask": "bias", "distance": True}
    c["blocks"] = asked == "blocks"
    q, k, v = inputs(*c["sizes"], layout="beginning")
    mask, options = options_of(c)
    exact, sizes = oracle(q, k, v, mask, **options)
    got = attention(q, k, v, mask, **options, policy=on(isa, precision))
    check(got, exact, sizes, precision, score_error(q, k, precision), str(c))


# How much more than torch flash's the root mean square and the mean of the error may be, for scores of unit variance and
# four times as sharp. `fast` keeps 11 bits of a score, so its error grows with them. Turing's code sums 64 of d in fp16, 48 of
# heads of 96, before it folds them into fp32, that of newer cards 32.
FACTOR = {
    ("precise", 1.0): (1.2, 1.2),
    ("precise", 4.0): (1.2, 1.2),
    ("fast", 1.0): (2.6, 4.5),
    ("fast", 4.0): (9.0, 17.0),
}


@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize(("s", "t"), [(2048, 2048), (1000, 512)])
def test_error_against_flash(isa, precision, d, s, t, size):
    """Root mean square and mean, against float64, beside those of torch's own flash attention; the peak roughly."""
    q, k, v = inputs(1, s, t, 4, 4, d, size)
    exact, _ = oracle(q, k, v)
    stock = attention(q, k, v, policy=KernelPolicy.of("off"))
    got = attention(q, k, v, policy=on(isa, precision))
    ours, theirs, factor = (
        (got.double() - exact).abs(),
        (stock.double() - exact).abs(),
        FACTOR[precision, size][isa == "sm_75"],
    )
    for name, measure in (("rms", lambda e: float(e.square().mean().sqrt())), ("mean", lambda e: float(e.mean()))):
        assert measure(ours) <= factor * measure(theirs), f"{name} {measure(ours)} against {measure(theirs)}"
    # One unlucky element each: of a few hundred thousand errors whose rms holds, the largest is no steady figure.
    assert float(ours.max()) <= 4 * factor * float(theirs.max()), "peak"


def test_t5(isa, precision):
    """UMT5's shapes: 64 heads, a relative bias for each, no scale."""
    q, k, v = inputs(1, 512, 512, 64, 64, 64, 0.3)
    options = {"scale": 1.0, "distance_bias": torch.randn(64, 2 * 512 - 1, device="cuda") * 4}
    exact, sizes = oracle(q, k, v, **options)
    got = attention(q, k, v, **options, policy=on(isa, precision))
    check(got, exact, sizes, precision, score_error(q, k, precision, 1.0), "t5")


@pytest.mark.parametrize("d", HEADS)
def test_adversaries(isa, precision, d):
    """Magnitudes near fp16's largest: never an overflow on the way, where the result itself is finite."""
    b, s, t, h = 1, 70, 90, 1
    cases = {}
    q, k, v = inputs(b, s, t, h, h, d)
    cases["large q"] = q.sign() * 60000, k * 1e-4, v
    cases["large k"] = q * 1e-4, k.sign() * 60000, v
    cases["all of one sign"] = q.abs() * 100, k.abs() * 100, v
    cases["one column"] = torch.zeros_like(q).index_fill(3, torch.tensor([3], device="cuda"), 30000), k, v
    cases["large v"] = q, k, v.sign() * 65000
    cases["largest v, all equal"] = q, k, torch.full_like(v, 65504)
    cases["equal keys"] = q, k[:, :1].expand_as(k).contiguous(), v
    cases["one key stands out"] = q, torch.cat((k[:, :40], k[:, 40:41] * 50, k[:, 41:]), 1), v
    for what, (a, b_, c) in cases.items():
        exact, sizes = oracle(a, b_, c)
        check(
            attention(a, b_, c, policy=on(isa, precision)),
            exact,
            sizes,
            precision,
            score_error(a, b_, precision),
            what,
        )


@pytest.mark.parametrize("d", HEADS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_special_values(isa, precision, d, value):
    """A NaN of a query spoils its row, one of a value its column, as in torch; others are as they were. With `fast` the
    largest query of a warp scales them all: without it they may be rounded anew."""
    q, k, v = inputs(1, 70, 80, 1, 1, d)
    clean = attention(q, k, v, policy=on(isa, precision))
    q[0, 5, 0, 7], v[0, 33, 0, 9] = torch.nan, value
    got = attention(q, k, v, policy=on(isa, precision))
    assert got[0, 5].isnan().all()
    rest = torch.arange(70, device="cuda") != 5
    assert not got[0, rest, 0, 9].isfinite().any()
    columns = torch.arange(d, device="cuda") != 9
    spared, before = got[0, rest][..., columns], clean[0, rest][..., columns]
    assert torch.equal(spared, before) if precision == "precise" else torch.allclose(spared, before, rtol=0, atol=2e-3)


def test_a_row_without_keys_is_zero(isa, precision):
    for d in HEADS:
        q, k, v = inputs(2, 40, 50, 1, 1, d)
        lengths = torch.tensor([0, 50], dtype=torch.int32, device="cuda")
        out = attention(q, k, v, key_lengths=lengths, policy=on(isa, precision))
        assert not out[0].any() and out[1].any()
    q, k, v = inputs(1, 40, 30, 2, 2, 64)
    out = attention(q, k, v, causal=True, policy=on(isa, precision))
    assert not out[:, :10].any() and out[:, 10:].any(-1).all()
    nothing = attention(q, k[:, :0], v[:, :0], policy=on(isa, precision))
    assert not nothing.any() and attention(q[:, :0], k, v, policy=on(isa, precision)).shape == (1, 0, 2, 64)


def test_a_full_block_list_is_exact(isa, precision):
    q, k, v = inputs(1, 600, 500, 2, 2, 128)
    order = torch.arange(8, device="cuda", dtype=torch.int32).expand(1, 2, 5, 8).contiguous()
    blocks = BlockList(order, torch.full((1, 2, 5), 8, dtype=torch.int32, device="cuda"), 128, 64)
    got = attention(q, k, v, blocks=blocks, policy=on(isa, precision))
    assert torch.equal(got, attention(q, k, v, policy=on(isa, precision)))
    no_limit = torch.ones(1, 1, 1, 500, dtype=torch.bool, device="cuda")  # another kernel, with a list and without
    masked = attention(q, k, v, no_limit, policy=on(isa, precision))
    assert torch.equal(attention(q, k, v, no_limit, blocks=blocks, policy=on(isa, precision)), masked)


def test_the_first_call_by_a_list_makes_no_mask(isa):
    """A mask of every query and key would be 269 MB. Of a length that no other test has."""
    q, k, v = inputs(1, 16400, 16400, 4, 4, 64)
    rows = -(-16400 // 128)
    blocks = BlockList(
        torch.zeros(1, 1, rows, 1, dtype=torch.int32, device="cuda"),
        torch.ones(1, 1, rows, dtype=torch.int32, device="cuda"), 128, 64,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, blocks=blocks, policy=on(isa))
    assert torch.cuda.max_memory_allocated() - before < 4 * q.nbytes


@pytest.mark.parametrize("d", HEADS)
def test_bitwise_repeatable(isa, precision, d):
    q, k, v = inputs(2, 700, 900, 1, 1, d)
    first = attention(q, k, v, policy=on(isa, precision))
    assert all(torch.equal(first, attention(q, k, v, policy=on(isa, precision))) for _ in range(5))


def test_long_and_wide(isa):
    """A video's length, checked at rows from all over it."""
    q, k, v = inputs(1, 20000, 20000, 2, 2, 128)
    got = attention(q, k, v, policy=on(isa))
    rows = torch.tensor([0, 255, 256, 9999, 19967, 19999], device="cuda")
    exact, sizes = oracle(q[:, rows], k, v)
    check(got[:, rows], exact, sizes, "precise", score_error(q[:, rows], k, "precise"), "long")


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_strides_beyond_32_bits(isa):
    room = torch.zeros(2**32 + 2**16, device="cuda", dtype=torch.float16)
    q, k, v = (room[i * 2**14 :].as_strided((1, 3, 2, 128), (0, 2**31, 128, 1)) for i in range(3))
    for t in (q, k, v):
        t.copy_(torch.randn(1, 3, 2, 128, device="cuda"))
    exact, sizes = oracle(q, k, v)
    check(attention(q, k, v, policy=on(isa)), exact, sizes, "precise", score_error(q, k, "precise"), "far apart")


def test_graph_and_compile(isa):
    q, k, v = inputs(1, 300, 300, 2, 2, 64)

    def run(q, k, v):
        return attention(q, k, v, causal=True, policy=on(isa))

    run(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    want = run(q, k, v)
    assert torch.equal(captured, want)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v), want)


def test_auto_serves_everything():
    """Whatever our kernels refuse, torch serves, and the answer is the same."""
    q, k, v = inputs(1, 60, 60, 2, 2, 80)
    with pytest.raises(KernelRefused, match="heads have 80 elements"):
        attention(q, k, v, policy=on(None))
    exact, sizes = oracle(q, k, v)
    check(attention(q, k, v), exact, sizes, "precise", score_error(q, k, "precise"), "head of 80")
    q, k, v = inputs(1, 60, 60, 2, 2, 64)
    exact, sizes = oracle(q, k, v, causal=True)
    check(attention(q, k, v, causal=True), exact, sizes, "precise", score_error(q, k, "precise"), "auto")


FIRST_TURN = 0.25  # seconds: the plan of a size takes 0.05 to 0.08, a kernel that is not compiled yet 0.5 and more


@pytest.mark.timed
@pytest.mark.parametrize(
    "sizes", [(1024, 1024), (700, 700), (1024, 77)], ids=["whole tiles", "parts of tiles", "few keys"]
)
@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"key_lengths": True}], ids=["plain", "causal", "masked"])
def test_cudnn_begins_beside_the_work(asked, sizes):
    """What is begun there is what the first turn would wait for: an attention of another size takes no such time then."""
    q, k, v = inputs(8, *sizes, 8, 4, 128)
    if "key_lengths" in asked:
        asked = {"key_lengths": torch.full((8,), sizes[1] - 50, dtype=torch.int32, device="cuda")}
    call = Call("attention", *arguments(q, k, v, **asked))
    cudnn = next(one for one in OPS["attention"].candidates if one.name == "torch cudnn")
    refused = cudnn.refuse(call)
    if refused is not None:
        pytest.skip(refused)
    began = time.perf_counter()
    has_begun = cudnn.begin(call)
    until = time.monotonic() + 30
    while not has_begun() and time.monotonic() < until:
        time.sleep(0.01)
    took = time.perf_counter() - began
    assert has_begun()
    torch.cuda.synchronize()
    start = time.perf_counter()
    got = cudnn.prepare(call)(*call.tensors)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    print(f"{took * 1e3:.0f} ms beside the work, {first * 1e3:.0f} ms at the first turn")
    assert first < FIRST_TURN
    torch.testing.assert_close(got, reference(q, k, v, **asked), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("d", [40, 160])
def test_torchs_kernels_take_turns_where_ours_do_not_serve(d):
    q, k, v = inputs(2, 1024, 1000, 4, 4, d)
    LEDGER.clear()
    got = until_chosen(lambda: attention(q, k, v, policy=KernelPolicy()))
    assert {"torch flash", "torch mem-efficient"} <= tried("attention").keys()
    torch.testing.assert_close(got, reference(q, k, v).half(), atol=2e-3, rtol=2e-3)
    assert "heads have" in " ".join(refusal.reason for refusal in LEDGER.refusals if refusal.candidate == "cuda")


# One head of the VAEs: Wan 2.1's, Wan 2.2's, that of pictures; queries, keys.
WIDE_HEADS = [
    (384, 1500, 1500),
    (1024, 880, 880),
    (512, 8192, 9000),
    (512, 33 * 31, 33 * 31),
    (256, 5, 7),
    (512, 9000, 64),
]


def in_stripes(q, k, v, isa=None):
    call = Call("attention", *arguments(q, k, v), on(isa, mode="auto"))
    assert attention_products.PRODUCTS.refuse(call) is None
    return attention_products.PRODUCTS.prepare(call)(*call.tensors)


@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize(("d", "s", "t"), WIDE_HEADS)
def test_products_in_stripes(isa, d, s, t, size):
    """Against float64, beside torch's kernel for heads this wide; out of a packed projection, with NaN around it."""
    q, k, v = (laid_out(part, "packed") for part in inputs(1, s, t, 1, 1, d))
    q = laid_out(q * size, "packed")
    got = in_stripes(q, k, v, isa)
    exact, _ = oracle(q, k, v)
    theirs = run_sdpa(Operands.of(*arguments(q, k, v)), (SDPBackend.EFFICIENT_ATTENTION,))
    ours, beside = ((one.double() - exact).square().mean().sqrt() for one in (got, theirs))
    print(f"{d} {s} {t} {size}: rms error {float(ours):.2e}, torch's {float(beside):.2e}")
    assert got.isfinite().all() and ours <= 1.2 * beside
    assert torch.equal(in_stripes(q, k, v, isa), got), "the same bits again"


def test_the_pass_between_two_products(isa):
    """What it leaves of one stripe after another, in rows that lie apart, beside the same in torch."""
    kernel = card(0, isa).kernel(attention_products.UNIT, attention_products.UNIT)
    rows, keys, pitch, d, scale = 37, 4091, 4096, 512, 0.3
    state = [torch.full((rows,), torch.nan, device="cuda") for _ in range(2)] + [torch.randn(rows, d, device="cuda")]
    want = [t.clone() for t in state]
    for turn in range(3):
        room = torch.full((rows, pitch), torch.nan, device="cuda")
        scores = room[:, :keys].copy_(torch.randn(rows, keys, device="cuda") * (turn + 1))
        scores[: 12 - 4 * turn] = -torch.inf  # some rows begin with one or more stripes of nothing else
        made, weights = (torch.full((rows, pitch), torch.nan, device="cuda").half() for _ in range(2))
        params = attention_products.SoftmaxStripeParams(
            keys=keys, pitch=pitch, d=d, is_first=turn == 0, scale_log2=scale * math.log2(math.e)
        )
        launch = kernel.prepare(params, grid=(rows, 1, 1), block=attention_products.THREADS, shape="a stripe")
        launch(room.data_ptr(), made.data_ptr(), *(t.data_ptr() for t in state))
        attention_products.softmax_stripe(scores, weights[:, :keys], *want, scale, first=turn == 0)
        torch.testing.assert_close(made[:, :keys], weights[:, :keys], atol=2e-3, rtol=2e-3)
        assert not made[:, keys:].any(), "weights that do not exist are zero"
        for got, exact in zip(state, want, strict=True):
            torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.timed
@pytest.mark.parametrize("tokens", [16384, 65536])
def test_products_in_stripes_are_faster_than_torchs_kernel(tokens):
    """8192 queries of a picture of 1024x1024 and of 2048x2048. On an H100 0.60 to 0.75 of its time, and less of many keys."""
    q, k, v = inputs(1, 8192, tokens, 1, 1, 512)
    operands = Operands.of(*arguments(q, k, v))
    found = in_turns(
        theirs=lambda: run_sdpa(operands, (SDPBackend.EFFICIENT_ATTENTION,)), ours=lambda: in_stripes(q, k, v)
    )
    rates = {name: 4 * 8192 * tokens * 512 / min(each) / 1e9 for name, each in found.items()}
    print(f"8192 x {tokens} x 512, ms: {compared(found, 1)}; TFLOP/s: {rates}")
    assert ratio(found) < 0.85
