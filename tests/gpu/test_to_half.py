"""to_half on the GPU, in both instruction classes."""

from __future__ import annotations

import pytest
import torch
from gpu.support import assert_no_worse_than, assert_rounded_once, on, shifted

from fusestream.kernels_cuda import KernelPolicy, to_half
from fusestream.kernels_cuda.ops.quant.to_half import TYPES
from fusestream.kernels_cuda.ops.views.half_range import LARGEST

OFF = KernelPolicy.of("off")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = list(TYPES)


def stored(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def moved(t, offset):
    """`shifted`, for types that copy_ may not know."""
    room = torch.zeros(t.numel() * t.element_size() + 64, dtype=torch.uint8, device=t.device)
    start = offset * t.element_size()
    room[start : start + t.numel() * t.element_size()] = t.contiguous().view(-1).view(torch.uint8)
    return room[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)


def exact(x, scale=None):
    value = x.float().double()
    if scale is not None:
        value = value * (scale.double() if scale.numel() == 1 else scale.double().reshape(-1, *[1] * (x.ndim - 1)))
    return value.clamp(-LARGEST, LARGEST)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", FP8)
def test_every_fp8_code(isa, dtype):
    """In each place of a pack, and element by element; signs of zero too."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(8) + torch.arange(8, dtype=torch.uint8).repeat_interleave(256)
    for offset in (0, 1):
        x = moved(codes.cuda().view(dtype), offset)
        got = to_half(x, policy=on(isa)).cpu()
        want = codes.view(dtype).to(torch.float32).half()
        assert torch.equal(got.isnan(), want.isnan())
        known = ~want.isnan()
        assert torch.equal(got[known].view(torch.int16), want[known].view(torch.int16))
        scaled = to_half(x, torch.tensor([0.37], device="cuda"), policy=on(isa)).cpu()
        wanted = codes.view(dtype).to(torch.float32) * torch.tensor(0.37)
        wanted = torch.where(wanted.isfinite(), wanted.clamp(-LARGEST, LARGEST), wanted).half()
        assert torch.equal(scaled.isnan(), wanted.isnan())
        known = ~wanted.isnan()
        assert torch.equal(scaled[known].view(torch.int16), wanted[known].view(torch.int16))


def test_every_bf16(isa):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    got, wide = to_half(x, policy=on(isa)), x.float()
    want = torch.where(wide.isfinite(), wide.clamp(-LARGEST, LARGEST), wide).half()
    assert torch.equal(got.isnan(), want.isnan())
    known = ~want.isnan()
    assert torch.equal(got[known].view(torch.int16), want[known].view(torch.int16))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (4099,), (3, 5), (37, 64), (5, 8192), (2, 3, 5, 8), (1030, 24)])
def test_shapes(isa, dtype, shape):
    x = stored(*shape, dtype=dtype)
    for scale in (None, torch.tensor(0.3, device="cuda"), torch.rand(shape[0], device="cuda") * 9):
        for unaligned in (False, True):
            for into in (False, True):
                source = moved(x, 1) if unaligned else x
                by = moved(scale, 3) if scale is not None and unaligned else scale
                out = torch.full(shape, torch.nan, device="cuda", dtype=torch.float16) if into else None
                out = shifted(out, 3) if out is not None and unaligned else out
                got = to_half(source, by, out=out, policy=on(isa))
                assert out is None or got is out
                assert_rounded_once(got, exact(x, scale), slack=2.0**-22, what=f"{shape} {dtype} {unaligned} {into}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_destination_is_filled_and_nothing_else(isa, dtype):
    """The pager's way: a view into a larger buffer, on a stream of its own, without allocation."""
    room = torch.full((5000,), torch.nan, device="cuda", dtype=torch.float16)
    for start, count in ((0, 4096), (64, 1000), (3, 777), (8, 9)):
        room.fill_(torch.nan)
        x = stored(count, dtype=dtype)
        to_half(x, out=torch.empty_like(room)[start : start + count], policy=on(isa))  # make the plan
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(side):
            to_half(x, out=room[start : start + count], policy=on(isa))
        assert torch.cuda.memory_allocated() == before
        side.synchronize()
        assert_rounded_once(room[start : start + count], exact(x))
        assert room[:start].isnan().all()
        assert room[start + count :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cols", "room"), [(64, 72), (64, 67), (13, 16), (1, 9)])
def test_rows_apart(isa, dtype, cols, room):
    x = stored(300, room, dtype=dtype)[:, :cols]
    for scale in (None, torch.rand(300, 1, device="cuda")):
        got = to_half(x, scale, policy=on(isa))
        assert got.is_contiguous()
        assert_rounded_once(got, exact(x, scale), slack=2.0**-22)


@pytest.mark.parametrize("offset", [0, 1])
def test_out_of_range(isa, offset):
    x = torch.tensor([65504, 65519, 65520, 1e6, 3e38, -65536, -3e38, torch.inf, -torch.inf, torch.nan, -0.0] * 9).cuda()
    for dtype in (torch.float32, torch.bfloat16):
        source = moved(x.to(dtype), offset)
        got = to_half(source, policy=on(isa))
        wide = source.float()
        want = torch.where(wide.isfinite(), wide.clamp(-LARGEST, LARGEST), wide).half()
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        scaled = to_half(source, torch.tensor(1e30, device="cuda"), policy=on(isa))
        assert torch.equal(scaled.isinf(), wide.isinf())
        assert torch.equal(scaled.isnan(), wide.isnan())
    e4m3 = moved(torch.tensor([448, -448, 1, 0] * 8).cuda().to(torch.float8_e4m3fn), offset)
    got = to_half(e4m3, torch.tensor(1e37, device="cuda"), policy=on(isa))  # the product overflows fp32 too
    assert got[:4].tolist() == [LARGEST, -LARGEST, LARGEST, 0]
    got = to_half(e4m3, torch.tensor(torch.inf, device="cuda"), policy=on(isa))
    assert got[:2].tolist() == [torch.inf, -torch.inf]
    assert got[3].isnan()


@pytest.mark.parametrize("dtype", FP8)
def test_no_worse_than_stock(isa, dtype):
    x, scale = stored(512, 512, dtype=dtype), torch.rand(512, 1, device="cuda") * 0.01
    assert_no_worse_than(to_half(x, scale, policy=on(isa)), to_half(x, scale, policy=OFF), exact(x, scale))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_products_beyond_32_bits():
    x = torch.zeros(2**21 + 3, 1032, device="cuda", dtype=torch.uint8).view(torch.float8_e5m2)
    x[-1] = stored(1032, dtype=torch.float8_e5m2)
    for scale in (None, torch.full((x.shape[0],), 0.5, device="cuda")):
        got = to_half(x, scale, policy=on(None))
        assert_rounded_once(got[-1:], exact(x[-1:], None if scale is None else scale[-1:]))
        assert not got[:-1].any()
        del got
