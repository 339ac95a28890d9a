"""rms_parts, join_sums and rms_rope_sums without a GPU: the references against float64, shapes, compile."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import OPS, KernelPolicy, KernelRefused, join_sums, rms_parts, rms_rope_sums
from fusestream.kernels_cuda.ops.norm.rms_parts import THREADS, WIDEST, threads_for
from fusestream.kernels_cuda.ops.views.parts import split

EPS = 1e-6
OFF = KernelPolicy.of("off")
POLICIES = (KernelPolicy(), OFF)
LARGEST = 65504
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")


def activated(x, kind):
    """float64, written out."""
    if kind == "gelu":
        return x * torch.special.erfc(-x / math.sqrt(2)) / 2
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return {"none": lambda: x, "silu": lambda: x / (1 + torch.exp(-x)), "relu": lambda: x.clamp(min=0)}[kind]()


def added(parts):
    assert parts.dtype is torch.float16 and parts.shape[0] == 2 and parts.is_contiguous()
    return parts[0].double() + parts[1].double()


def close(parts, want, rtol=1e-6, cancelled=0.0):
    """22 digits, where the value is no denormal; and the value is what rounding makes of the number. What fp32 is off where large
    numbers cancel is small beside the largest. cancelled: of these one that is not in the result, as in GELU's tail."""
    off = 3e-7 * max(float(want.abs().max()), cancelled)
    torch.testing.assert_close(added(parts), want, rtol=rtol, atol=1e-7 + off)
    torch.testing.assert_close(parts[0].double(), want, rtol=2**-11 * 1.01, atol=1e-6 + off)


def sums(*shape, scale=1.0):
    """As a product of two parts leaves them: the second is small."""
    return torch.randn(2, *shape) * torch.tensor([scale, scale * 2**-11]).view(2, *[1] * len(shape))


def tables(tokens, d, batch=1):
    angle = torch.rand(batch, 1, tokens, d // 2) * 6
    return angle.cos(), angle.sin()


def test_parts_add_up():
    x = torch.cat((torch.randn(999) * 100, torch.tensor([65503.9, 65519.0, -7e4, math.inf, -math.inf, 1e-9])))
    value, rest = split(x)
    assert torch.equal(value, x.clamp(-LARGEST, LARGEST).half())
    error = (value.double() + rest.double() - x.clamp(-LARGEST, LARGEST).double()).abs()
    assert (error <= x.clamp(-LARGEST, LARGEST).abs() * 2**-22 + 2**-25).all()
    assert not rest[-5:-1].any(), "nothing is left of what is too large"
    assert split(torch.tensor([math.nan])).isnan().all()


@settings(max_examples=examples(40), deadline=None)
@given(
    shape=st.sampled_from([(1, 8), (3, 5, 17), (2, 1, 256), (0, 4, 8), (2, 3, 4, 10)]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_norms_are_the_definition(shape, dtype, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(shape) * 50, torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    for policy in POLICIES:
        parts = rms_parts(x, weight, eps=EPS, policy=policy)
        assert parts.shape == (2, *shape)
        if want.numel():
            close(parts, want)


@settings(max_examples=examples(60), deadline=None)
@given(
    shape=st.sampled_from([(1,), (3, 5, 17), (2, 1, 256), (0, 8), (2, 3, 4, 10)]),
    kind=st.sampled_from(ACTIVATIONS),
    scale=st.sampled_from([1.0, 2.0**-6, 4.0]),
    gated=st.booleans(),
    whole=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(shape=(1,), kind="gelu", scale=4.0, gated=False, whole=False, seed=1034)
def test_sums_are_the_definition(shape, kind, scale, gated, whole, seed):
    """Two tensors, or two halves of one."""
    torch.manual_seed(seed)
    both = sums(*shape[:-1], 2 * shape[-1], scale=3.0)
    first, second = both.chunk(2, -1)
    first, second = (first, second) if whole else (first.contiguous(), second.contiguous())
    inputs = first[0].double() + first[1].double()
    inputs, want = inputs * scale, activated(inputs, kind) * scale
    if gated:
        other = second[0].double() + second[1].double()
        inputs, want = inputs * other, want * other
    options = {"activation": kind, "scale": scale}
    for policy in POLICIES:
        parts = join_sums(first, second if gated else None, **options, policy=policy)
        value = join_sums(first, second if gated else None, **options, parts=False, policy=policy)
        assert parts.shape == (2, *shape) and value.shape == shape and value.is_contiguous()
        assert torch.equal(value, parts[0])
        if want.numel():
            close(parts, want, rtol=1e-5, cancelled=float(inputs.abs().max()))


@settings(max_examples=examples(40), deadline=None)
@given(
    batch=st.integers(1, 3),
    tokens=st.sampled_from([1, 5, 12]),
    heads=st.sampled_from([(4, 2), (1, 1), (3, 3)]),
    d=st.sampled_from([2, 4, 20, 128]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    each=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rotated_sums_are_the_definition(batch, tokens, heads, d, dtype, each, seed):
    torch.manual_seed(seed)
    product = sums(batch, tokens, (sum(heads) + 1) * d, scale=5.0).unflatten(-1, (-1, d))
    q, k, _ = product.split([*heads, 1], -2)
    weights = [torch.randn(d).to(dtype) for _ in range(2)]
    cos, sin = tables(tokens, d, batch if each else 1)
    for policy in POLICIES:
        for got, x, weight in zip(
            rms_rope_sums(q, k, *weights, cos, sin, eps=EPS, policy=policy), (q, k), weights, strict=True
        ):
            wide = x[0].double() + x[1].double()
            normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
            want = torch.empty_like(normed)
            for j in range(d // 2):
                c, s = (t[:, 0, :, None, j].double() for t in (cos, sin))
                want[..., j] = normed[..., j] * c - normed[..., j + d // 2] * s
                want[..., j + d // 2] = normed[..., j + d // 2] * c + normed[..., j] * s
            assert got.dtype is torch.float16 and got.is_contiguous() and got.shape == x.shape[1:]
            torch.testing.assert_close(got.double(), want, rtol=2**-11 * 1.01, atol=1e-5)


def test_large_and_special_values():
    """What does not fit saturates with nothing left, an infinity too; NaN stays where it is."""
    numbers = torch.tensor([1e5, -1e5, math.inf, -math.inf, math.nan, 65504.0, 1.0, 300.0])
    first = torch.stack((numbers, torch.zeros(8)))[:, None]
    want = torch.tensor([LARGEST, -LARGEST, LARGEST, -LARGEST, math.nan, LARGEST, 1.0, 300.0])
    for policy in POLICIES:
        parts = join_sums(first, policy=policy)[:, 0]
        torch.testing.assert_close(parts[0].float(), want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(parts[1].isnan(), want.isnan()) and parts[1][~want.isnan()].count_nonzero() == 0
        kept = join_sums(first, first, activation="relu", scale=2.0**-6, policy=policy)[:, 0]
        assert added(kept)[[0, 5]].tolist() == [LARGEST, LARGEST] and added(kept)[7] == 300.0**2 / 64
        normed = rms_parts(torch.tensor([[1.0, 1.0]]), torch.tensor([1e5, math.nan]), eps=0.0, policy=policy)[:, 0]
        assert normed[0, 0] == LARGEST and normed[1, 0] == 0 and normed[:, 1].isnan().all()
        q = sums(1, 1, 2, 4)
        q[0, 0, 0, 0, 1] = math.nan
        ones = torch.ones(4) * 1e6
        turned, _ = rms_rope_sums(q, q, ones, ones, *tables(1, 4), eps=EPS, policy=policy)
        assert turned[0, 0, 0].isnan().all() and turned[0, 0, 1].isfinite().all()
        assert turned[0, 0, 1].abs().max() == LARGEST


SUMS = (2, 1, 5, 3, 8)


@pytest.mark.parametrize(
    ("operand", "op", "shapes", "options"),
    [
        ("x", rms_parts, [(8,), (8,)], {"eps": EPS}),
        ("weight", rms_parts, [(2, 8), (7,)], {"eps": EPS}),
        ("eps", rms_parts, [(2, 8), (8,)], {"eps": -1.0}),
        ("first", join_sums, [()], {}),
        ("first", join_sums, [(3, 8)], {}),
        ("second", join_sums, [(2, 8), (2, 9)], {}),
        ("activation", join_sums, [(2, 8)], {"activation": "tanh"}),
        ("scale", join_sums, [(2, 8)], {"scale": 3.0}),
        ("q", rms_rope_sums, [(3, 1, 5, 3, 8), SUMS, (8,), (8,), (1, 1, 5, 4), (1, 1, 5, 4)], {"eps": EPS}),
        ("q", rms_rope_sums, [(2, 5, 3, 8), SUMS, (8,), (8,), (1, 1, 5, 4), (1, 1, 5, 4)], {"eps": EPS}),
        ("q", rms_rope_sums, [(2, 1, 5, 3, 7), (2, 1, 5, 3, 7), (7,), (7,), (1, 1, 5, 3), (1, 1, 5, 3)], {"eps": EPS}),
        ("k", rms_rope_sums, [SUMS, (2, 1, 4, 3, 8), (8,), (8,), (1, 1, 5, 4), (1, 1, 5, 4)], {"eps": EPS}),
        ("k_weight", rms_rope_sums, [SUMS, SUMS, (8,), (24,), (1, 1, 5, 4), (1, 1, 5, 4)], {"eps": EPS}),
        ("cos", rms_rope_sums, [SUMS, SUMS, (8,), (8,), (1, 1, 4, 4), (1, 1, 5, 4)], {"eps": EPS}),
        ("sin", rms_rope_sums, [SUMS, SUMS, (8,), (8,), (1, 1, 5, 4), (2, 1, 5, 4)], {"eps": EPS}),
        ("eps", rms_rope_sums, [SUMS, SUMS, (8,), (8,), (1, 1, 5, 4), (1, 1, 5, 4)], {"eps": math.nan}),
    ],
)
def test_wrong_operands_are_named(operand, op, shapes, options):
    for policy in POLICIES:
        with pytest.raises(ValueError, match=rf"^{op.__name__}: {operand}\b"):
            op(*[torch.zeros(shape) for shape in shapes], **options, policy=policy)


@pytest.mark.parametrize(("d", "whole"), [(8, True), (2560, True), (WIDEST, True), (1, False), (100_000, False)])
def test_threads_hold_a_row(d, whole):
    threads = threads_for(d, whole=whole)
    assert threads % 32 == 0 and threads <= THREADS and (not whole or threads * 16 >= d)


def test_modes():
    for op, tensors, options in (
        (rms_parts, (torch.zeros(2, 8), torch.ones(8)), {"eps": EPS}),
        (join_sums, (torch.zeros(2, 8),), {}),
        (
            rms_rope_sums,
            (torch.zeros(SUMS), torch.zeros(SUMS), torch.ones(8), torch.ones(8), *tables(5, 8)),
            {"eps": EPS},
        ),
    ):
        with pytest.raises(KernelRefused, match=r"forced on but cannot serve .*on the CPU"):
            op(*tensors, **options, policy=KernelPolicy.of("on"))


def test_compile_keeps_the_ops_whole():
    def block(x, weight, cos, sin):
        parts = rms_parts(x, weight, eps=EPS).float()
        q = join_sums(parts, parts, activation="silu").float().unflatten(-1, (-1, 8))
        return rms_rope_sums(q, q[..., :1, :], weight[:8], weight[:8], cos, sin, eps=EPS)

    given = torch.randn(2, 5, 16), torch.randn(16), *tables(5, 8)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*given), block(*given), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["rms_parts", "join_sums", "rms_rope_sums"])
def test_registration_is_sound(name):
    """torch's own checks of the schema and the fake."""
    arguments = {
        "rms_parts": (torch.randn(2, 5, 16), torch.randn(16), EPS),
        "join_sums": (torch.randn(2, 5, 16), torch.randn(2, 5, 16), "silu", 0.5, True),
        "rms_rope_sums": (
            torch.randn(SUMS),
            torch.randn(2, 1, 5, 1, 8),
            torch.ones(8),
            torch.ones(8),
            *tables(5, 8),
            EPS,
        ),
    }
    torch.library.opcheck(OPS[name].traced, (*arguments[name], KernelPolicy().token))
