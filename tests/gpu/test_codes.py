"""codes_to_int8 and codes_to_half on the GPU, in both instruction classes: bit for bit."""

from __future__ import annotations

import pytest
import torch
from gpu.support import on

from fusestream.kernels_cuda import codes_to_half, codes_to_int8, linear_int8
from fusestream.kernels_cuda.ops.quant import codes_to_half as to_half
from fusestream.kernels_cuda.ops.quant import codes_to_int8 as to_int8

E4M3 = torch.float8_e4m3fn
LARGE = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB"
)


def any_bytes(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")


def coded(n, k, bits, group, dtype=E4M3, book=False):
    scales = (torch.rand(n, k // group, device="cuda") * 40).to(dtype)
    return any_bytes(n, k * bits // 8), scales, torch.randn(16, device="cuda") if book else None


def coded_for_halves(n, k, group, dtype, zeros, columns):
    scales, zero = (torch.randn(k // group, n, device="cuda").to(dtype) for _ in range(2))
    factors = (torch.rand(k, device="cuda") + 0.25).to(dtype)
    return any_bytes(n, k // 2), scales, zero if zeros else None, factors if columns else None


def same(got, want):
    return torch.equal(got.nan_to_num(nan=12345.0), want.nan_to_num(nan=12345.0))


# ------------------------------------------------------------------------------------------------- as numbers of 8 bits


@pytest.mark.sanitize
@pytest.mark.parametrize(("n", "k"), [(1, 64), (3, 192), (5, 576), (70, 1024)])
def test_ends_of_numbers(isa, n, k):
    for bits, book in ((4, False), (4, True), (6, False)):
        for group in (4, 8, 16, 64):
            for dtype in (E4M3, torch.float32):
                given = coded(n, k, bits, group, dtype, book)
                got = codes_to_int8(*given, bits=bits, group=group, policy=on(isa))
                want = to_int8.reference(*(t if t is None else t.cpu() for t in given), bits, group)
                assert torch.equal(got.cpu(), want), (bits, book, group, dtype)


@pytest.mark.parametrize(("n", "k"), [(1536, 8960), (5120, 5120), (4096, 13824)])
def test_weights_as_numbers(isa, n, k):
    for bits, group in ((4, 16), (4, 64), (6, 16)):
        given = coded(n, k, bits, group, book=bits == 4)
        want = to_int8.reference(*given, bits, group)
        assert torch.equal(codes_to_int8(*given, bits=bits, group=group, policy=on(isa)), want)


def test_into_memory_that_is_there(isa):
    given = coded(40, 256, 4, 16, book=True)
    room = torch.full((42, 256), 7, dtype=torch.int8, device="cuda")
    codes_to_int8(*given, bits=4, out=room[1:41], policy=on(isa))
    assert torch.equal(room[1:41], to_int8.reference(*given, 4, 16))
    assert (room[0] == 7).all() and (room[41] == 7).all()


def test_special_scales_and_values(isa):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 0.0, 1e-45, 0.5 - 2**-26], device="cuda")
    codes, book = any_bytes(8, 64), torch.randn(16, device="cuda")
    scales = special[:, None].expand(8, 8).contiguous()
    book[3], book[7], book[9] = torch.nan, torch.inf, 0.0
    for values in (None, book):
        want = to_int8.reference(codes.cpu(), scales.cpu(), values if values is None else values.cpu(), 4, 16)
        assert torch.equal(codes_to_int8(codes, scales, values, bits=4, policy=on(isa)).cpu(), want)
    every = torch.arange(256, dtype=torch.uint8, device="cuda").view(E4M3)[:, None].expand(256, 8).contiguous()
    codes = any_bytes(256, 96)
    want = to_int8.reference(codes.cpu(), every.cpu(), None, 6, 16)
    assert torch.equal(codes_to_int8(codes, every, bits=6, policy=on(isa)).cpu(), want)


def test_a_product_of_them(isa):
    """With a scale for each row they are a weight of an INT8 file."""
    (n, k), given = (256, 512), coded(256, 512, 4, 16, book=True)
    rows, x = torch.rand(n, device="cuda") * 1e-3, torch.randn(33, k, device="cuda").half()
    weight = codes_to_int8(*given, bits=4, policy=on(isa))
    got = linear_int8(x, weight, rows, policy=on(isa, "turbo"))
    want = x.double() @ (to_int8.reference(*given, 4, 16).double() * rows.double()[:, None]).t()
    assert (got.double() - want).norm() / want.norm() < 0.02


@LARGE
def test_more_than_2_to_the_32_numbers(isa):
    given = coded(2**20 + 3, 4096, 4, 64)
    got = codes_to_int8(*given, bits=4, group=64, policy=on(isa))
    for rows in (slice(0, 5), slice(-5, None)):
        assert torch.equal(got[rows], to_int8.reference(given[0][rows], given[1][rows], None, 4, 64))


# ------------------------------------------------------------------------------------------------------------ as halves


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(1, 512), (3, 1024), (17, 1536), (40, 2560)])
def test_ends_of_halves(isa, n, k, dtype):
    for group in to_half.GROUPS:
        for zeros, columns in ((False, False), (True, False), (False, True), (True, True)):
            given, signed = coded_for_halves(n, k, group, dtype, zeros, columns), columns
            got = codes_to_half(*given, signed=signed, group=group, policy=on(isa))
            want = to_half.reference(*(t if t is None else t.cpu() for t in given), signed, group)
            assert torch.equal(got.cpu(), want), (group, zeros, columns)


@pytest.mark.parametrize(("n", "k"), [(18432, 3072), (3072, 3072), (3072, 12288), (100, 96)])
def test_weights_as_halves(isa, n, k):
    group = 64 if k % 64 == 0 else 32
    for signed in (False, True):
        given = coded_for_halves(n, k, group, torch.bfloat16, not signed, signed)
        want = to_half.reference(*given, signed, group)
        assert torch.equal(codes_to_half(*given, signed=signed, group=group, policy=on(isa)), want)


def test_special_scales_zeros_and_columns(isa):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 0.0, 6e4, 1.0], device="cuda").bfloat16()
    for which in ("scales", "zeros", "columns"):
        codes, scales, zeros, columns = coded_for_halves(8, 128, 32, torch.bfloat16, True, True)
        if which == "columns":
            columns = special.repeat(16)
        else:
            (scales if which == "scales" else zeros).copy_(special)
        given = (codes, scales, zeros, columns)
        want = to_half.reference(*(t.cpu() for t in given), True, 32)
        assert same(codes_to_half(*given, signed=True, group=32, policy=on(isa)).cpu(), want), which


@LARGE
def test_more_than_2_to_the_32_halves(isa):
    codes, scales, *_ = given = coded_for_halves(2**20 + 3, 4096, 64, torch.float16, False, False)
    got = codes_to_half(*given, signed=True, policy=on(isa))
    for rows in (slice(0, 5), slice(-5, None)):
        want = to_half.reference(codes[rows], scales[:, rows], None, None, True, 64)
        assert torch.equal(got[rows], want)
