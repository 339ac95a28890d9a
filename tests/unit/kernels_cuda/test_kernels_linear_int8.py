"""rows_to_int8 and linear_int8 without a GPU: whole numbers, stock's own library, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import (
    Int8Rows,
    KernelPolicy,
    KernelRefused,
    linear_int8,
    linear_int8_,
    rows_to_int8,
)
from fusestream.kernels_cuda.build import matrix as sources
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.matmul import linear_int8 as op
from fusestream.kernels_cuda.ops.matmul.linear_int8_operands import KitchenLinear, kitchen, product
from fusestream.kernels_cuda.ops.quant import rows_to_int8 as rounding
from fusestream.kernels_cuda.ops.quant.rotation import (
    GROUPS,
    matrix,
    root,
    turned,
)

OFF = KernelPolicy.of("off")
ON = KernelPolicy.of("on")
CONVROT = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)


def whole(*shape, low=-127):
    return torch.randint(low, 128, shape, dtype=torch.int8)


# ------------------------------------------------------------------------------------------------------------ rotation


@pytest.mark.parametrize("group", GROUPS)
def test_the_rotation_is_convrots(group):
    """A Kronecker power of the regular matrix of 4, over its root; orthogonal, and its own transpose."""
    want = torch.ones(1, 1, dtype=torch.float64)
    while want.shape[0] < group:
        want = torch.kron(want, CONVROT)
    found = matrix(group, torch.float64, torch.device("cpu"))
    assert torch.equal(found, want / math.sqrt(group))
    assert torch.equal(found, found.t()) and torch.equal(found @ found, torch.eye(group, dtype=torch.float64))
    x = torch.randn(3, 2 * group, dtype=torch.float64)
    by_hand = torch.cat([part @ want for part in x.split(group, -1)], -1)
    torch.testing.assert_close(turned(x, group), by_hand)


def test_rows_turned_alike_keep_their_product():
    x, weight = torch.randn(5, 512, dtype=torch.float64), torch.randn(7, 512, dtype=torch.float64)
    for group in GROUPS:
        found = (turned(x, group) * root(group)) @ (turned(weight, group) * root(group)).t()
        torch.testing.assert_close(found, x @ weight.t())


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


def halves(*shape):
    return torch.zeros(*shape, dtype=torch.float16)


def test_every_obstacle_to_rounding_is_spoken():
    for x, words in (
        (halves(4, 32).float(), "x is float32"),
        (halves(4, 36), "k is 36, the kernel takes multiples of 8"),
        (halves(1, 2**15 + 8), "k is 32776, the kernel holds rows of 32768 at most"),
        (halves(8, 16).t(), "elements of a row are 16 apart"),
        (halves(140)[3:131].view(4, 32), "rows do not start at multiples of 16 bytes"),
        (torch.empty(70000, 3, 8, dtype=torch.float16, device="meta")[:, :2], "70000 batches exceed a grid"),
    ):
        assert words in next(rounding.obstacles(Call("rows_to_int8", (x,), (0,))), "nothing"), words
    with pytest.raises(KernelRefused, match="tensor is on the CPU"):
        rows_to_int8(halves(4, 32), policy=ON)


def test_blocks_hold_their_rows():
    for k in (8, 256, 2048, 2056, 8192, 8200, 13824, rounding.WIDEST):
        block = rounding.Block.of(k)
        assert block.packs * block.threads * rounding.PACK >= k and block.threads <= rounding.BLOCKS[block.packs]
        assert block.threads % 32 == 0
    assert rounding.Block.of(1536) == rounding.Block(1, 192) and rounding.Block.of(13824) == rounding.Block(4, 448)


# ------------------------------------------------------------------------------------------------------------- product


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 5), st.integers(1, 40)),
    by_row=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_sums_are_whole_numbers(sizes, by_row):
    """Bit for bit what Python's own integers give, with the largest numbers there are among them."""
    b, s, n, k = sizes
    x, weight = whole(b, s, k), whole(n, k, low=-128)
    x[0, 0], weight[0] = 127, -128
    ones = torch.ones(n if by_row else 1)
    for policy in (KernelPolicy(), OFF):
        got = linear_int8(Int8Rows(x, torch.ones(b, s)), weight, ones, out_dtype=torch.float32, policy=policy)
        for i in range(b):
            for t in range(s):
                for j in range(n):
                    want = sum(int(p) * int(q) for p, q in zip(x[i, t], weight[j], strict=True))
                    assert int(got[i, t, j]) == want


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


def test_the_rotation_is_what_saves_outliers():
    """A channel 100 times as large as the others, as behind a GELU."""
    x, weight = torch.randn(64, 512).half(), (torch.randn(48, 512) / 22).half()
    x[:, 77] *= 100
    exact = x.double() @ weight.double().t()
    error = {}
    for group in (0, 256):
        weight8 = rows_to_int8(weight, rotation=group)
        got = linear_int8(x, *weight8, rotation=group, out_dtype=torch.float32).double()
        rest = exact - x[:, 77, None].double() * weight[:, 77].double()
        error[group] = (got - exact).norm() / rest.norm()
    assert error[256] < error[0] / 2, error


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


@pytest.mark.parametrize("k", [8, 12])
@pytest.mark.parametrize("n", [32, 40])
def test_stocks_product_takes_any_size(n, k):
    x, weight = whole(3, k), whole(n, k)
    assert torch.equal(product(x, weight).double(), x.double() @ weight.double().t())


def test_in_place_over_the_residual():
    x, weight, stream = torch.randn(2, 5, 32).half(), whole(16, 32), torch.randn(2, 5, 16)
    more = {"weight_scale": torch.tensor([0.01]), "activation": "silu", "gate": torch.randn(2, 5, 16)}
    for policy in (KernelPolicy(), OFF):
        want = linear_int8(x, weight, **more, residual=stream, policy=policy)
        assert want.dtype is torch.float32
        room, over = torch.zeros(2, 9, 16), stream.clone()
        linear_int8_(room[:, 2:7], x, weight, **more, residual=stream, policy=policy)
        linear_int8_(over, x, weight, **more, residual=over, policy=policy)
        assert torch.equal(room[:, 2:7], want) and torch.equal(over, want)
        assert not room[:, :2].any() and not room[:, 7:].any()


def test_scale_keeps_what_would_overflow():
    x, weight = (
        Int8Rows(torch.full((1, 64), 127, dtype=torch.int8), torch.ones(1)),
        torch.full((8, 64), 127, dtype=torch.int8),
    )
    one = torch.ones(1)
    for policy in (KernelPolicy(), OFF):
        assert linear_int8(x, weight, one, policy=policy).isinf().all()
        assert (linear_int8(x, weight, one, scale=2.0**-5, policy=policy) == 127 * 127 * 2).all()
        assert (linear_int8(x, weight, one, saturate=True, policy=policy) == 65504).all()
        assert (
            linear_int8(Int8Rows(x.numbers, one * torch.nan), weight, one, saturate=True, policy=policy).isnan().all()
        )


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


def test_every_obstacle_is_spoken():
    long = torch.empty(4, 2**17, dtype=torch.int8, device="meta")
    cases = [
        (call(x=halves(4, 32).float()), "x is float32"),
        (call(weight=halves(16, 32)), "weight is float16"),
        (call(weight_scale=torch.ones(16).half()), "weight_scale is float16"),
        (call(bias=halves(16).double()), "bias is float64"),
        (call(options=("none", 1.0, False, 0, torch.bfloat16)), "the output is bfloat16"),
        (call(halves(4, 0), whole(16, 0)), "k is 0"),
        (call(halves(4, 40), whole(16, 40)), "k is 40, the kernels take multiples of 16"),
        (call(weight=whole(12, 32)), "n is 12, the kernels take multiples of 8"),
        (call(long, long, x_scale=torch.ones(4)), "n is 4"),
        (
            call(long, long.expand(4, -1).repeat(2, 1), x_scale=torch.ones(4)),
            "k is 131072, and sums of more than 131056",
        ),
        (call(weight_scale=torch.ones(32)[::2]), "weight_scale is not contiguous"),
        (call(x=whole(8, 32)[::2], x_scale=torch.ones(8)[::2]), "x_scale is not contiguous"),
        (call(x=whole(4, 40)[:, :32]), "x: rows do not start at multiples of 16 bytes"),
        (call(x=halves(4, 36)[:, :32]), "x: rows do not start at multiples of 16 bytes"),
        (call(x=whole(144)[8:136].view(4, 32)), "x: rows do not start at multiples of 16 bytes"),
        (call(weight=whole(16, 40)[:, :32]), "weight: rows do not start at multiples of 16 bytes"),
        (call(weight=whole(32, 16).t()), "weight: elements of a row are 16 apart"),
        (call(residual=halves(16, 4).t()), "residual: elements of a row are 4 apart"),
        (call(bias=halves(17)[1:]), "bias is not contiguous, or does not start"),
        (call(gate=halves(32)[::2]), "gate: elements of a row are 2 apart"),
    ]
    for each, words in cases:
        assert words in next(op.obstacles(each), "nothing"), words
    everything = call(bias=halves(16), residual=halves(4, 16), gate=halves(4, 16), weight_scale=torch.ones(16, 1))
    for fine in (call(), call(whole(4, 32)), call(halves(0, 32)), call(x=whole(4, 48)[:, :32]), everything):
        assert next(op.obstacles(fine), None) is None
    with pytest.raises(KernelRefused, match="tensor is on the CPU"):
        linear_int8(halves(4, 32), whole(16, 32), torch.ones(1), policy=ON)


def test_shape_classes_tell_apart_what_costs_differently():
    calls = [
        call(),
        call(x=whole(4, 32)),
        call(weight_scale=torch.ones(16)),
        call(bias=halves(16)),
        call(options=("none", 1.0, False, 16, None)),
        call(options=("gelu", 1.0, False, 0, None)),
        call(x=halves(9, 32)),
    ]
    assert len({op.shape_class(each) for each in calls}) == len(calls)


def test_the_cut_follows_the_work():
    assert op.best_cut(32760, 8960, 34, "sm_75") == op.Cut(128, 128)
    assert op.best_cut(32760, 8960, 34, "sm_80") == op.Cut(192, 128, 96)
    assert op.best_cut(64, 8960, 34, "sm_75") == op.Cut(64, 128)
    assert [str(way) for way in op.ways(call())] == ["128x128", "192x128", "128x256", "64x128"]
    assert all(cut.resident * cut.warps == 8 for cut in op.CUTS)


def test_what_stocks_library_is_asked(monkeypatch):
    pytest.importorskip("comfy_kitchen")
    monkeypatch.setattr(Call, "device", property(lambda _: torch.device("cuda", 0)))
    rival = KitchenLinear()
    assert rival.refuse(call()) is None and rival.refuse(call(gate=halves(16))) is None
    assert "rounds x itself" in (rival.refuse(call(x=whole(4, 32))) or "")
    assert "scaled or saturated" in (rival.refuse(call(options=("none", 0.5, False, 0, None))) or "")
    assert "nothing to compute" in (rival.refuse(call(x=halves(0, 32))) or "")
    assert [c.name for c in op.LINEAR_INT8.candidates] == ["cuda", "stock", "comfy-kitchen"]  # `off` takes stock
    x, weight, bias, stream = torch.randn(4, 256).half(), whole(16, 256), torch.randn(16).half(), torch.randn(4, 16)
    for options in (("gelu_tanh", 1.0, False, 0, None), ("none", 1.0, False, 64, torch.float16)):
        asked = call(x, weight, torch.tensor(0.01), bias, stream, bias, options=options)
        got = rival.prepare(asked)(*asked.tensors)
        want = op.reference(*asked.tensors, *options)
        assert got.dtype is want.dtype
        assert (got - want).double().norm() / want.double().norm() < 0.01


def test_without_stocks_library(monkeypatch):
    monkeypatch.setattr(Call, "device", property(lambda _: torch.device("cuda", 0)))
    monkeypatch.setattr("fusestream.kernels_cuda.ops.matmul.linear_int8_operands.kitchen", lambda: None)
    assert "comfy-kitchen is not loaded" in (KitchenLinear().refuse(call()) or "")


def test_the_struct_mirrors_the_source():
    """Pointers of scales, then the whole of LinearParams, as one struct in the other."""
    source = (sources.SOURCES / "linear_int8.cu").read_text(encoding="utf-8")
    body = source.split("struct LinearInt8Params {")[1].split("};")[0]
    places = [
        body.index(field) for field in ("x_scale;", "weight_scale;", "LinearParams linear;", "weight_scale_step;")
    ]
    assert places == sorted(places)
    names = [name for name, *_ in op.LinearInt8Params._fields_]
    assert names[:3] == ["x_scale", "weight_scale", "x"] and names[-1] == "weight_scale_step"
