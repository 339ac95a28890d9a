"""channel_rms_silu on the GPU, in both instruction classes."""

from __future__ import annotations

import pytest
import torch
from gpu.support import LAYOUTS, assert_no_worse_than, assert_rounded_once, assert_same_special, laid_out, on, shifted

from fusestream.kernels_cuda import KernelPolicy, channel_rms_silu
from fusestream.kernels_cuda.ops.norm.channel_rms_silu import reference

OFF = KernelPolicy.of("off")
WIDTHS = (1, 3, 8, 13, 64, 96, 160, 192, 256, 320, 384, 512, 640, 1024, 1280, 2304, 5000)


def inputs(layout, b, c, *image, dtype=torch.float16):
    x = (torch.randn(b, c, *image, device="cuda") * 2 + 0.25).half()
    weight, bias = (torch.randn(c, *[1] * len(image), device="cuda").to(dtype) for _ in range(2))
    return laid_out(x, layout), weight, bias


def exact(x, weight, bias=None, silu=True):
    return reference(x.double(), weight.double(), None if bias is None else bias.double(), silu)


def check(x, weight, bias, silu, isa, what=""):
    got = channel_rms_silu(x, weight, bias, silu=silu, policy=on(isa))
    assert got.stride() == torch.empty_like(x).stride()
    want = exact(x, weight, bias, silu)
    # Errors are judged against the peak of each pixel: channels last.
    assert_rounded_once(got.movedim(1, -1), want.movedim(1, -1), what=what)
    return got, want


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", WIDTHS)
def test_widths(isa, c, layout):
    for image in ((3, 8, 24), (5, 7, 3)):  # whole packs of pixels, and not
        for with_bias, silu, dtype in ((False, True, torch.float16), (True, False, torch.float32)):
            x, weight, bias = inputs(layout, 2, c, *image, dtype=dtype)
            bias = bias if with_bias else None
            got, want = check(x, weight, bias, silu, isa, what=f"{c} {layout} {image} bias={with_bias}")
            if dtype is torch.float16:
                eager = channel_rms_silu(x, weight, bias, silu=silu, policy=OFF)
                assert_no_worse_than(got, eager, want, what=f"{c} {layout} {image}")


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", [1, 13, 96, 640])
@pytest.mark.parametrize("way", ["plain", "shifted", "frames", "channels", "batch", "shifted weight"])
def test_ways_to_lie(isa, c, layout, way):
    if c == 1 and layout == "last":
        pytest.skip("one channel is in either layout, and torch takes it for channels-first")
    x, weight, bias = inputs(layout, 2, c, 3, 4, 8)
    if way == "shifted":
        x = shifted(x.movedim(1, -1), 3).movedim(-1, 1) if layout == "last" else shifted(x, 3)
    elif way == "frames":
        x = laid_out(torch.randn(2, c, 5, 4, 8, device="cuda").half(), layout)[:, :, 1:4]
    elif way == "channels":
        x = laid_out(torch.randn(2, c + 8, 3, 4, 8, device="cuda").half(), layout)[:, 8:]
    elif way == "batch":
        x = laid_out(torch.randn(5, c, 3, 4, 8, device="cuda").half(), layout)[::2]
    elif way == "shifted weight":
        weight, bias = shifted(weight), shifted(bias, 2)
    check(x, weight, bias, True, isa, what=way)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(0, 8, 4, 4), (2, 8, 0, 4), (1, 1, 1, 1), (3, 96, 1, 1), (2, 96), (2, 16, 5), (1, 96, 1, 8)]
)
def test_empty_and_tiny(isa, shape, layout):
    x, weight, bias = inputs(layout, *shape)
    got = channel_rms_silu(x, weight, bias, policy=on(isa))
    assert got.shape == x.shape
    if x.numel():
        check(x, weight, bias, True, isa)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_pixels_and_batches(isa, layout):
    """Enough pixels that a lane takes several, with an end that does not divide; and many batches."""
    check(*inputs(layout, 1, 96, 3, 331, 1000)[:2], None, True, isa)
    check(*inputs(layout, 70001, 8, 2, 4), True, isa)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", [13, 96, 1024])
def test_outliers(isa, c, layout):
    x, weight, _ = inputs(layout, 1, c, 4, 8, 8)
    x[:, ::3, 1], x[:, :, 2] = 65504, -65000
    got, _ = check(x, weight * 0.1, None, True, isa)
    assert got.isfinite().all()
    x[:, :, 3] = 0
    x[:, 0, 3] = 6e-8  # the smallest fp16: its pixel has a length, and is normalised
    check(x, weight, None, False, isa)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", [13, 96, 512])
def test_special_values(isa, c, layout):
    x, weight, bias = inputs(layout, 1, c, 4, 8, 8)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[0, i, i, i] = value
    weight[5], bias[6] = torch.inf, torch.nan
    for silu in (True, False):
        assert_same_special(
            channel_rms_silu(x, weight, bias, silu=silu, policy=on(isa)),
            channel_rms_silu(x, weight, bias, silu=silu, policy=OFF),
            f"{c} {layout} silu={silu}",
        )
    zero = torch.zeros_like(x)
    assert not channel_rms_silu(zero, torch.ones_like(weight), policy=on(isa)).any()


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_beyond_32_bits(layout):
    shape = (1, 96, 2**21, 11)  # more than 2^31 elements
    x = torch.zeros(shape if layout == "first" else (1, *shape[2:], 96), device="cuda", dtype=torch.float16)
    x = x if layout == "first" else x.movedim(-1, 1)
    x[:, :, -1] = torch.randn(1, 96, 11, device="cuda").half()
    weight = torch.randn(96, device="cuda").half()
    got = channel_rms_silu(x, weight, policy=on(None))
    assert_rounded_once(got[:, :, -1].movedim(1, -1), exact(x[:, :, -1], weight).movedim(1, -1))
    assert not got[:, :, :-1].any()
