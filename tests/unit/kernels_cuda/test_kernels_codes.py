"""codes_to_int8 and codes_to_half without a GPU: every code, rounding, what is no number, and files of stock's own library."""

from __future__ import annotations

import pytest
import torch

from fusestream.kernels_cuda import KernelPolicy, codes_to_half, codes_to_int8, untiled_codes, untiled_of_rows

OFF = KernelPolicy.of("off")
EITHER = pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])
E4M3 = torch.float8_e4m3fn


def any_bytes(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def stored(rows, bits):
    """Rows of codes as bytes, put together code by code."""
    found = []
    for row in rows:
        lower = [row[c] & 15 | (row[c + 1] & 15) << 4 for c in range(0, len(row), 2)]
        upper = [sum((row[c + i] >> 4) << 2 * i for i in range(4)) for c in range(0, len(row), 4)] if bits == 6 else []
        found.append(lower + upper)
    return torch.tensor(found, dtype=torch.uint8).view(torch.int8)


# ------------------------------------------------------------------------------------------------- as numbers of 8 bits


@EITHER
@pytest.mark.parametrize("bits", [4, 6])
def test_every_code_in_every_place(bits, policy):
    every = 2**bits
    rows = [[(code + turn) % every for code in range(every)] for turn in range(every)]
    codes, ones = stored(rows, bits), torch.ones(every, every // 16)
    wanted = torch.tensor(rows)
    got = codes_to_int8(codes, ones, bits=bits, policy=policy)
    assert got.dtype is torch.int8 and torch.equal(got.long(), wanted - every // 2)
    if bits == 4:
        book = torch.arange(16).flip(0) * 8.0 - 60
        assert torch.equal(codes_to_int8(codes, ones, book, bits=4, policy=policy).float(), book[wanted])


@EITHER
@pytest.mark.parametrize("group", [4, 8, 16, 48])
@pytest.mark.parametrize("bits", [4, 6])
def test_a_scale_for_each_group(bits, group, policy):
    codes = stored([[2 ** (bits - 1) + 1] * 3 * group] * 2, bits)  # the value 1
    scales = torch.tensor([[1.0, -2.0, 64.0], [0.0, 1.5, 448.0]]).to(E4M3)
    got = codes_to_int8(codes, scales, bits=bits, group=group, policy=policy)
    assert got.tolist() == [[n for n in row for _ in range(group)] for row in ([1, -2, 64], [0, 2, 127])]


@EITHER
def test_halves_go_to_the_even_number_and_limits_hold(policy):
    book = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.4, 127.5, 1e9, -126.5, -127.5, -1e9, 0.49, 3, -3])
    codes = stored([list(range(16))], 4)
    want = [0, 2, 2, 0, -2, -2, 126, 127, 127, 127, -126, -127, -127, 0, 3, -3]
    assert codes_to_int8(codes, torch.ones(1, 1), book, bits=4, policy=policy).tolist() == [want]
    # Of the product as fp32 has it: 7 times this is a little below 3.5, and rounds to it.
    third = torch.tensor([[0.5 - 2**-26]])
    assert codes_to_int8(stored([[15] * 16], 4), third, bits=4, policy=policy).tolist() == [[4] * 16]


@EITHER
def test_what_is_no_number_is_zero(policy):
    codes = stored([[8] * 4 + [9] * 4 + [0] * 4 + [15] * 4] * 4, 4)  # 0, 1, -8, 7
    scales = torch.tensor([[torch.nan], [torch.inf], [-torch.inf], [1.0]])
    want = [[0, 0, 0, 0], [0, 127, -127, 127], [0, -127, 127, -127], [0, 1, -8, 7]]
    got = codes_to_int8(codes, scales, bits=4, policy=policy)
    assert got[:, ::4].tolist() == want
    book = torch.zeros(16)
    book[9], book[15] = torch.nan, torch.inf
    assert codes_to_int8(codes, torch.ones(4, 1), book, bits=4, policy=policy)[0, ::4].tolist() == [0, 0, 0, 127]
    nan = torch.full((4, 1), 0x7F, dtype=torch.uint8).view(E4M3)
    assert not codes_to_int8(codes, nan, bits=4, policy=policy).any()


# ------------------------------------------------------------------------------------------------------------ as halves


@EITHER
def test_signed_and_unsigned_codes(policy):
    codes = stored([list(range(16)) * 4], 4)
    scale, zero, columns = torch.tensor([[2.0]]).half(), torch.tensor([[0.5]]).half(), torch.full((64,), 4.0).half()
    counted = torch.arange(16).repeat(4).double()[None] - 8
    signed = counted.roll(8)
    for values, is_signed in ((counted, False), (signed, True)):

        def made(*more, is_signed=is_signed):
            return codes_to_half(codes, scale, *more, signed=is_signed, policy=policy).double()

        assert torch.equal(made(), values * 2)
        assert torch.equal(made(zero), values * 2 + 0.5)
        assert torch.equal(made(None, columns), values / 2)
        assert torch.equal(made(zero, columns), (values * 2 + 0.5) / 4)


@EITHER
def test_what_halves_cannot_hold(policy):
    codes = stored([[0] * 32 + [8] * 32] * 4, 4)  # -8 and 0
    scales = torch.tensor([[1e4, 4e37, torch.inf, torch.nan]]).bfloat16()
    got = codes_to_half(codes, scales, signed=False, policy=policy)
    assert got[:2, 0].tolist() == [-65504, -65504] and got[2, 0].isneginf() and got[3, 0].isnan()
    assert got[:2, 32].tolist() == [0, 0] and got[2:, 32].isnan().all()


# ------------------------------------------------------------------------------------------------------ stock's own files


@EITHER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stocks_own_library_reads_awq_the_same(dtype, policy):
    awq = pytest.importorskip("comfy_kitchen.tensor.awq_w4a16")
    n, k = 24, 320
    codes, scales, zeros = any_bytes(n, k // 2), torch.randn(k // 64, n).to(dtype), torch.randn(k // 64, n).to(dtype)
    layout = awq.TensorCoreAWQW4A16Layout
    # In fp32: in the scales' own type it rounds at each step.
    params = layout.Params(scale=scales, orig_dtype=torch.float32, orig_shape=(n, k), zeros=zeros)
    want = layout.dequantize(codes, params)
    assert torch.equal(codes_to_half(codes, scales, zeros, signed=False, policy=policy), want.half())


@EITHER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stocks_own_library_reads_svdquant_the_same(dtype, policy):
    svdquant = pytest.importorskip("comfy_kitchen.tensor.svdquant_w4a4")
    n, k, rank = 24, 192, 8
    codes, scales = any_bytes(n, k // 2), torch.randn(k // 64, n).to(dtype)
    columns, down, up = (torch.rand(k) + 0.5).to(dtype), torch.randn(k, rank), torch.randn(n, rank)
    layout = svdquant.TensorCoreSVDQuantW4A4Layout
    params = layout.Params(
        scale=scales.float(),
        orig_dtype=torch.float32,
        orig_shape=(n, k),
        proj_down=down,
        proj_up=up,
        smooth_factor=columns.float(),
    )
    # It multiplies a matrix of ones on the diagonal, each of which its own rounding keeps.
    want = layout.dequantize(codes, params) - up @ down.t()
    got = codes_to_half(codes, scales, columns=columns, signed=True, policy=policy)
    torch.testing.assert_close(got.float(), want, rtol=2**-11, atol=2e-5)


def test_tiles_are_put_in_order():
    """Four rows in a line, and 32 bytes of each: found byte by byte, and as stock's own library has it."""
    tiles, scales, up = any_bytes(2, 3, 32, 128), torch.randn(2, 3, 128), torch.randn(2, 5, 128)
    rows = untiled_codes(tiles)
    assert rows.shape == (256, 96) and rows.is_contiguous()
    for row in range(256):
        for byte in range(96):
            assert rows[row, byte] == tiles[row // 128, byte // 32, row % 128 // 4, row % 4 * 32 + byte % 32]
    assert untiled_of_rows(scales)[2, 130] == scales[1, 2, 2] and untiled_of_rows(up).shape == (5, 256)
    eager = pytest.importorskip("comfy_kitchen.backends.eager.svdquant")
    assert torch.equal(rows, eager._tile_packed_weight_to_row_major(tiles))
    assert torch.equal(untiled_of_rows(scales), eager._tile_packed_scales_to_natural(scales))
    assert torch.equal(untiled_of_rows(up).t(), eager._tile_packed_lora_up_to_natural(up))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (untiled_codes, (2, 3, 32, 64)),
        (untiled_codes, (256, 96)),
        (untiled_of_rows, (2, 3, 64)),
        (untiled_of_rows, (6, 128)),
    ],
)
def test_what_has_no_tiles_is_refused(function, shape):
    with pytest.raises(ValueError, match=r"tiles: \[.*\] is not \[n / 128, "):
        function(torch.zeros(shape))
