"""rows_to_int4 and linear_int4 without a GPU: whole numbers, files of stock's own library, what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import Int4Rows, KernelPolicy, KernelRefused, linear_int4, linear_int4_, rows_to_int4
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.matmul import integer_product
from fusestream.kernels_cuda.ops.matmul import linear_int4 as op
from fusestream.kernels_cuda.ops.quant.integer_rows import packed, unpacked
from fusestream.kernels_cuda.ops.quant.rotation import GROUPS, root, turned

OFF = KernelPolicy.of("off")
ON = KernelPolicy.of("on")
WAYS = pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])


def any_bytes(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def halves(*shape):
    return torch.zeros(*shape, dtype=torch.float16)


# ------------------------------------------------------------------------------------------------------------ rounding


def test_every_byte_is_two_numbers():
    """The first of two neighbours in the lower bits, as two's complement; there and back."""
    every = torch.arange(-128, 128).to(torch.int8)
    numbers = unpacked(every)
    assert numbers[:4].tolist() == [0, -8, 1, -8] and numbers.min() == -8 and numbers.max() == 7
    assert torch.equal(packed(numbers), every)
    assert packed(torch.tensor([[1, -1, -8, 7]], dtype=torch.int8)).view(torch.uint8).tolist() == [[0xF1, 0x78]]


@pytest.mark.parametrize("group", [0, *GROUPS])
@WAYS
def test_rows_are_rounded_to_the_nearest(group, policy):
    x = torch.randn(3, 5, 512).half()
    x[1, 2, 7] = 400
    x[2, 0] = 0
    x[2, 0, 5] = 65504
    stored, scales = rows_to_int4(x, rotation=group, policy=policy)
    numbers = unpacked(stored)
    assert stored.dtype is torch.int8 and stored.shape == (3, 5, 256) and scales.shape == (3, 5)
    exact = turned(x.double(), group) * root(group)
    some = torch.ones(3, 5, dtype=torch.bool)
    some[2, 0] = policy is not OFF or not group  # stock's fp16 sums of such a row round far more
    assert (numbers.abs().amax(-1) == 7).all() and scales.isfinite().all()
    off = (numbers.double() * scales.double()[..., None] - exact).abs()
    slack = 1.001 if policy is not OFF or not group else 1.02  # stock turns rows in their own type
    assert (off <= 0.5 * slack * scales[..., None])[some].all()
    wanted = exact.abs().amax(-1) / 7
    torch.testing.assert_close(scales.double()[some], wanted[some], rtol=2e-3 if policy is OFF else 1e-6, atol=0)


@pytest.mark.parametrize("group", [0, 16, 256])
@WAYS
def test_rows_without_numbers(group, policy):
    x = torch.randn(5, 256).half()
    x[0] = 0
    x[1, 3], x[2, 4], x[3, 5] = torch.nan, torch.inf, -torch.inf
    numbers, scales = rows_to_int4(x, rotation=group, policy=policy)
    assert scales[0] == 1 and not numbers[0].any()
    assert scales[1:4].isnan().all() and not numbers[1:4].any()
    assert scales[4].isfinite() and numbers[4].any()


def test_rows_have_pairs():
    with pytest.raises(ValueError, match="rows of 7 do not fill bytes of 2 numbers"):
        rows_to_int4(halves(3, 7))
    assert rows_to_int4(torch.randn(3, 6).half()).numbers.shape == (3, 3)


# ------------------------------------------------------------------------------------------------------------- product


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 5), st.integers(1, 20)), by_row=st.booleans()
)
@settings(max_examples=examples(40), deadline=None)
def test_sums_are_whole_numbers(sizes, by_row):
    """Bit for bit what Python's own integers give, with the largest numbers there are among them."""
    b, s, n, pairs = sizes
    x, weight = any_bytes(b, s, pairs), any_bytes(n, pairs)
    x[0, 0], weight[0] = -120, -120  # twice -8
    of_x, of_weight = unpacked(x), unpacked(weight)
    ones = torch.ones(n if by_row else 1)
    for policy in (KernelPolicy(), OFF):
        got = linear_int4(Int4Rows(x, torch.ones(b, s)), weight, ones, out_dtype=torch.float32, policy=policy)
        for i in range(b):
            for t in range(s):
                for j in range(n):
                    want = sum(int(p) * int(q) for p, q in zip(of_x[i, t], of_weight[j], strict=True))
                    assert int(got[i, t, j]) == want


@pytest.mark.parametrize("group", [0, *GROUPS])
def test_halves_are_rounded_on_the_way(group):
    x, weight = torch.randn(2, 40, 256).half(), (torch.randn(64, 256) / 16).half()
    of_weight = rows_to_int4(weight, rotation=group)
    got = linear_int4(x, *of_weight, rotation=group)
    assert got.dtype is torch.float16
    assert torch.equal(got, linear_int4(rows_to_int4(x, rotation=group), *of_weight))
    exact = x.double() @ weight.double().t()
    for policy, most in ((KernelPolicy(), 0.21), (OFF, 0.21)):
        theirs = linear_int4(x, *of_weight, rotation=group, policy=policy)
        assert (theirs.double() - exact).norm() / exact.norm() < most


def test_files_of_stocks_own_library():
    """Bytes and scales of its making are what ours are, and so is the product but for where it rounds."""
    library = pytest.importorskip("comfy_kitchen.backends.eager.convrot_w4a4")
    x, weight, bias = torch.randn(50, 512), torch.randn(96, 512), torch.randn(96)
    for group in (16, 64, 256):
        theirs, scales = library.quantize_convrot_w4a4_weight(weight, group)
        ours = rows_to_int4(weight, rotation=group)
        assert theirs.dtype is ours.numbers.dtype and theirs.shape == ours.numbers.shape
        apart = (unpacked(theirs).int() - unpacked(ours.numbers).int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3
        torch.testing.assert_close(scales, ours.scales, rtol=1e-5, atol=0)
        want = library.convrot_w4a4_linear(x, theirs, scales, bias, convrot_groupsize=group)
        got = linear_int4(x, theirs, scales, bias, rotation=group)
        assert (got - want).norm() / want.norm() < 0.01  # a number on the edge goes either way


def test_in_place_over_the_residual():
    x, weight, stream = torch.randn(2, 5, 32).half(), any_bytes(16, 16), torch.randn(2, 5, 16)
    more = {"weight_scale": torch.tensor([0.01]), "activation": "silu", "gate": torch.randn(2, 5, 16)}
    for policy in (KernelPolicy(), OFF):
        want = linear_int4(x, weight, **more, residual=stream, policy=policy)
        room, over = torch.zeros(2, 9, 16), stream.clone()
        linear_int4_(room[:, 2:7], x, weight, **more, residual=stream, policy=policy)
        linear_int4_(over, x, weight, **more, residual=over, policy=policy)
        assert torch.equal(room[:, 2:7], want) and torch.equal(over, want)
        assert not room[:, :2].any() and not room[:, 7:].any()


def call(x=None, weight=None, x_scale=None):
    x = halves(4, 64) if x is None else x
    weight = any_bytes(16, 32) if weight is None else weight
    if x_scale is None and x.dtype is torch.int8:
        x_scale = torch.ones(x.shape[:-1])
    tensors = (x, x_scale, weight, torch.ones(1), None, None, None)
    return Call("linear_int4", tensors, ("none", 1.0, False, 0, None))


def test_every_obstacle_is_spoken():
    """Those that differ from `linear_int8`'s: k counts numbers, strides bytes."""
    long = torch.empty(8, 2**16, dtype=torch.int8, device="meta")
    cases = [
        (call(weight=halves(16, 32)), "weight is float16"),
        (call(halves(4, 0), any_bytes(16, 0)), "k is 0"),
        (call(halves(4, 48), any_bytes(16, 24)), "k is 48, the kernels take multiples of 32"),
        (call(weight=any_bytes(12, 32)), "n is 12, the kernels take multiples of 8"),
        (call(long, long, x_scale=torch.ones(8)), "k is 131072, and sums of more than 131056"),
        (call(any_bytes(4, 40)[:, :32]), "x: rows do not start at multiples of 16 bytes"),
        (call(halves(4, 68)[:, :64]), "x: rows do not start at multiples of 16 bytes"),
        (call(weight=any_bytes(16, 40)[:, :32]), "weight: rows do not start at multiples of 16 bytes"),
    ]
    for each, words in cases:
        assert words in next(integer_product.obstacles(each), "nothing"), words
    for fine in (call(), call(any_bytes(4, 32)), call(halves(0, 64)), call(any_bytes(4, 48)[:, :32])):
        assert next(integer_product.obstacles(fine), None) is None
    with pytest.raises(KernelRefused, match="tensor is on the CPU"):
        linear_int4(halves(4, 64), any_bytes(16, 32), torch.ones(1), policy=ON)


def test_the_cut_follows_the_work():
    assert op.INT4.product.best_cut(32760, 8960, 34, "sm_75") == op.Cut(128, 256)
    assert op.INT4.product.best_cut(64, 8960, 34, "sm_75") == op.Cut(64, 128)
    assert op.INT4.product.best_cut(32760, 8960, 38, "sm_80") == op.Cut(192, 128, 96)
    assert op.INT4.product.best_cut(32760, 8960, 132, "sm_80", unpacks=True).warp_rows == 64
    assert all(cut.resident * cut.warps == 8 for cut in op.CUTS)
