"""rms_parts, join_sums and rms_rope_sums on the GPU, in both instruction classes."""

from __future__ import annotations

import pytest
import torch
from gpu.support import assert_rounded_once, assert_same_special, on, padded_rows, shifted

from fusestream.kernels_cuda import KernelPolicy, join_sums, rms_parts, rms_rope_sums
from fusestream.kernels_cuda.ops.matmul import join_sums as joining
from fusestream.kernels_cuda.ops.norm import rms_parts as norming
from fusestream.kernels_cuda.ops.views.parts import split

OFF = KernelPolicy.of("off")
EPS = 1e-6
LARGEST = 65504.0
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")
WIDTHS = (1, 3, 8, 127, 128, 2560, 4096, 8192, 8200)
LAYOUTS = {
    "shifted": lambda t: shifted(t, 3),
    "gaps": lambda t: padded_rows(t, 8),
    "odd gaps": lambda t: padded_rows(t, 3),
    "every other row": lambda t: t.repeat_interleave(2, -2)[..., ::2, :],
}


def assert_parts(got, exact, slack=4e-7, what=""):
    """Both parts together are the exact number within fp32's arithmetic, the first is its rounding; `slack` of the peak."""
    assert got.dtype is torch.float16 and got.is_contiguous() and got.shape == (2, *exact.shape)
    kept = exact.clamp(-LARGEST, LARGEST)
    if not kept.numel():
        return
    assert got.isfinite().all(), what
    peak = kept.abs().amax()
    error = (got[0].double() + got[1].double() - kept).abs()
    allowed = kept.abs() * 2.0**-21 + 2.0**-24 + slack * peak
    assert (error <= allowed).all(), f"{what}: {(error - allowed).max():.3g} over the allowed error"
    assert_rounded_once(got[0].reshape(1, -1), kept.reshape(1, -1), slack=slack, what=what)


def sums(*shape, scale=3.0):
    """As a product of two parts leaves them: the second is small."""
    x = torch.randn(2, *shape, device="cuda") * scale
    x[1] *= 2.0**-11
    return x


def tables(tokens, d, batch=1):
    angle = torch.rand(batch, 1, tokens, d // 2, device="cuda") * 6
    return angle.cos(), angle.sin()


# --------------------------------------------------------------------------------------------------------- rms_parts


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("d", WIDTHS)
def test_norm(isa, d, dtype):
    x, weight = torch.randn(2, 21, d, device="cuda") * 50, torch.randn(d, device="cuda").to(dtype)
    got = rms_parts(x, weight, eps=EPS, policy=on(isa))
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    assert_parts(got, exact, what=f"{d} {dtype}")


@pytest.mark.parametrize("layout", [*LAYOUTS, "a chunk of tokens"])
def test_norm_of_any_layout(isa, layout):
    for d in (72, 127, 2560):
        x, weight = torch.randn(3, 11, d, device="cuda"), torch.randn(d, device="cuda").half()
        x = x[:, 2:7] if layout == "a chunk of tokens" else LAYOUTS[layout](x)
        plain = rms_parts(x.contiguous(), weight, eps=EPS, policy=on(isa))
        got = rms_parts(x, weight, eps=EPS, policy=on(isa))
        assert_parts(got, sum(plain.double()), what=f"{layout} {d}")


@pytest.mark.parametrize("shape", [(1, 1, 2560), (1, 8), (0, 8), (2, 0, 8), (3, 0), (2, 3, 4, 40), (70_000, 1, 8)])
def test_norm_of_other_shapes(isa, shape):
    x, weight = torch.randn(shape, device="cuda"), torch.randn(shape[-1], device="cuda")
    got = rms_parts(x, weight, eps=EPS, policy=on(isa))
    assert_parts(got, sum(part.double() for part in norming.reference(x, weight, EPS)), what=str(shape))


def test_norm_saturates(isa):
    """Numbers near the largest half, beyond it, and none at all."""
    for d in (64, 65):
        x, weight = torch.ones(4, d, device="cuda"), torch.ones(d, device="cuda")
        weight[:6] = torch.tensor([65504, 65519, 65520, -7e4, 1e30, -torch.inf], device="cuda")
        x[1, 9], x[2, 9], x[3] = torch.nan, torch.inf, 0
        got = rms_parts(x, weight, eps=0.0, policy=on(isa))
        # By the formula: torch's own norm makes all of a row with an infinity NaN where rows are no multiple of its vectors.
        assert_same_special(got, split(x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * weight), f"{d}")
        assert got[0, 0, :6].tolist() == [LARGEST, LARGEST, LARGEST, -LARGEST, LARGEST, -LARGEST]
        assert not got[1, 0, 1:6].any()
        near = torch.linspace(65400, 65504, d, device="cuda")
        assert_parts(rms_parts(x[:1], near, eps=0.0, policy=on(isa)), near[None].double())


# --------------------------------------------------------------------------------------------------------- join_sums


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["apart", "halves", "first alone"])
def test_sums(isa, kind, layout):
    for shape in ((1,), (3, 127), (2, 5, 1536), (1, 60, 9728), (4, 65, 8), (2, 3, 4, 40)):
        both = sums(*shape[:-1], 2 * shape[-1])
        first, second = both.chunk(2, -1)
        if layout == "apart":
            first, second = first.contiguous(), second.contiguous()
        second = None if layout == "first alone" else second
        for scale in (1.0, 2.0**-6):
            given = first, second, kind, scale
            parts = join_sums(first, second, activation=kind, scale=scale, policy=on(isa))
            value = join_sums(first, second, activation=kind, scale=scale, parts=False, policy=on(isa))
            exact = sum(joining.reference(*(t.double() if torch.is_tensor(t) else t for t in given), True).double())
            assert_parts(parts, exact, slack=2e-6, what=f"{shape} {kind} {layout}")
            assert value.is_contiguous() and torch.equal(value, parts[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_any_layout(isa, layout):
    for width in (64, 37):
        first, second = LAYOUTS[layout](sums(2, 6, width)), LAYOUTS[layout](sums(2, 6, width))
        for pair in ((first, second), (first, second.contiguous()), (first, None)):
            got = join_sums(*pair, activation="silu", policy=on(isa))
            apart = [None if t is None else t.contiguous() for t in pair]
            torch.testing.assert_close(
                sum(got.double()),
                sum(join_sums(*apart, activation="silu", policy=on(isa)).double()),
                rtol=1e-6,
                atol=1e-6,
            )


@pytest.mark.parametrize("width", [8, 9])
def test_sums_saturate(isa, width):
    """In either kernel: near the largest half, beyond it, infinite, and none at all."""
    numbers = [65503.9, 65519.0, 65521.0, -1e9, torch.inf, -torch.inf, torch.nan, 300.0]
    first = torch.zeros(2, 2, width, device="cuda")
    first[0, :, :8] = torch.tensor(numbers, device="cuda")
    first[1, 1, 7] = torch.inf
    for kind in ACTIVATIONS:
        for second in (None, first):
            for scale in (1.0, 2.0**-6):
                options = {"activation": kind, "scale": scale}
                got = join_sums(first, second, **options, policy=on(isa))
                want = join_sums(first, second, **options, policy=OFF)
                assert not got.isinf().any()
                assert torch.equal(got.isnan(), want.isnan()), (kind, scale)
                torch.testing.assert_close(got[0].nan_to_num(), want[0].nan_to_num(), rtol=2e-3, atol=1e-6)
    got = join_sums(first, policy=on(isa))[:, 0]
    assert got[0, 1:6].tolist() == [LARGEST, LARGEST, -LARGEST, LARGEST, -LARGEST] and not got[1, 1:6].any()


# ----------------------------------------------------------------------------------------------------- rms_rope_sums


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [4, 20, 64, 128, 132, 256])
@pytest.mark.parametrize("heads", [(32, 8), (1, 1), (3, 5)])
def test_rotated_sums(isa, d, heads):
    """Views of one product, which has v behind them, and tensors of their own."""
    for batch, tokens, dtype, each in ((1, 60, torch.float16, 1), (3, 7, torch.float32, 3), (2, 1, torch.float16, 1)):
        product = sums(batch, tokens, (sum(heads) + 2) * d).unflatten(-1, (-1, d))
        views = product.split([*heads, 2], -2)[:2]
        weights = [torch.randn(d, device="cuda").to(dtype) for _ in range(2)]
        table = tables(tokens, d, each)
        for q, k in (views, [t.contiguous() for t in views]):
            found = rms_rope_sums(q, k, *weights, *table, eps=EPS, policy=on(isa))
            for got, view, weight in zip(found, views, weights, strict=True):
                wide = view.double().sum(0)
                wide = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
                low, high = wide.chunk(2, -1)
                cos, sin = (t.double().transpose(1, 2) for t in table)
                want = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
                assert got.is_contiguous()
                assert_rounded_once(got, want, what=f"{d} {heads} {batch} {dtype}")


def test_rotated_sums_of_any_layout(isa):
    """Heads before tokens, gaps between heads, tables that are a part of wider ones."""
    q, k = sums(2, 4, 9, 128).transpose(2, 3), padded_rows(sums(2, 9, 2, 128), 6)
    wide = [torch.cat((t, t), -1) for t in tables(9, 128)]
    cos, sin = (t[..., :64] for t in wide)
    weight = torch.randn(128, device="cuda").half()
    got = rms_rope_sums(q, k, weight, weight, cos, sin, eps=EPS, policy=on(isa))
    want = rms_rope_sums(
        q.contiguous(), k.contiguous(), weight, weight, cos.contiguous(), sin.contiguous(), eps=EPS, policy=on(isa)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_rotated_sums_saturate(isa):
    q = sums(1, 5, 2, 128)
    q[0, 0, 1, 0, 3], q[0, 0, 2, 1, 70], q[:, 0, 3] = torch.nan, torch.inf, 0
    weight = torch.full((128,), 1e5, device="cuda")
    table = tables(5, 128)
    got = rms_rope_sums(q, q, weight, weight, *table, eps=EPS, policy=on(isa))
    want = rms_rope_sums(q, q, weight, weight, *table, eps=EPS, policy=OFF)
    for a, b in zip(got, want, strict=True):
        assert_same_special(a, b)
        assert a[0, 0].abs().max() == LARGEST and not a[0, 3].any()
        torch.testing.assert_close(a.nan_to_num(), b.nan_to_num(), rtol=2e-3, atol=1)


# --------------------------------------------------------------------------------------------------------------- all


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 40 * 2**30, reason="needs 40 GB")
def test_products_beyond_32_bits():
    """Parts, rows and heads that lie more than 2^31 elements from the first."""
    x = torch.zeros(2**30 + 512, 2, device="cuda").as_strided((3, 8), (2**30, 1))
    x.normal_()
    weight = torch.ones(8, device="cuda")
    want = rms_parts(x.contiguous(), weight, eps=EPS, policy=on(None))
    assert torch.equal(rms_parts(x, weight, eps=EPS, policy=on(None)), want)
    both = torch.zeros(2**31 + 64, device="cuda").as_strided((2, 3, 8), (2**31, 8, 1))
    both.normal_()
    assert torch.equal(join_sums(both, policy=on(None)), join_sums(both.contiguous(), policy=on(None)))
    q, table = both[:, None, :, None], tables(3, 8)
    for got, of in zip(
        rms_rope_sums(q, q, weight, weight, *table, eps=EPS, policy=on(None)),
        rms_rope_sums(q.contiguous(), q.contiguous(), weight, weight, *table, eps=EPS, policy=on(None)),
        strict=True,
    ):
        assert torch.equal(got, of)
