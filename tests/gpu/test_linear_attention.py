"""linear_attention on the GPU, in both instruction classes, against every weight by itself in float64."""

from __future__ import annotations

import os

import pytest
import torch
from gpu.support import on
from gpu.test_attention import laid_out
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from linear_attention_oracle import adversaries, check, exactly
from torch import nn

from fusestream.kernels_cuda import KernelPolicy, KernelRefused, linear_attention
from fusestream.kernels_cuda.modules import FusedLinearAttention
from fusestream.kernels_cuda.ops.attention.linear_attention import CHUNK, HEADS

EXAMPLES = int(os.environ.get("FUSESTREAM_EXAMPLES") or 2500) // 4
LENGTHS = st.one_of(
    st.integers(1, 17),
    st.sampled_from([31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 255, 256, 257, 289, 511, 512, 513]),
    st.integers(18, 900),
)
# Each kernel at least once: the map, and whether it is causal.
KINDS = [("elu", False), ("elu", True), ("relu", False), ("relu", True), ("softmax", False), ("rbf", False)]


def inputs(b, s, t, h, hk, d, feature_map="elu", m=64, size=1.0, layout="plain"):
    parts = (torch.randn(b, n, heads, d, device="cuda").half() for n, heads in ((s, h), (t, hk), (t, hk)))
    q, k, v = (laid_out(part * factor, layout) for part, factor in zip(parts, (size, size, 1), strict=True))
    return q, k, v, torch.randn(m, d, device="cuda").half() if feature_map in ("softmax", "rbf") else None


def judge(tensors, isa, what="", **options):
    """A call's result, judged."""
    got = linear_attention(*tensors, **options, policy=on(isa))
    assert got.is_contiguous()
    # A logarithm of some hundred, as random features of sharp queries have them, is good to 2^-17 of a weight.
    check(got, *exactly(*tensors, **options), what, sums=1e-4 if tensors[3] is not None else 1e-5)
    return got


@st.composite
def configurations(draw):
    feature_map, causal = draw(st.sampled_from(KINDS))
    return {
        "sizes": (
            draw(st.integers(1, 3)),
            draw(LENGTHS),
            draw(LENGTHS),
            *draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)])),
            draw(st.sampled_from(HEADS)),
        ),
        "m": draw(st.sampled_from([32, 64, 96, 128, 160, 256])),
        "layout": draw(st.sampled_from(["plain", "packed", "heads first", "beginning"])),
        "size": draw(st.sampled_from([1.0, 1.0, 0.01, 3.0])),
        "options": {
            "feature_map": feature_map,
            "causal": causal,
            "scale": draw(st.sampled_from([None, None, 0.05])),
            "eps": draw(st.sampled_from([1e-6, 1e-6, 0.0, 0.1])),
        },
    }


@given(configurations())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_random_configurations(isa, c):
    tensors = inputs(*c["sizes"], c["options"]["feature_map"], c["m"], c["size"], c["layout"])
    judge(tensors, isa, str(c), **c["options"])


@pytest.mark.parametrize(("feature_map", "causal"), KINDS)
@pytest.mark.parametrize("d", HEADS)
@pytest.mark.parametrize(("s", "t"), [(1, 1), (65, 33), pytest.param(130, CHUNK + 40, marks=pytest.mark.sanitize)])
def test_ends_and_corners(isa, s, t, d, feature_map, causal):
    """Small: what the sanitizers see. Warps without features, tiles that end early, a chunk before a query's own."""
    tensors = inputs(2, s, t, 2, 1, d, feature_map, 96, layout="beginning")
    judge(tensors, isa, feature_map=feature_map, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("feature_map", "eps"), [("elu", 0.0), ("relu", 1e-6), ("relu", 0.0)])
def test_adversaries(isa, feature_map, eps, causal):
    """Magnitudes near fp16's largest: never an overflow on the way, where the result itself is finite."""
    for d in HEADS:
        for what, tensors in adversaries(*inputs(1, 300, 310, 1, 1, d)[:3]).items():
            judge((*tensors, None), isa, f"{what} {d}", feature_map=feature_map, eps=eps, causal=causal)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
def test_special_values(isa, feature_map, value):
    """As torch has them: of a query its row, of a key all (but -inf, a feature of zero), of a value its column."""
    for at in range(3):
        tensors = inputs(1, 300, 300, 1, 1, 64)
        tensors[at][0, 130, 0, 9] = value
        options = {"feature_map": feature_map}
        got, like = (linear_attention(*tensors, **options, policy=p) for p in (on(isa), KernelPolicy.of("off")))
        assert torch.equal(got.isfinite(), like.isfinite()), "qkv"[at]
        causal = linear_attention(*tensors, **options, causal=True, policy=on(isa))[0, :, 0]
        if at == 0:
            assert torch.equal(causal.isfinite(), like[0, :, 0].isfinite())
            continue
        # Before the tile of a broken value, and before a broken key, nothing of it is seen.
        assert causal[: 128 if at == 2 else 130].isfinite().all()
        assert torch.equal(causal[130:].isfinite(), like[0, 130:, 0].isfinite())


def test_nothing_to_see_is_zero(isa):
    q, k, v, _ = inputs(2, 40, 30, 2, 1, 64)
    policy = on(isa)
    out = linear_attention(q, k, v, causal=True, policy=policy)
    assert not out[:, :10].any() and out[:, 10:].any(-1).all()
    many = linear_attention(q.repeat(1, 30, 1, 1), k, v, causal=True, policy=policy)  # blocks without any key
    assert not many[:, :-30].any() and many[:, -30:].any(-1).all()
    assert not linear_attention(q, k[:, :0], v[:, :0], policy=policy).any()
    assert linear_attention(q[:, :0], k, v, policy=policy).shape == (2, 0, 2, 64)
    low, high = torch.arange(64, device="cuda").split(32)
    apart = q.abs().index_fill(3, low, 0), k.abs().index_fill(3, high, 0), v
    for causal in (False, True):
        assert not linear_attention(*apart, feature_map="relu", eps=0.0, causal=causal, policy=policy).any()


@pytest.mark.parametrize(("feature_map", "causal"), KINDS)
@pytest.mark.parametrize("d", HEADS)
def test_bitwise_repeatable(isa, d, feature_map, causal):
    tensors = inputs(2, 3000, 3000, 2, 1, d, feature_map)
    options = {"feature_map": feature_map, "causal": causal, "policy": on(isa)}
    first = linear_attention(*tensors, **options)
    assert all(torch.equal(first, linear_attention(*tensors, **options)) for _ in range(5))


@pytest.mark.parametrize(("feature_map", "causal"), KINDS)
def test_long(isa, feature_map, causal):
    """A video's length, checked at rows from all over it."""
    q, k, v, features = inputs(1, 20000, 20000, 2, 2, 128, feature_map)
    options = {"feature_map": feature_map, "causal": causal}
    got = linear_attention(q, k, v, features, **options, policy=on(isa))
    for row in (0, 255, 256, 9999, 19967, 19999):
        end = row + 1 if causal else 20000
        some = (q[:, row : row + 1], k[:, :end], v[:, :end], features)
        check(got[:, row : row + 1], *exactly(*some, feature_map=feature_map), f"{row}", sums=1e-4)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
@pytest.mark.parametrize("causal", [False, True])
def test_strides_beyond_32_bits(isa, causal):
    room = torch.zeros(2**32 + 2**16, device="cuda", dtype=torch.float16)
    q, k, v = (room[i * 2**14 :].as_strided((1, 3, 2, 128), (0, 2**31, 128, 1)) for i in range(3))
    for t in (q, k, v):
        t.copy_(torch.randn(1, 3, 2, 128, device="cuda"))
    judge((q, k, v, None), isa, causal=causal)


@pytest.mark.parametrize(("feature_map", "causal"), KINDS)
def test_graph_and_compile(isa, feature_map, causal):
    torch.compiler.reset()  # each case is a graph of its own, and torch compiles one function eight times at most
    q, k, v, features = inputs(1, 600, 600, 2, 2, 64, feature_map)

    def run(q, k, v, features):
        return linear_attention(q, k, v, features, feature_map=feature_map, causal=causal, policy=on(isa))

    run(q, k, v, features)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(q, k, v, features)
    q.copy_(torch.randn_like(q))
    graph.replay()
    want = run(q, k, v, features)
    assert torch.equal(captured, want)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v, features), want)


def test_auto_serves_everything():
    """Whatever our kernels refuse, torch serves, and the answer is the same."""
    cases = [
        (inputs(1, 60, 60, 2, 2, 80), {}, "heads have 80 elements"),
        (inputs(1, 60, 60, 2, 2, 64, "rbf"), {"feature_map": "rbf", "causal": True}, "causal attention over random"),
        (inputs(1, 60, 60, 2, 2, 64, "rbf", 40), {"feature_map": "rbf"}, "40 features"),
    ]
    for tensors, options, words in cases:
        with pytest.raises(KernelRefused, match=words):
            linear_attention(*tensors, **options, policy=on(None))
        check(linear_attention(*tensors, **options), *exactly(*tensors, **options), words, sums=1e-4)
    tensors = inputs(1, 60, 60, 2, 2, 64)
    check(linear_attention(*tensors), *exactly(*tensors), "auto")


@pytest.mark.parametrize(("feature_map", "causal"), KINDS)
def test_the_module(isa, feature_map, causal):
    """Against torch's own computation of the same module in float64."""
    made = FusedLinearAttention(128, 4, feature_map=feature_map, causal=causal, num_features=None, policy=on(isa))
    nn.init.normal_(made.in_proj_bias, std=0.1)
    made = made.cuda().half().requires_grad_(False)
    exact = FusedLinearAttention(128, 4, feature_map=feature_map, causal=causal, policy=KernelPolicy.of("off")).cuda()
    exact.double().load_state_dict(made.state_dict())
    for context in (None, torch.randn(2, 333, 128, device="cuda").half()):
        x = torch.randn(2, 300, 128, device="cuda").half()
        assert made.obstacle(x, context) is None
        want = exact(x.double(), None if context is None else context.double())
        torch.testing.assert_close(made(x, context).double(), want, atol=4e-3, rtol=4e-3)
    reason = made.requires_grad_().obstacle(x)
    assert reason is not None and "a gradient is wanted" in reason
