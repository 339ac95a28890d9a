"""linear_attention without a GPU: ends of fp16, gradients, chunks, what is refused."""

from __future__ import annotations

import pytest
import torch
from linear_attention_oracle import adversaries, check, exactly

from fusestream.kernels_cuda import KernelPolicy, linear_attention
from fusestream.kernels_cuda.ops.attention import linear_attention as op

OFF = KernelPolicy.of("off")
MAPS = ["elu", "relu", "softmax", "rbf"]


def inputs(b, s, t, h, hk, d, feature_map="elu", m=32):
    parts = (torch.randn(b, n, heads, d).half() for n, heads in ((s, h), (t, hk), (t, hk)))
    return *parts, torch.randn(m, d).half() if feature_map in ("softmax", "rbf") else None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("feature_map", "eps"), [("elu", 0.0), ("relu", 1e-6), ("relu", 0.0)])
def test_ends_of_fp16(feature_map, eps, causal):
    for what, tensors in adversaries(*inputs(1, 60, 70, 1, 1, 32)[:3]).items():
        exact, sizes = exactly(*tensors, feature_map=feature_map, eps=eps, causal=causal)
        assert exact.isfinite().all(), what
        check(linear_attention(*tensors, feature_map=feature_map, eps=eps, causal=causal), exact, sizes, what)


def test_random_features_tend_to_the_kernels():
    """With very many rows softmax attention comes out, and attention by the RBF kernel."""
    torch.manual_seed(5)
    q, k, v, _ = inputs(1, 20, 30, 1, 1, 8)
    q, k, features = q * 0.6, k * 0.6, torch.randn(200_000, 8).half()
    wide = [t.double()[0, :, 0] for t in (q, k, v)]
    kernels = {"softmax": wide[0] @ wide[1].t(), "rbf": -0.5 * torch.cdist(wide[0], wide[1]).square()}
    wanted = {name: scores.softmax(-1) @ wide[2] for name, scores in kernels.items()}
    assert (wanted["softmax"] - wanted["rbf"]).abs().max() > 0.3
    for feature_map, want in wanted.items():
        got = linear_attention(q, k, v, features, feature_map=feature_map, scale=1.0)[0, :, 0]
        torch.testing.assert_close(got.double(), want, atol=0.1, rtol=0)


def test_nothing_to_see_is_zero():
    q, k, v, _ = inputs(2, 5, 3, 2, 1, 4)
    for policy in (KernelPolicy(), OFF):
        assert linear_attention(q[:0], k[:0], v[:0], policy=policy).shape == (0, 5, 2, 4)
        assert linear_attention(q[:, :0], k, v, policy=policy).shape == (2, 0, 2, 4)
        assert not linear_attention(q, k[:, :0], v[:, :0], policy=policy).any()
        causal = linear_attention(q, k, v, causal=True, policy=policy)
        assert not causal[:, :2].any() and causal[:, 2:].any(-1).all()
        torch.testing.assert_close(causal[:, 2], v[:, 0].expand(2, 2, 4), rtol=0, atol=1e-3)
        apart = q.abs().index_fill(3, torch.tensor([0, 1]), 0), k.abs().index_fill(3, torch.tensor([2, 3]), 0), v
        assert not linear_attention(*apart, feature_map="relu", eps=0.0, policy=policy).any()
        mean = linear_attention(*apart, feature_map="relu", eps=1e-4, policy=policy)
        assert mean.isfinite().all() and mean.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_specials(value):
    """Of a query its row; of a key everything, but for -inf, a feature of zero; of a value its column."""
    q, k, v, _ = inputs(1, 12, 12, 1, 1, 8)
    for policy in (KernelPolicy(), OFF):
        broken = q.clone()
        broken[0, 5, 0, 3] = value
        spoiled = ~linear_attention(broken, k, v, policy=policy).isfinite()[0, :, 0]
        assert spoiled.any(-1).nonzero().flatten().tolist() == ([] if value == -torch.inf else [5])
        broken = k.clone()
        broken[0, 5, 0, 3] = value
        spoiled = ~linear_attention(q, broken, v, policy=policy).isfinite()
        assert not spoiled.any() if value == -torch.inf else spoiled.all()
        seen = linear_attention(q, broken, v, causal=True, policy=policy).isfinite()[0, :, 0].all(-1)
        assert seen.tolist() == [value == -torch.inf or i < 5 for i in range(12)]
        broken = v.clone()
        broken[0, 5, 0, 3] = value
        spoiled = ~linear_attention(q, k, broken, policy=policy).isfinite()[0, :, 0]
        assert spoiled[:, 3].all() and spoiled.sum() == 12


def test_gradients_are_finite_and_those_of_the_definition():
    for feature_map in MAPS:
        tensors = inputs(1, 9, 9, 2, 1, 4, feature_map)
        wide = [t if t is None else t.double().requires_grad_() for t in tensors]
        exactly(*wide, feature_map=feature_map, causal=True)[0].square().sum().backward()
        wanted = [t.grad.clone() for t in wide[:3]]
        for policy in (KernelPolicy(), OFF):
            for t in wide[:3]:
                t.grad = None
            linear_attention(*wide, feature_map=feature_map, causal=True, policy=policy).square().sum().backward()
            for t, want in zip(wide[:3], wanted, strict=True):
                torch.testing.assert_close(t.grad, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 31, 255, 256, 257, 32760, 10**6])
@pytest.mark.parametrize("wanted", [0, 1, 7, 264])
def test_chunks_cover_the_keys(tokens, wanted):
    chunk = op.chunk_of(tokens, wanted)
    chunks = -(-tokens // chunk)
    assert chunk % op.TOGETHER == 0 and chunks <= max(1, wanted)
    assert chunks == 1 or chunk >= op.CHUNK
