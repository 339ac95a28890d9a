"""Products of 8-bit numbers without a GPU: rounding rows, stock's own library, and back to halves."""

from __future__ import annotations

import pytest
import torch

from fusestream.kernels_cuda import (
    KernelPolicy,
    int8_to_half,
    linear_int8,
    linear_int8_,
    linear_int8_pair,
    rows_to_int8,
)
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.matmul import linear_int8 as op
from fusestream.kernels_cuda.ops.matmul.integer_operands import KitchenLinear, kitchen
from fusestream.kernels_cuda.ops.quant.rotation import GROUPS, root, turned

OFF = KernelPolicy.of("off")


def whole(*shape, low=-127):
    return torch.randint(low, 128, shape, dtype=torch.int8)


# ------------------------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("group", [0, *GROUPS])
@pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])
def test_rows_are_rounded_to_the_nearest(group, policy):
    """Off by half a step at most, the largest of a row is 127, and what is far outside makes a row's steps large."""
    x = torch.randn(3, 5, 512).half()
    x[1, 2, 7] = 400
    numbers, scales = rows_to_int8(x, rotation=group, policy=policy)
    assert numbers.dtype is torch.int8 and numbers.shape == x.shape
    assert scales.dtype is torch.float32 and scales.shape == x.shape[:-1]
    assert (numbers.abs().amax(-1) == 127).all()
    exact = turned(x.double(), group) * root(group)
    off = (numbers.double() * scales.double()[..., None] - exact).abs()
    slack = 1.001 if policy is not OFF or not group else 1.2  # stock turns rows in their own type
    assert (off <= 0.5 * slack * scales[..., None]).all()
    torch.testing.assert_close(
        scales.double(), exact.abs().amax(-1) / 127, rtol=2e-3 if policy is OFF else 1e-6, atol=0
    )
    if group == 256:
        plain = rows_to_int8(x, policy=policy).scales
        assert scales[1, 2] < plain[1, 2] / 10


@pytest.mark.parametrize("group", [0, 16, 256])
@pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])
def test_rows_without_numbers(group, policy):
    x = torch.randn(5, 256).half()
    x[0] = 0
    x[1, 3], x[2, 4], x[3, 5] = torch.nan, torch.inf, -torch.inf
    numbers, scales = rows_to_int8(x, rotation=group, policy=policy)
    assert scales[0] == 1 and not numbers[0].any()
    assert scales[1:4].isnan().all() and not numbers[1:4].any()
    assert scales[4].isfinite() and numbers[4].any()


@pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])
def test_rows_of_the_smallest_bf16_stay_near(policy):
    """Where 127 over the largest of a row is no float, nothing becomes infinite on the way."""
    x = torch.randn(4, 64).bfloat16() * torch.tensor([2.0**100, 2.0**-100, 2.0**-126, 2.0**-131])[:, None].bfloat16()
    numbers, scales = rows_to_int8(x, policy=policy)
    assert (numbers[:2].abs().amax(-1) == 127).all() and numbers[2].any() and (scales[2:] < 3e-39).all()
    off = (numbers.double() * scales.double()[:, None] - x.double()).abs()
    assert (off <= 0.501 * scales[:, None].double() + 2e-45).all()


def halves(*shape):
    return torch.zeros(*shape, dtype=torch.float16)


# ------------------------------------------------------------------------------------------------------------- product


@pytest.mark.parametrize("group", [0, *GROUPS])
def test_halves_are_rounded_on_the_way(group):
    """As if they had been rounded before; and near the product of the halves themselves."""
    x, weight = torch.randn(2, 40, 256).half(), (torch.randn(64, 256) / 16).half()
    weight8 = rows_to_int8(weight, rotation=group)
    got = linear_int8(x, weight8.numbers, weight8.scales, rotation=group)
    assert got.dtype is torch.float16
    assert torch.equal(got, linear_int8(rows_to_int8(x, rotation=group), weight8.numbers, weight8.scales))
    exact = x.double() @ weight.double().t()
    error = (got.double() - exact).norm() / exact.norm()
    assert error < 0.016, error
    # stock's way turns in the rows' own type, and rounds otherwise here and there
    theirs = linear_int8(x, weight8.numbers, weight8.scales, rotation=group, policy=OFF)
    assert (theirs.double() - exact).norm() / exact.norm() < 0.017
    assert ((theirs.double() - got.double()).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])
def test_streams_of_bf16(policy):
    """What fp16 would not hold, in and out: of x's type, or the residual's."""
    x, weight8 = (torch.randn(2, 40, 256) * 1e5).bfloat16(), rows_to_int8(torch.randn(64, 256).half() / 16, rotation=64)
    stream, gate = (torch.randn(2, 40, 64) * 1e6).bfloat16(), torch.randn(64).bfloat16()
    exact = x.double() @ int8_to_half(*weight8, rotation=64).double().t()
    got = linear_int8(x, *weight8, rotation=64, policy=policy)
    assert got.dtype is torch.bfloat16 and got.abs().max() > 65504
    assert (got.double() - exact).norm() / exact.norm() < 0.02
    more = {"residual": stream, "gate": gate, "saturate": True, "rotation": 64, "policy": policy}
    added = linear_int8(x, *weight8, **more)
    wanted = stream.double() + gate.double() * exact
    assert added.dtype is torch.bfloat16 and (added.double() - wanted).norm() / wanted.norm() < 0.02
    linear_int8_(stream, x, *weight8, **more)
    assert torch.equal(stream, added)
    pair = linear_int8_pair(x, *weight8, *weight8, rotation=64, policy=policy)
    assert pair.dtype is torch.bfloat16 and pair.isfinite().all() and pair.max() > 1e8


def test_stocks_own_library_agrees():
    """Files of its making: numbers and scales are what its code makes of the same weight, and the product is the same but for
    where it rounds."""
    library = pytest.importorskip("comfy_kitchen")
    eager = pytest.importorskip("comfy_kitchen.backends.eager.quantization")
    x, weight, bias = torch.randn(3, 50, 512).half(), torch.randn(96, 512).half(), torch.randn(96).half()
    for group in (64, 256):
        theirs, scales = eager.quantize_int8_convrot_weight(weight.float(), group)
        ours = rows_to_int8(weight, rotation=group)
        assert (theirs != ours.numbers).float().mean() < 1e-3 and (theirs.int() - ours.numbers.int()).abs().max() <= 1
        torch.testing.assert_close(scales.squeeze(1), ours.scales, rtol=1e-5, atol=0)
        assert kitchen() is not None
        want = library.int8_linear(x, theirs, scales, bias, torch.float16, convrot=True, convrot_groupsize=group)
        got = linear_int8(x, theirs, scales, bias, rotation=group)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
        assert (got - want).float().norm() / want.float().norm() < 0.01
    theirs, scale = eager.quantize_int8_tensorwise(weight)
    want = library.int8_linear(x, theirs, scale, bias, torch.float16)
    assert (linear_int8(x, theirs, scale, bias) - want).float().norm() / want.float().norm() < 0.01


def call(x=None, weight=None, weight_scale=None, bias=None, residual=None, gate=None, x_scale=None, options=None):
    x = halves(4, 32) if x is None else x
    weight = whole(16, 32) if weight is None else weight
    weight_scale = torch.ones(1) if weight_scale is None else weight_scale
    if x_scale is None and x.dtype is torch.int8:
        x_scale = torch.ones(x.shape[:-1])
    return Call(
        "linear_int8",
        (x, x_scale, weight, weight_scale, bias, residual, gate),
        options or ("none", 1.0, False, 0, None),
    )


def test_what_stocks_library_is_asked(monkeypatch):
    pytest.importorskip("comfy_kitchen")
    monkeypatch.setattr(Call, "device", property(lambda _: torch.device("cuda", 0)))
    rival = KitchenLinear()
    assert rival.refuse(call()) is None and rival.refuse(call(gate=halves(16))) is None
    assert rival.refuse(call(x=halves(4, 32).bfloat16())) is None
    assert "rounds x itself" in (rival.refuse(call(x=whole(4, 32))) or "")
    assert "scaled or saturated" in (rival.refuse(call(options=("none", 0.5, False, 0, None))) or "")
    assert "nothing to compute" in (rival.refuse(call(x=halves(0, 32))) or "")
    assert [c.name for c in op.INT8.op.candidates] == ["cuda", "stock", "comfy-kitchen"]  # `off` takes stock
    weight, stream = whole(16, 256), torch.randn(4, 16)
    # Kitchen rounds before the activation and what follows it, ours at the end.
    for dtype, within in ((torch.float16, 0.01), (torch.bfloat16, 0.03)):
        x, bias = torch.randn(4, 256).to(dtype), torch.randn(16).to(dtype)
        for options in (("gelu_tanh", 1.0, False, 0, None), ("none", 1.0, False, 64, dtype)):
            asked = call(x, weight, torch.tensor(0.01), bias, stream, bias, options=options)
            got = rival.prepare(asked)(*asked.tensors)
            want = op.INT8.op.reference(*asked.tensors, *options)
            assert got.dtype is want.dtype
            assert (got - want).double().norm() / want.double().norm() < within


def test_without_stocks_library(monkeypatch):
    monkeypatch.setattr(Call, "device", property(lambda _: torch.device("cuda", 0)))
    monkeypatch.setattr("fusestream.kernels_cuda.ops.matmul.integer_operands.kitchen", lambda: None)
    assert "comfy-kitchen is not loaded" in (KitchenLinear().refuse(call()) or "")


# ------------------------------------------------------------------------------------------------------ back to halves


@pytest.mark.parametrize("group", [0, *GROUPS])
def test_there_and_back(group):
    weight = torch.randn(64, 1024).half()
    back = int8_to_half(*rows_to_int8(weight, rotation=group), rotation=group)
    assert (back - weight).float().norm() / weight.float().norm() < 0.012


def test_stocks_own_library_reads_the_same():
    eager = pytest.importorskip("comfy_kitchen.backends.eager.quantization")
    weight = torch.randn(64, 1024)
    for group in (64, 256):
        numbers, scales = eager.quantize_int8_convrot_weight(weight, group)
        want = eager.dequantize_int8_convrot_weight(numbers, scales, group)
        torch.testing.assert_close(int8_to_half(numbers, scales, rotation=group).float(), want, rtol=2**-11, atol=1e-5)
    numbers, scale = eager.quantize_int8_tensorwise(weight)
    assert torch.equal(int8_to_half(numbers, scale), eager.dequantize_int8_simple(numbers, scale).half())
