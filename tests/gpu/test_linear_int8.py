"""rows_to_int8 and linear_int8 on the GPU, in both instruction classes: rounding and sums bit for bit, the rest to a rounding."""

from __future__ import annotations

import os

import pytest
import torch
from gpu.support import apart, assert_sums, on, shifted, until_chosen
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fusestream.kernels_cuda import (
    LEDGER,
    Int8Rows,
    KernelPolicy,
    KernelRefused,
    linear_int8,
    linear_int8_,
    rows_to_int8,
)
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card
from fusestream.kernels_cuda.ops.matmul import integer_product
from fusestream.kernels_cuda.ops.matmul import linear_int8 as op
from fusestream.kernels_cuda.ops.matmul.linear_operands import ACTIVATIONS
from fusestream.kernels_cuda.ops.quant.rotation import GROUPS
from fusestream.kernels_cuda.ops.quant.rows_to_int8 import INT8_ROWS

EXAMPLES = int(os.environ.get("FUSESTREAM_EXAMPLES") or 2500) // 8
ROWS = st.one_of(st.integers(1, 17), st.sampled_from([63, 64, 65, 127, 128, 129, 191, 192, 193]), st.integers(18, 700))
STEPS = st.one_of(st.integers(1, 5), st.sampled_from([7, 8, 9, 15, 16, 17, 31, 32, 33, 48]), st.integers(6, 60))
PLAIN = ("none", 1.0, False, 0, torch.float32)


@pytest.fixture
def isa(every_isa):
    return every_isa


@pytest.fixture(params=list(op.CUTS), ids=lambda cut: f"{cut.rows}x{cut.columns}")
def cut(request, isa):
    if request.param not in op.INT8.product.cuts_of(isa):
        pytest.skip("not made for Pascal")
    return request.param


def half(*shape):
    return torch.randn(*shape, device="cuda").half()


def whole(*shape, low=-127):
    return torch.randint(low, 128, shape, dtype=torch.int8, device="cuda")


def with_cut(cut, tensors, options, isa):
    """One way to cut the work, whatever the rule would choose."""
    call = Call("linear_int8", tensors, options, on(isa))
    op.INT8.op.validate(call)
    assert next(integer_product.obstacles(call), None) is None
    return op.INT8.product.plan(call, card(0, isa), integer_product.Tactic(cut))(*tensors)


def exactly(tensors, options):
    """float64, and the magnitudes that roundings behind the sums grow with."""
    exact = op.INT8.op.reference(*tensors, *options[:4], torch.float64)
    x, x_scale, weight, weight_scale, bias, residual, gate = tensors
    plain = op.INT8.op.reference(
        x, x_scale, weight, weight_scale, None, None, gate, "none", *options[1:4], torch.float64
    ).abs()
    for added, by in ((bias, gate), (residual, None)):
        if added is not None:
            size = added.double().abs()
            plain = plain + (size if by is None else size * 4 * by.double().abs().max())
    return exact, plain


# ------------------------------------------------------------------------------------------------------------ rounding


of_two_bytes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@pytest.mark.parametrize("k", [8, 64, 256, 1536, 2048, 2304, 5120, 8192, 8448, 13824, 32768])
@of_two_bytes
def test_rows_bit_for_bit(isa, k, dtype):
    for group in (0, *GROUPS):
        if group and k % group:
            continue
        x = half(2, 37, k).to(dtype)
        x[0, 3] *= 300
        x[1, 5] *= 1e-5
        for t in (x, apart(x), x[:, ::2]):
            found = rows_to_int8(t, rotation=group, policy=on(isa))
            numbers, scales = INT8_ROWS.reference(t.cpu(), group)
            assert torch.equal(found.numbers.cpu(), numbers) and torch.equal(found.scales.cpu(), scales), (k, group)


@pytest.mark.sanitize
@pytest.mark.parametrize("k", [8, 72, 256, 2304, 8448])
@of_two_bytes
def test_ends_of_rows(isa, k, dtype):
    for group in (0, 4, 256):
        if group and k % group:
            continue
        x = apart(half(3, k).to(dtype))
        found = rows_to_int8(x, rotation=group, policy=on(isa))
        numbers, scales = INT8_ROWS.reference(x.cpu(), group)
        assert torch.equal(found.numbers.cpu(), numbers) and torch.equal(found.scales.cpu(), scales)


@of_two_bytes
def test_rows_without_numbers(isa, dtype):
    x = half(8, 5120).to(dtype)
    x[0] = 0
    x[1, 4000], x[2, 17], x[3, 5119] = torch.nan, torch.inf, -torch.inf
    for group in (0, 256):
        found = rows_to_int8(x, rotation=group, policy=on(isa))
        numbers, scales = INT8_ROWS.reference(x.cpu(), group)
        assert torch.equal(found.numbers.cpu(), numbers) and found.scales[0] == 1 and found.scales[1:4].isnan().all()
        assert torch.equal(found.scales[4:].cpu(), scales[4:]) and not found.numbers[:4].any()


def test_what_bf16_has_beyond_fp16(isa):
    """Rows as a stream of a model without fp16 has them, and rows so small that 127 over the largest is no float."""
    x = half(6, 1536).bfloat16()
    x[0], x[1], x[2], x[3], x[4, 7] = x[0] * 2.0**100, x[1] * 2.0**-100, x[2] * 2.0**-126, x[3] * 2.0**-131, 1e30
    for group in (0, 256):
        found = rows_to_int8(x, rotation=group, policy=on(isa))
        numbers, scales = INT8_ROWS.reference(x.cpu(), group)
        assert torch.equal(found.numbers.cpu(), numbers) and torch.equal(found.scales.cpu(), scales), group


# ------------------------------------------------------------------------------------------------------------- product


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 8, 16), (1, 1536, 8960), (200, 264, 48), (700, 520, 1552), (1000, 136, 13824)]
)
def test_sums_bit_for_bit(isa, cut, m, n, k):
    """The largest numbers there are among them; and as floats, rounded to the nearest."""
    x, weight = whole(m, k, low=-128), whole(n, k, low=-128)
    x[0], weight[0] = 127, 127
    x[m // 2], weight[n // 2] = -128, -128
    ones = torch.ones(m, device="cuda")
    want = (x.double() @ weight.double().t()).float()
    for t, w in ((x, weight), (apart(x), apart(weight))):
        got = with_cut(cut, (t, ones, w, ones[:1], None, None, None), PLAIN, isa)
        assert torch.equal(got, want)


@st.composite
def configurations(draw):
    b, s = draw(st.integers(1, 3)), draw(ROWS)
    n, k = draw(STEPS) * 8, draw(STEPS) * 16
    rounded = draw(st.booleans())
    groups = [0] if rounded else [group for group in (0, *GROUPS) if not group or k % group == 0]
    return {
        "sizes": (b, s, n, k),
        "rounded": rounded,
        "rotation": draw(st.sampled_from(groups)),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "scale": draw(st.sampled_from([1.0, 1.0, 0.25, 2.0])),
        "saturate": draw(st.booleans()),
        "two": draw(st.sampled_from([torch.float16, torch.bfloat16])),
        "out": draw(st.sampled_from([None, torch.float16, torch.bfloat16, torch.float32])),
        "apart": draw(st.booleans()),
        "weight apart": draw(st.booleans()),
        "one scale": draw(st.booleans()),
        "bias": draw(st.sampled_from(["none", "two", "single"])),
        "residual": draw(st.sampled_from(["none", "two", "single"])),
        "gate": draw(st.sampled_from(["none", "all", "batch", "frames", "tokens"])),
        "cut": draw(st.integers(0, 11)),
    }


def operands_of(c):
    b, s, n, k = c["sizes"]
    types = {"two": c["two"], "single": torch.float32}
    x = whole(b, s, k) if c["rounded"] else half(b, s, k).to(c["two"])
    x_scale = torch.rand(b, s, device="cuda") / 50 + 1e-3 if c["rounded"] else None
    weight, scales = whole(n, k, low=-128), torch.rand(1 if c["one scale"] else n, device="cuda") / k**0.5 / 50
    frames = {"all": (1, 1), "batch": (b, 1), "frames": (b, min(s, 3)), "tokens": (b, s)}
    return (
        apart(x) if c["apart"] else x,
        x_scale,
        apart(weight) if c["weight apart"] else weight,
        scales,
        None if c["bias"] == "none" else half(n).to(types[c["bias"]]),
        None if c["residual"] == "none" else half(b, s, n).to(types[c["residual"]]),
        None if c["gate"] == "none" else half(*frames[c["gate"]], n).to(c["two"]),
    )


@given(configurations())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_random_configurations(isa, c):
    tensors = operands_of(c)
    options = (c["activation"], c["scale"], c["saturate"], c["rotation"], c["out"])
    cuts = op.INT8.product.cuts_of(isa)
    got = with_cut(cuts[c["cut"] % len(cuts)], tensors, options, isa)
    exact = op.INT8.op.reference(*tensors, *options[:4], torch.float64)
    assert got.is_contiguous() and got.shape == exact.shape
    _, sizes = exactly(tensors, options)
    assert_sums(got, exact, sizes, "int8", str(c))


@pytest.mark.sanitize
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (65, 136, 80), (130, 264, 144)])
def test_ends_and_corners(isa, cut, m, n, k):
    """Small, with everything on: what the sanitizers see."""
    scales = torch.rand(n, device="cuda") / 100
    tensors = apart(half(m, k)), None, apart(whole(n, k)), scales, half(n), half(m, n).float(), half(m, n)
    options = ("gelu", 1.0, False, 4, None)
    exact, sizes = exactly(tensors, options)
    assert_sums(with_cut(cut, tensors, options, isa), exact, sizes, "int8", f"{m}x{n}x{k}")


@pytest.mark.sanitize
def test_streams_of_bf16(isa, cut):
    """As the maths has them, and written to their place; on sm_75 too, which has no instruction for them."""
    x, weight, scales = half(2, 65, 160).bfloat16() * 4e5, whole(136, 160), torch.rand(136, device="cuda") / 100
    bias, stream, gate = half(136).bfloat16(), half(2, 65, 136).bfloat16() * 1e6, half(2, 1, 136).bfloat16()
    tensors, options = (x, None, weight, scales, bias, stream, gate), ("silu", 1.0, True, 16, None)
    exact, sizes = exactly(tensors, options)
    found = with_cut(cut, tensors, options, isa)
    assert exact.abs().max() > 65504, "fp16 would hold it"
    assert_sums(found, exact, sizes, "int8")
    wanted = linear_int8(
        x, weight, scales, bias, rotation=16, activation="silu", residual=stream, gate=gate, policy=on(isa)
    )
    linear_int8_(
        stream, x, weight, scales, bias, rotation=16, activation="silu", residual=stream, gate=gate, policy=on(isa)
    )
    assert wanted.dtype is torch.bfloat16 and torch.equal(stream, wanted) and torch.equal(found, wanted)


def test_cuts_and_repeats_agree(isa):
    """Exact sums are the same in every tile, every time."""
    scales = torch.rand(520, device="cuda") / 100
    tensors = half(900, 1536), None, whole(520, 1536), scales, half(520), half(900, 520).float(), half(520)
    options = ("gelu_tanh", 1.0, False, 256, None)
    found = [with_cut(cut, tensors, options, isa) for cut in op.INT8.product.cuts_of(isa) * 2]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_special_values(isa, cut, value):
    """A row of x that is not finite, a column whose scale is not: theirs is lost, all others are as they were."""
    x, weight, scales = half(200, 96), whole(136, 96), torch.rand(136, device="cuda")
    clean = with_cut(cut, (x, None, weight, scales, None, None, None), PLAIN, isa)
    x[5, 7] = value
    scales[9] = torch.nan
    got = with_cut(cut, (x, None, weight, scales, None, None, None), PLAIN, isa)
    lost = torch.zeros_like(got, dtype=torch.bool)
    lost[5], lost[:, 9] = True, True
    assert got[lost].isnan().all() and torch.equal(got[~lost], clean[~lost])


def test_near_the_product_of_halves(isa):
    """Rounding both operands of unit variance costs 1 to 1.5 %; with a channel far outside the others too, if it is turned."""
    x, weight = half(500, 5120), half(256, 5120) / 72
    for outlier in (1, 50):
        x[:, 1234] *= outlier
        exact = x.double() @ weight.double().t()
        error = {}
        for rotation in (0, 256):
            weight8 = rows_to_int8(weight, rotation=rotation, policy=on(isa))
            got = linear_int8(x, *weight8, rotation=rotation, policy=on(isa))
            error[rotation] = float((got.double() - exact).norm() / exact.norm())
        assert error[256] < 0.02 and (error[0] < 0.02) == (outlier == 1), error


def test_in_place(isa):
    """Over the residual itself, and into the middle of a larger tensor, whose rest stays as it was."""
    x, weight, scales, gate = half(2, 150, 64), whole(72, 64), torch.rand(72, device="cuda") / 50, half(2, 150, 72)
    stream = half(2, 150, 72).float()
    more = {"gate": gate, "activation": "silu", "policy": on(isa)}
    want = linear_int8(x, weight, scales, residual=stream, **more)
    room = torch.full((2, 200, 96), 7.0, device="cuda")
    out = room[:, 20:170, 8:80]
    linear_int8_(out, x, weight, scales, residual=stream, **more)
    assert torch.equal(out, want)
    out.fill_(7)
    assert (room == 7).all()
    linear_int8_(stream, x, weight, scales, residual=stream, **more)
    assert torch.equal(stream, want)


def test_rows_that_are_rounded_already(isa):
    x, weight, scales = half(2, 150, 256), whole(72, 256), torch.rand(72, device="cuda") / 50
    want = linear_int8(x, weight, scales, rotation=64, policy=on(isa))
    assert torch.equal(linear_int8(rows_to_int8(x, rotation=64, policy=on(isa)), weight, scales, policy=on(isa)), want)


def test_empty(isa):
    weight, one = whole(16, 64), torch.ones(1, device="cuda")
    for shape in ((0, 64), (2, 0, 64)):
        x = torch.empty(*shape, device="cuda").half()
        assert linear_int8(x, weight, one, policy=on(isa)).shape == (*shape[:-1], 16)
        assert rows_to_int8(x, policy=on(isa)).numbers.shape == shape
    assert linear_int8(half(4, 64), whole(0, 64), one, policy=on(isa)).shape == (4, 0)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_strides_beyond_32_bits(isa):
    """Rows whose distance times their number exceeds 2^32."""
    room = torch.zeros(2**32 + 2**15, device="cuda", dtype=torch.int8)
    x = room.as_strided((3, 64), (2**31 - 2**12, 1))
    x.copy_(whole(3, 64))
    weight, ones = whole(72, 64), torch.ones(3, device="cuda")
    got = linear_int8(Int8Rows(x, ones), weight, ones[:1], out_dtype=torch.float32, policy=on(isa))
    assert torch.equal(got, (x.double() @ weight.double().t()).float())


def test_graph_and_compile(isa):
    x, weight, scales, stream = half(2, 150, 64), whole(64, 64), torch.rand(64, device="cuda") / 50, half(2, 150, 64)

    def run(x, stream):
        rounded = rows_to_int8(x, rotation=16, policy=on(isa))
        return linear_int8(rounded, weight, scales, residual=stream, policy=on(isa))

    run(x, stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x, stream)
    x.copy_(torch.randn_like(x))
    graph.replay()
    want = run(x, stream)
    assert torch.equal(captured, want)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x, stream), want)


def test_refused_layouts_are_served_by_torch(isa):
    x, weight, one = half(40, 64), whole(32, 64), torch.full((1,), 0.01, device="cuda")
    want = linear_int8(x, weight, one, policy=on(isa))
    with pytest.raises(KernelRefused, match="rows do not start at multiples of 16 bytes"):
        linear_int8(shifted(x), weight, one, policy=on(isa))
    torch.testing.assert_close(linear_int8(shifted(x), weight, one), want, atol=0.1, rtol=1e-2)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_candidate_computes_the_same(kind):
    """`auto` may choose any of them: all are as near to the halves' own product."""
    x, weight, bias = half(300, 512), half(256, 512) / 20, half(256)
    weight8 = rows_to_int8(weight, rotation=256)
    for residual, gate in ((None, None), (half(300, 256), None), (half(300, 256).float(), half(256))):
        tensors = (x, None, *weight8, bias, residual, gate)
        call = Call("linear_int8", tensors, (kind, 1.0, False, 256, None), KernelPolicy())
        exact = op.INT8.op.reference(*tensors, kind, 1.0, False, 256, torch.float64)
        for candidate in op.INT8.op.candidates:
            if candidate.refuse(call) is not None:
                continue
            got = candidate.prepare(call)(*tensors).double()
            error = float((got - exact).norm() / exact.norm())
            assert error < 0.01, f"{candidate.name} with {kind}: {error}"


def test_auto_tries_all_of_them():
    x, weight, bias, one = half(512, 512), whole(512, 512), half(512), torch.ones(1, device="cuda")
    LEDGER.clear()
    until_chosen(lambda: linear_int8(x, weight, one, bias, activation="gelu_tanh"))
    assert {"stock", *(f"cuda {way.cut.rows}x{way.cut.columns}" for way in op.INT8.product.ways(None))} <= set(
        LEDGER.choices[-1].seconds
    )
