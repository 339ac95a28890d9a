"""linear, linear_, linear_pair and mlp on the GPU, in both instruction classes and both ways to accumulate."""

from __future__ import annotations

import os

import pytest
import torch
from gpu.support import assert_sums as check
from gpu.support import on, padded_rows, shifted, tried, until_chosen
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fusestream.kernels_cuda import (
    LEDGER,
    KernelPolicy,
    KernelRefused,
    linear,
    linear_,
    linear_pair,
    linear_pair_,
    mlp,
)
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card
from fusestream.kernels_cuda.ops.matmul import linear as op
from fusestream.kernels_cuda.ops.matmul.linear_operands import ACTIVATIONS
from fusestream.kernels_cuda.ops.matmul.linear_torch import CublasFused, CublasPair, CublasWide

EXAMPLES = int(os.environ.get("FUSESTREAM_EXAMPLES") or 2500) // 8
ROWS = st.one_of(st.integers(1, 17), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257]), st.integers(18, 700))
EIGHTS = st.one_of(st.integers(1, 5), st.sampled_from([7, 8, 9, 15, 16, 17, 31, 32, 33, 65]), st.integers(6, 90))


@pytest.fixture(params=list(op.CUTS), ids=lambda cut: f"{cut.rows}x{cut.columns}")
def cut(request):
    return request.param


def half(*shape):
    return torch.randn(*shape, device="cuda").half()


def with_cut(cut, name, tensors, options, isa, precision):
    """One way to cut the work, whatever the rule would choose."""
    if precision not in cut.precisions:
        pytest.skip(f"no {precision} kernel of {cut.rows}x{cut.columns}")
    call = Call(name, tensors, options, on(isa, precision))
    assert next(op.obstacles(call), None) is None
    return op.plan(call, card(0, isa), op.Tactic(cut, precision))(*tensors)


def exactly(name, tensors, options):
    """float64, and the sum of magnitudes behind each element: what rounding errors grow with."""
    wide = [None if t is None else t.double() for t in tensors]
    options = (*options[:3], torch.float64)
    run = op.reference if name == "linear" else op.pair_reference
    exact = run(*wide, *options)
    x, scale = wide[0].abs(), abs(options[1])
    if name == "linear":
        sizes = x @ wide[1].abs().t() * scale + (0 if wide[2] is None else wide[2].abs())
        if wide[4] is not None:
            sizes = op.reference(
                sizes, torch.eye(sizes.shape[-1]).to(sizes), None, None, wide[4].abs(), "none", 1.0, False, None
            )
    else:
        gate, up = wide[1:] if wide[2] is not None else wide[1].chunk(2)
        sizes = (x @ gate.abs().t()) * (x @ up.abs().t()) * scale
    return exact, sizes


def laid_out(t, layout):
    """The same values with NaN wherever a kernel has no business."""
    if layout == "apart":
        return padded_rows(t, 24)
    if layout == "batches apart":
        room = torch.full((t.shape[0], t.shape[1] + 3, t.shape[2]), torch.nan, dtype=t.dtype, device="cuda")
        view = room[:, 2:-1]
        return view.copy_(t)
    return t


@st.composite
def configurations(draw):
    paired = draw(st.integers(0, 3)) == 0
    b, s = draw(st.integers(1, 3)), draw(ROWS)
    n, k = draw(EIGHTS) * 8, draw(EIGHTS) * 8
    found = {
        "paired": paired,
        "sizes": (b, s, n, k),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "scale": draw(st.sampled_from([1.0, 1.0, 0.25, 2.0])),
        "saturate": draw(st.booleans()),
        "out": draw(st.sampled_from([None, torch.float16, torch.float32])),
        "x": draw(st.sampled_from(["plain", "apart", "batches apart"])),
        "weight": draw(st.sampled_from(["plain", "apart"])),
        "size": draw(st.sampled_from([1.0, 1.0, 0.03, 30.0])),
        "cut": draw(st.integers(0, 11)),
    }
    if paired:
        return found | {"halves": draw(st.booleans())}
    return found | {
        "bias": draw(st.sampled_from([None, torch.float16, torch.float32])),
        "residual": draw(st.sampled_from([None, torch.float16, torch.float32])),
        "gate": draw(st.sampled_from(["none", "all", "batch", "frames", "tokens"])),
        "stream": draw(st.sampled_from(["plain", "apart", "batches apart"])),
    }


def operands_of(c):
    b, s, n, k = c["sizes"]
    x = laid_out(half(b, s, k) * c["size"], c["x"])
    if c["paired"]:
        both = half(2 * n, k)
        pair = (both, None) if c["halves"] else (laid_out(both[:n], c["weight"]), laid_out(both[n:], c["weight"]))
        return (x, *pair)
    frames = {"all": (1, 1), "batch": (b, 1), "frames": (b, min(s, 3)), "tokens": (b, s)}
    return (
        x,
        laid_out(half(n, k), c["weight"]),
        None if c["bias"] is None else half(n).to(c["bias"]),
        None if c["residual"] is None else laid_out(half(b, s, n).to(c["residual"]), c["stream"]),
        None if c["gate"] == "none" else half(*frames[c["gate"]], n),
    )


@given(configurations())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_random_configurations(isa, precision, c):
    tensors = operands_of(c)
    name = "linear_pair" if c["paired"] else "linear"
    options = (c["activation"], c["scale"], c["saturate"], c["out"])
    exact, sizes = exactly(name, tensors, options)
    tactics = op.tactics(precision)
    got = with_cut(tactics[c["cut"] % len(tactics)].cut, name, tensors, options, isa, precision)
    assert got.is_contiguous() and got.shape == exact.shape
    check(got, exact, sizes, precision, str(c))


@pytest.mark.sanitize
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (65, 136, 40), (130, 264, 72)])
def test_ends_and_corners(isa, precision, cut, m, n, k, paired):
    """Small, with everything on: what the sanitizers see."""
    if paired:
        tensors, name = (laid_out(half(m, k), "apart"), half(2 * n, k), None), "linear_pair"
    else:
        tensors = laid_out(half(m, k), "apart"), half(n, k), half(n), half(m, n).float(), half(m, n)
        name = "linear"
    options = ("gelu", 1.0, False, None)
    exact, sizes = exactly(name, tensors, options)
    check(with_cut(cut, name, tensors, options, isa, precision), exact, sizes, precision, f"{m}x{n}x{k}")


@pytest.mark.parametrize("k", [1536, 5120, 13824])
def test_error_of_half_sums(isa, cut, k):
    """Unit variance: `fast` is off by at most twice what fp32 sums are, `precise` by what cuBLAS is.

    Two m16n8k8 cut off twice what one m16n8k16 cuts off: 1 % of the rounding of the result at the largest k.
    """
    x, weight = half(384, k), half(512, k)
    exact = x.double() @ weight.double().t()
    error = {
        name: float((got.double() - exact).square().mean().sqrt())
        for name, got in (
            ("stock", linear(x, weight, policy=KernelPolicy.of("off"))),
            *(
                (p, with_cut(cut, "linear", (x, weight, None, None, None), ("none", 1.0, False, None), isa, p))
                for p in cut.precisions
            ),
        )
    }
    assert error["precise"] <= 1.03 * error["stock"], error
    assert error.get("fast", 0) <= 2 * error["precise"], error


@pytest.mark.parametrize("where", ["x", "weight", "both in one place", "everywhere"])
def test_outliers(isa, precision, cut, where):
    """Magnitudes of 1e4 overflow half sums. What is lost is found, and summed again in fp32."""
    x, weight = half(200, 1536), half(264, 1536)
    if where in ("x", "everywhere"):
        x[::3, ::5] *= 1e4
    if where in ("weight", "everywhere"):
        weight[::7, ::2] *= 1e4
    if where == "both in one place":
        x[5, 100], weight[9, 100] = 3e4, 3e4
    options = ("none", 2.0**-24, False, torch.float32)
    tensors = (x, weight, None, None, None)
    exact, sizes = exactly("linear", tensors, options)
    got = with_cut(cut, "linear", tensors, options, isa, precision)
    check(got, exact, sizes, precision, where)


def test_largest_numbers(isa, precision):
    """65504 times itself, k times: no infinity before the scale brings it back."""
    x, weight = (
        torch.full((70, 512), 65504.0, device="cuda").half(),
        torch.full((72, 512), 65504.0, device="cuda").half(),
    )
    got = linear(x, weight, scale=2.0**-26, policy=on(isa, precision))
    assert torch.equal(got, torch.full_like(got, 65504.0**2 * 512 * 2.0**-26))
    assert linear(x, weight, policy=on(isa, precision)).isposinf().all()
    assert (linear(x, -weight, saturate=True, policy=on(isa, precision)) == -65504).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_special_values(isa, precision, cut, value):
    """A NaN or infinity spoils its row or its column, as in torch; all others are as they were."""
    x, weight, bias = half(200, 96), half(136, 96), half(136)
    tensors, options = (x, weight, bias, None, None), ("none", 1.0, False, None)
    clean, again = (with_cut(cut, "linear", tensors, options, isa, p) for p in (precision, "precise"))
    x[5, 7] = value
    weight[9, 3] = value
    bias[11] = value
    got = with_cut(cut, "linear", tensors, options, isa, precision)
    like = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert torch.equal(got.isnan(), like.isnan()) and torch.equal(got.isinf(), like.isinf())
    # Blocks that lost their half sums were summed again, with fp32 sums.
    assert ((got == clean) | (got == again))[like.isfinite()].all()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_special_values(isa, kind):
    """Beyond the reach of the exponential, at zero, and NaN: as torch's."""
    values = [0.0, -0.0, 1e-4, 5.0, -5.0, 12.0, -12.0, 100.0, -100.0, 6e4, torch.nan]
    x = torch.zeros(len(values), 8, device="cuda").half()
    x[:, 0] = torch.tensor(values, device="cuda")
    weight = torch.zeros(8, 8, device="cuda").half()
    weight[:, 0] = 1
    got = linear(x, weight, activation=kind, policy=on(isa))
    want = op.reference(x, weight, None, None, None, kind, 1.0, False, None)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2e-3, equal_nan=True)


def test_bitwise_repeatable(isa, precision, cut):
    tensors = half(900, 1536), half(520, 1536), half(520), None, None
    options = ("gelu_tanh", 1.0, False, None)
    first = with_cut(cut, "linear", tensors, options, isa, precision)
    assert all(torch.equal(first, with_cut(cut, "linear", tensors, options, isa, precision)) for _ in range(5))


def test_cuts_agree(isa, precision):
    """A row is summed in the same order in whichever tile it stands."""
    cuts = [tactic.cut for tactic in op.tactics(precision)]
    for paired in (False, True):
        weight = half(2 * 136, 200) if paired else half(136, 200)
        tensors = (half(300, 200), weight, *([None] if paired else [None] * 3))
        name, options = ("linear_pair" if paired else "linear"), ("silu", 1.0, False, None)
        results = [with_cut(cut, name, tensors, options, isa, precision) for cut in cuts]
        assert all(torch.equal(results[0], other) for other in results[1:])


def test_in_place(isa, precision):
    """Over the residual itself, and into the middle of a larger tensor, whose rest stays as it was."""
    x, weight, gate = half(2, 150, 64), half(72, 64), half(2, 150, 72)
    stream = half(2, 150, 72).float()
    want = linear(x, weight, residual=stream, gate=gate, activation="silu", policy=on(isa, precision))
    room = torch.full((2, 200, 96), 7.0, device="cuda")
    out = room[:, 20:170, 8:80]
    linear_(out, x, weight, residual=stream, gate=gate, activation="silu", policy=on(isa, precision))
    assert torch.equal(out, want)
    out.fill_(7)
    assert (room == 7).all()
    linear_(stream, x, weight, residual=stream, gate=gate, activation="silu", policy=on(isa, precision))
    assert torch.equal(stream, want)


def test_a_pair_into_a_part_of_a_buffer(isa, precision):
    """Flux.2: beside the room for what attention sees. The rest stays as it was."""
    x, both = half(2, 150, 64), half(2 * 72, 64)
    want = linear_pair(x, both, saturate=True, policy=on(isa, precision))
    room = torch.full((2, 150, 96), 7.0, device="cuda", dtype=torch.float16)
    for weights in ((both, None), (both[:72], both[72:])):
        out = room[..., 24:]
        linear_pair_(out, x, *weights, saturate=True, policy=on(isa, precision))
        assert torch.equal(out, want)
        out.fill_(7)
        assert (room == 7).all()


def test_what_cublas_makes_of_a_pair(isa):
    """Its two products, and our pass behind them."""
    x, both = half(2, 150, 64), half(2 * 72, 64)
    room = torch.zeros(2, 150, 96, device="cuda", dtype=torch.float16)
    asked = Call("linear_pair_", (room[..., 24:], x, both, None), ("silu", 0.5, True), on(isa))
    assert CublasPair().refuse(asked) is None
    CublasPair().prepare(asked)(*asked.tensors)
    want = linear_pair(x, both, scale=0.5, saturate=True, policy=on(isa))
    torch.testing.assert_close(room[..., 24:], want, rtol=4e-3, atol=4e-3)
    assert not room[..., :24].any()


def test_a_saturating_stream_behind_cublas(isa):
    """The product fits fp16, and times its gate it does not."""
    x, weight, stream, gate = half(150, 64), half(72, 64) * 1000, half(150, 72) * 1000, half(72) + 3
    asked = Call("linear_", (stream, x, weight, None, stream, gate), ("none", 1.0, True), on(isa))
    want = linear(x, weight, residual=stream, gate=gate, saturate=True, policy=on(isa))
    assert CublasFused().refuse(asked) is None and (want.abs() == 65504).any()
    CublasFused().prepare(asked)(*asked.tensors)
    torch.testing.assert_close(stream, want, rtol=4e-3, atol=128)


def test_what_is_added_to_a_wide_stream_is_not_rounded(isa):
    """Whoever computes it: neither is the product stored in fp16, where it would overflow, nor does it lose digits."""
    x, weight = half(150, 64) * 100, half(72, 64) * 1000
    stream = torch.zeros(150, 72, device="cuda")
    exact = x.double() @ weight.double().t()
    assert exact.abs().max() > 65504
    linear_(stream, x, weight, residual=stream, saturate=True, policy=KernelPolicy.of("auto", isa=isa))
    torch.testing.assert_close(stream.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


def cublas_wide(tensors, scale=1.0, out=None):
    """What cuBLAS makes of it, by name: a new result, or `out` written."""
    into = out is not None
    given_ = (out, *tensors) if into else tensors
    options = ("none", scale, True) if into else ("none", scale, True, torch.float32)
    asked = Call("linear_" if into else "linear", given_, options)
    assert CublasWide().refuse(asked) is None
    found = CublasWide().prepare(asked)(*given_)
    return out if into else found


@pytest.mark.parametrize("layout", ["plain", "apart"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (5, 7, 13), (65, 136, 40), (513, 1029, 771), (512, 264, 9728)])
def test_what_stays_wide_behind_cublas(m, n, k, layout):
    """Odd sizes, scales, residuals of both types, elsewhere and in place: the error is that of fp32 sums."""
    x, weight = laid_out(half(m, k), layout), laid_out(half(n, k), layout)
    for residual in (None, torch.randn(m, n, device="cuda"), half(m, n)):
        for scale in (1.0, 64.0, 0.3, -(2.0**-6)):
            tensors = x, weight, None, residual, None
            exact, sizes = exactly("linear", tensors, ("none", scale, True, None))
            sizes = sizes + (0 if residual is None else residual.double().abs())
            got = cublas_wide(tensors, scale)
            assert got.dtype is torch.float32 and got.is_contiguous()
            check(got, exact, sizes, "precise", f"{residual is None}, {scale}")
            out = torch.full((m, n), torch.nan, device="cuda")
            assert torch.equal(cublas_wide(tensors, scale, out), got)
            if residual is not None and residual.dtype is torch.float32:
                stream = residual.clone()
                assert torch.equal(cublas_wide((x, weight, None, stream, None), scale, stream), got)


@pytest.mark.parametrize("allowed", [False, True])
def test_cublas_keeps_wide_results_wide(allowed):
    """Products of 65504 by itself do not overflow, whatever torch may do to sums in fp16, and it may afterwards as before."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    x, weight = (torch.full((n, 512), 65504.0, device="cuda").half() for n in (70, 72))
    stream = torch.full((70, 72), 2.0**40, device="cuda")
    try:
        matmul.allow_fp16_accumulation = allowed
        got = cublas_wide((x, -weight, None, None, None))
        cublas_wide((x, weight, None, stream, None), 0.5, stream)
        assert matmul.allow_fp16_accumulation is allowed
    finally:
        matmul.allow_fp16_accumulation = before
    exact = 65504.0**2 * 512
    torch.testing.assert_close(got.double(), torch.full_like(got, -exact).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(stream.double(), torch.full_like(got, 2.0**40 + exact / 2).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_special_values_stay_behind_cublas(value):
    """A NaN or infinity of any operand spoils its row, its column or its place; all others are as they were."""
    x, weight, stream = half(200, 96), half(136, 96), torch.randn(200, 136, device="cuda")
    clean = cublas_wide((x, weight, None, stream, None), 2.0)
    x[5, 7] = value
    weight[9, 3] = value
    stream[100, 50] = value
    like = torch.addmm(stream, x.float(), weight.float().t(), alpha=2)
    got = cublas_wide((x, weight, None, stream, None), 2.0, stream)
    assert torch.equal(got.isnan(), like.isnan()) and torch.equal(got.isinf(), like.isinf())
    assert torch.equal(got[like.isfinite()], clean[like.isfinite()])


def test_cublas_wide_results_in_a_graph_and_of_nothing():
    x, weight, stream = half(2, 150, 64), half(72, 64), torch.zeros(2, 150, 72, device="cuda")
    asked = Call("linear_", (stream, x, weight, None, stream, None), ("none", 1.0, True))
    plan = CublasWide().prepare(asked)
    plan(*asked.tensors)  # cuBLAS takes its memory before a capture
    stream.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(*asked.tensors)
    for _ in range(3):
        graph.replay()
    exact = 3 * (x.double() @ weight.double().t())
    torch.testing.assert_close(stream.double(), exact, rtol=1e-5, atol=1e-4)
    empty = Call("linear_", (stream[:, :0], x[:, :0], weight, None, None, None), ("none", 1.0, True))
    assert "nothing to compute" in (CublasWide().refuse(empty) or "")


def test_umt5(isa, precision):
    """Its feed-forward: the hidden product reaches 10^5, the residual stream is fp32."""
    x, both, w_out, stream = half(300, 256) * 8, half(2 * 640, 256) * 4, half(256, 640), half(300, 256).float()
    hidden = linear_pair(x, both, activation="gelu_tanh", scale=2.0**-8, policy=on(isa, precision))
    got = linear(hidden, w_out, residual=stream, scale=2.0**8, policy=on(isa, precision))
    exact, sizes = exactly("linear_pair", (x, both, None), ("gelu_tanh", 2.0**-8, False, None))
    assert exact.abs().max() * 2**8 > 1e5
    check(hidden, exact, sizes, precision, "hidden")
    assert got.dtype is torch.float32
    exact = stream.double() + hidden.double() @ w_out.double().t() * 2**8
    sizes = hidden.double().abs() @ w_out.double().abs().t() * 2**8
    check(got, exact, sizes, precision, "out")


@pytest.mark.parametrize("paired", [False, True])
def test_mlp_chunks(isa, precision, paired):
    x, w_in, w_out, stream = half(2, 900, 64), half(256, 64), half(72, 256), half(2, 900, 72)
    options = {"residual": stream, "gate": half(2, 9, 1, 72), "up": half(256, 64) if paired else None}
    options |= {"policy": on(isa, precision)}
    whole = mlp(x, w_in, w_out, None, half(72) * 0, **options)
    for chunk in (1, 2 * 768 * 256 * 2):
        assert torch.equal(mlp(x, w_in, w_out, None, half(72) * 0, **options, chunk_bytes=chunk), whole)


def test_mlp_memory(isa):
    """The hidden activation never exists whole."""
    x, w_in, w_out = half(1, 16384, 256), half(4096, 256), half(256, 4096)
    most, out_bytes = 16 * 2**20, 16384 * 256 * 2
    mlp(x, w_in, w_out, chunk_bytes=most, policy=on(isa))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = mlp(x, w_in, w_out, chunk_bytes=most, policy=on(isa))
    # An old chunk is still held while the next one is made.
    assert torch.cuda.max_memory_allocated() - before <= out_bytes + 2 * most + 2**20
    assert out.shape == x.shape


def test_empty(isa):
    for shape in ((0, 64), (2, 0, 64)):
        x = torch.empty(*shape, device="cuda").half()
        assert linear(x, half(16, 64), policy=on(isa)).shape == (*shape[:-1], 16)
        assert linear_pair(x, half(16, 64), policy=on(isa)).shape == (*shape[:-1], 8)
    assert linear(half(4, 64), half(0, 64), policy=on(isa)).shape == (4, 0)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_strides_beyond_32_bits(isa):
    """Rows whose distance times their number exceeds 2^32."""
    room = torch.zeros(2**32 + 2**15, device="cuda", dtype=torch.float16)
    x = room.as_strided((3, 64), (2**31 - 2**12, 1))
    x.copy_(half(3, 64))
    weight = half(72, 64)
    exact, sizes = exactly("linear", (x, weight, None, None, None), ("none", 1.0, False, None))
    check(linear(x, weight, policy=on(isa)), exact, sizes, "precise", "far apart")


def test_graph_and_compile(isa):
    x, weight, stream = half(2, 150, 64), half(64, 64), half(2, 150, 64)

    def run(x, weight, stream):
        return linear(linear_pair(x, weight, weight, policy=on(isa)), weight, residual=stream, policy=on(isa))

    run(x, weight, stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x, weight, stream)
    x.copy_(torch.randn_like(x))
    graph.replay()
    want = run(x, weight, stream)
    assert torch.equal(captured, want)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x, weight, stream), want)


def test_refused_layouts_are_served_by_torch(isa):
    x, weight = half(40, 64), half(24, 64)
    want = linear(x, weight, policy=on(isa))
    with pytest.raises(KernelRefused, match="rows do not start at multiples of 16 bytes"):
        linear(shifted(x), weight, policy=on(isa))
    torch.testing.assert_close(linear(shifted(x), weight), want, atol=1e-2, rtol=2e-3)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_candidate_computes_the_same(kind):
    """`auto` may choose any of them: all are near float64."""
    x, weight, bias = half(300, 512), half(256, 512) * 0.1, half(256)
    for residual, gate in ((None, None), (half(300, 256), None), (half(300, 256).float(), half(256))):
        tensors = (x, weight, bias, residual, gate)
        call = Call("linear", tensors, (kind, 1.0, False, None), KernelPolicy())
        exact = op.reference(*(None if t is None else t.double() for t in tensors), kind, 1.0, False, torch.float64)
        for candidate in op.LINEAR.candidates:
            if candidate.refuse(call) is not None:
                continue
            got = candidate.prepare(call)(*tensors).double()
            worst = float(((got - exact).abs() / (exact.abs() + 1)).max())
            assert worst < 4e-3, f"{candidate.name} with {kind}: {worst}"


def test_auto_tries_all_of_them():
    x, weight, bias = half(512, 512), half(512, 512), half(512)
    LEDGER.clear()
    until_chosen(lambda: linear(x, weight, bias, activation="gelu_tanh"))
    assert {"stock", "cublas epilogue", "cublas + fused pass", "cuda 128x256 precise"} <= set(tried("linear"))
    until_chosen(lambda: linear(x, weight, saturate=True, out_dtype=torch.float32))
    assert {"stock", "cublas fp32", "cuda 128x256 precise"} <= set(tried("linear"))
