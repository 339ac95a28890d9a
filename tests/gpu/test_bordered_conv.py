"""bordered_conv2d and bordered_upsample_conv2d on the GPU, in both instruction classes and both ways to accumulate."""

from __future__ import annotations

import os

import pytest
import torch
from gpu.support import HALF_STEP, laid_out, on
from gpu.support import assert_sums as check
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fusestream.kernels_cuda import KernelPolicy, bordered_conv2d, bordered_upsample_conv2d, fold_upsample
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card
from fusestream.kernels_cuda.ops.conv import bordered_conv as op
from fusestream.kernels_cuda.ops.matmul.linear_operands import ACTIVATIONS

EXAMPLES = int(os.environ.get("FUSESTREAM_EXAMPLES") or 2500) // 25


def image(*shape):
    return laid_out(torch.randn(*shape, device="cuda").half(), "last")


def weights(n, c):
    return laid_out((torch.randn(n, c, 3, 3, device="cuda") * (9 * c) ** -0.5).half(), "last")


def wide(tensors, sizes=False):
    return [None if t is None else (t.double().abs() if sizes else t.double()) for t in tensors]


@st.composite
def configurations(draw):
    border = draw(st.sampled_from(op.BORDERS))
    h, w = draw(st.integers(3, 45)), draw(st.integers(3, 45))
    most = 9 if border == "replicate" else 8
    paddings = [draw(st.integers(0, min(most, side - 1))) for side in (w, w, h, h)]
    return {
        "sizes": (draw(st.integers(1, 3)), h, w),
        "c": draw(st.one_of(st.sampled_from([3, 8, 16, 32, 40, 64]), st.integers(1, 12))),
        "n": draw(st.one_of(st.sampled_from([1, 3, 16, 24, 96, 104, 128]), st.integers(1, 40))),
        "stride": draw(st.sampled_from([1, 1, 2])),
        "padding": tuple(draw(st.sampled_from([[1, 1, 1, 1], paddings]))),
        "border": border,
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "bias": draw(st.sampled_from([None, torch.float16, torch.float32])),
        "room": draw(st.sampled_from([0, 3])),  # rows of a taller picture, full of NaN
    }


@given(configurations())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_random_configurations(isa, precision, c):
    b, h, w = c["sizes"]
    x, weight = image(b, c["c"], h, w), weights(c["n"], c["c"])
    if c["room"]:
        room = laid_out(torch.full((b, c["c"], h + 2 * c["room"], w), torch.nan, device="cuda").half(), "last")
        x = room[:, :, c["room"] : -c["room"]].copy_(x)
    bias = None if c["bias"] is None else torch.randn(c["n"], device="cuda").to(c["bias"])
    options = (c["activation"], c["stride"], *c["padding"], c["border"])
    tensors = (x, weight, bias)
    exact = op.reference(*wide(tensors), *options)
    sizes = op.reference(*wide(tensors, sizes=True), "none", *options[1:])
    call = Call("bordered_conv", tensors, options, on(isa, precision))
    assert next(op.obstacles(call), None) is None
    for tactic in op.ways(call):
        got = op.plan(call, card(0, isa), tactic)(*tensors)
        check(got, exact, sizes, tactic.precision, f"{c} {tactic}")
        assert got.stride() == exact.stride()


@pytest.mark.sanitize
@pytest.mark.parametrize("border", op.BORDERS)
@pytest.mark.parametrize(("h", "w"), [(2, 2), (3, 17), (16, 16), (17, 33)])
@pytest.mark.parametrize("stride", [1, 2])
def test_ends_and_corners(isa, precision, border, h, w, stride):
    x, weight, bias = image(2, 24, h, w), weights(40, 24), torch.randn(40, device="cuda")
    options = ("relu", stride, 1, 1, 1, 1, border)
    exact, sizes = (
        op.reference(*wide((x, weight, bias)), *options),
        op.reference(*wide((x, weight, bias), True), *options),
    )
    got = bordered_conv2d(
        x,
        weight,
        bias,
        padding=(1,) * 4,
        border=border,
        stride=stride,
        activation="relu",
        policy=on(isa, precision),
    )
    check(got, exact, sizes, precision, "ends")


@pytest.mark.sanitize
@pytest.mark.parametrize(("c", "n"), [(8, 8), (12, 3), (64, 32), (128, 64)])
@pytest.mark.parametrize(("h", "w"), [(1, 1), (5, 7), (17, 33)])
def test_upsampling(isa, precision, c, n, h, w):
    x, weight, bias = image(2, c, h, w), weights(n, c), torch.randn(n, device="cuda")
    exact = op.upsample_reference(*wide((x, weight, bias)), None, "none")
    sizes = op.upsample_reference(*wide((x, weight, bias), True), None, "none")
    folded = fold_upsample(weight)
    call = Call("bordered_upsample_conv", (x, weight, bias, folded), ("none",), on(isa, precision))
    for tactic in op.upsample_ways(call):
        got = op.upsample_plan(call, card(0, isa), tactic)(*call.tensors)
        check(got, exact, sizes, tactic.precision, str(tactic), folded=HALF_STEP)
    got = bordered_upsample_conv2d(x, weight, bias, folded=folded, policy=on(isa, precision))
    assert got.stride() == exact.stride()


def test_every_candidate_computes_the_same():
    x, weight, bias = image(1, 32, 37, 50), weights(48, 32), torch.randn(48, device="cuda").half()
    options = ("silu", 1, 1, 1, 1, 1, "reflect")
    call = Call("bordered_conv", (x, weight, bias), options, KernelPolicy.of("auto"))
    exact = op.reference(*wide((x, weight, bias)), *options)
    for candidate in op.BORDERED_CONV.candidates:
        assert candidate.refuse(call) is None
        torch.testing.assert_close(candidate.prepare(call)(x, weight, bias).double(), exact, atol=4e-3, rtol=4e-3)


def test_bitwise_repeatable(isa, precision):
    x, weight, bias = image(2, 40, 29, 31), weights(96, 40), torch.randn(96, device="cuda").half()
    runs = [bordered_conv2d(x, weight, bias, padding=(1,) * 4, policy=on(isa, precision)) for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)
