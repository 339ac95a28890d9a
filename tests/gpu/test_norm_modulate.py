"""norm_modulate on the GPU, in both instruction classes."""

from __future__ import annotations

import pytest
import torch
from gpu.support import WAYS, assert_no_worse_than, assert_rounded_once, assert_same_special, on, shifted

from fusestream.kernels_cuda import STANDARD, KernelPolicy, norm_modulate
from fusestream.kernels_cuda.ops.norm.norm_modulate import reference

EPS = 1e-6
OFF = KernelPolicy.of("off")
WIDTHS = (1, 3, 8, 127, 128, 1536, 3072, 5120, 8192, 8200, 20000)
FORMS = ("none", "batch", "frame", "token", "one")
of_two_bytes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def exact(x, scale=None, shift=None, weight=None, bias=None, kind="layer"):
    """The reference in float64."""
    wide = [None if t is None else t.double() for t in (x, scale, shift, weight, bias)]
    return reference(*wide, EPS, kind, None)


def row(form, b, s, d, dtype, frames):
    """A modulation operand: a chunk of a wider tensor, as the models hand it over."""
    counts = {"batch": 1, "one": 1, "frame": frames, "token": s}
    if form == "none":
        return None
    wide = torch.randn(1 if form == "one" else b, counts[form], 6, d, device="cuda") * 0.5
    return wide.to(dtype)[:, :, 2]


def inputs(b, s, d, form, dtype=torch.float16, frames=3, x_dtype=torch.float16):
    x = (torch.randn(b, s, d, device="cuda") * 2 + 0.5).to(x_dtype)
    return x, *(row(form, b, s, d, dtype, frames) for _ in range(2))


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", WIDTHS)
@of_two_bytes
def test_norm_modulate(isa, d, form, kind, dtype):
    for of_rows in (dtype, torch.float32):
        x, scale, shift = inputs(2, 21, d, form, of_rows, x_dtype=dtype)
        got = norm_modulate(x, scale, shift, eps=EPS, kind=kind, policy=on(isa))
        want = exact(x, scale, shift, kind=kind)
        assert_rounded_once(got, want, what=f"{d} {form} {kind} {of_rows}", dtype=dtype)
        if of_rows is dtype:
            eager = norm_modulate(x, scale, shift, eps=EPS, kind=kind, policy=OFF)
            assert_no_worse_than(got, eager, want, what=f"{d} {form} {kind}", peak=dtype is torch.float16)


@pytest.mark.parametrize("d", [64, 100, 1536, 9000])
def test_bf16_rows_become_fp16(isa, d):
    """What a product of halves takes: a result of norms fits, whatever the stream has grown to."""
    x, scale, shift = inputs(2, 21, d, "batch", torch.float32, x_dtype=torch.bfloat16)
    got = norm_modulate(x * 2.0**40, scale, shift, eps=EPS, out_dtype=torch.float16, policy=on(isa))
    assert_rounded_once(got, exact(x * 2.0**40, scale, shift), what=f"{d}")


@pytest.mark.parametrize("d", [64, 100, 1536, 4096])
@pytest.mark.parametrize("affine", ["weight", "bias", "both", "both and modulation", "mixed types"])
@of_two_bytes
def test_weight_and_bias(isa, d, affine, dtype):
    x, scale, shift = inputs(1, 37, d, "batch", dtype, x_dtype=dtype)
    weight, bias = (torch.randn(d, device="cuda").to(dtype) for _ in range(2))
    weight, bias = (None if affine == "bias" else weight), (None if affine == "weight" else bias)
    if affine == "mixed types":
        weight, bias = weight.float(), bias.float()
    if affine not in ("both and modulation", "mixed types"):
        scale = shift = None
    for kind in ("layer", "rms"):
        got = norm_modulate(x, scale, shift, weight, bias, eps=EPS, kind=kind, policy=on(isa))
        assert_rounded_once(got, exact(x, scale, shift, weight, bias, kind), what=f"{d} {affine} {kind}", dtype=dtype)


@pytest.mark.parametrize("d", [40, 99, 4096])
def test_float_stream(isa, d):
    """T5's way: the residual stream is fp32, the result fp16."""
    x, *_ = inputs(1, 50, d, "none", x_dtype=torch.float32)
    weight = torch.randn(d, device="cuda").half()
    got = norm_modulate(x, weight=weight, eps=EPS, kind="rms", out_dtype=torch.float16, policy=on(isa))
    assert_rounded_once(got, exact(x, weight=weight, kind="rms"))


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [1, 72, 127, 1536, 5120])
@pytest.mark.parametrize("layout", ["plain", "shifted", "gaps", "odd gaps", "every other row", "transposed batch"])
@of_two_bytes
def test_layouts(isa, d, layout, dtype):
    """Wherever rows lie and wherever they begin."""
    x, scale, shift = inputs(2, 11, d, "batch", dtype, x_dtype=dtype)
    x = WAYS[layout](x)
    if layout == "shifted":
        scale, shift = (shifted(t, 3) for t in (scale, shift))
    got = norm_modulate(x, scale, shift, eps=EPS, policy=on(isa))
    assert_rounded_once(got, exact(x, scale, shift), what=layout, dtype=dtype)
    assert got.is_contiguous()


@pytest.mark.sanitize
def test_a_row_expanded_to_other_frames(isa):
    x, scale, shift = inputs(2, 32, 256, "frame", frames=4)
    scale = scale[:, :1].expand(2, 8, 256)
    got = norm_modulate(x, scale, shift, eps=EPS, policy=on(isa))
    assert_rounded_once(got, exact(x, scale, shift))


def test_video_shapes(isa):
    """[batch, frames, height * width, d] with one modulation row per frame."""
    x = torch.randn(2, 5, 12, 256, device="cuda").half()
    scale, shift = (torch.randn(2, 5, 1, 256, device="cuda").half() for _ in range(2))
    got = norm_modulate(x, scale, shift, eps=EPS, policy=on(isa))
    assert got.shape == x.shape
    want = exact(x) * (1 + scale.double()) + shift.double()
    assert_rounded_once(got, want)


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(0, 4, 64), (2, 0, 64), (2, 4, 0), (1, 1, 1), (1, 1, 8), (3, 1, 5120)])
def test_empty_and_tiny(isa, shape):
    x = torch.randn(shape, device="cuda").half()
    got = norm_modulate(x, eps=EPS, policy=on(isa))
    assert got.shape == x.shape
    if x.numel():
        assert_rounded_once(got, exact(x))


@pytest.mark.parametrize("d", [127, 1536, 5120])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_outliers(isa, d, kind):
    """Values near fp16's largest: squares and sums stay finite, and stay right."""
    x = torch.randn(1, 16, d, device="cuda").half()
    x[0, ::2, ::7] = 65504
    x[0, 1::4] = -65000
    got = norm_modulate(x, eps=EPS, kind=kind, policy=on(isa))
    # A constant row has nothing left after the mean but rounding, in every implementation; judge the others.
    varied = exact(x, kind=kind)
    rows = varied.abs().amax(-1) > 0.5
    assert_rounded_once(got[rows], varied[rows], slack=2e-5)
    assert got.isfinite().all()


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 60000.0, -65504.0])
@pytest.mark.parametrize("d", [7, 1536, 5120, 8192])
@of_two_bytes
def test_constant_rows(isa, d, value, dtype):
    """A constant row has exactly its own mean: nothing is left to be blown up by a standard deviation of nothing."""
    x = torch.full((1, 5, d), value, device="cuda").to(dtype)
    shift = torch.randn(1, 1, d, device="cuda").to(dtype)
    got = norm_modulate(x, shift * 3, shift, eps=EPS, policy=on(isa))
    assert torch.equal(got, shift.expand_as(got))


@pytest.mark.parametrize("d", [65, 1536, 8200])
@of_two_bytes
def test_special_values(isa, d, dtype):
    x, scale, shift = inputs(1, 12, d, "batch", dtype, x_dtype=dtype)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[0, 2 * i, i] = value
    scale[..., 5], shift[..., 6] = torch.inf, torch.nan
    # Stock is the judge of LayerNorm. torch's fused RMSNorm is none: around one Inf it makes a whole row NaN, but only
    # where the row is no multiple of four. There the plain arithmetic is, which the reference runs on the CPU.
    for kind in ("layer", "rms"):
        device, judge = ("cuda", OFF) if kind == "layer" else ("cpu", STANDARD)
        x_, scale_, shift_ = (t.to(device) for t in (x, scale, shift))
        got = norm_modulate(x, scale, shift, eps=EPS, kind=kind, policy=on(isa))
        like = norm_modulate(x_, scale_, shift_, eps=EPS, kind=kind, policy=judge)
        assert_same_special(got, like.cuda(), kind)


def test_many_rows(isa):
    """More blocks than one grid dimension holds in y, and a row count that does not divide."""
    x = torch.randn(70000, 3, 16, device="cuda").half()
    scale = torch.randn(70000, 1, 16, device="cuda").half()
    got = norm_modulate(x, scale, eps=EPS, policy=on(isa))
    assert_rounded_once(got, exact(x, scale))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_products_beyond_32_bits():
    """More than 2^31 elements, and strides whose products exceed 32 bits."""
    x = torch.zeros(1, 2**21 + 5, 1032, device="cuda", dtype=torch.float16)
    x[0, -1] = torch.randn(1032, device="cuda").half()
    got = norm_modulate(x, eps=EPS, policy=on(None))
    assert_rounded_once(got[:, -1:], exact(x[:, -1:]))
    assert not got[0, :-1].any()
    del got
    apart = x.view(-1)[: 2 * (2**30) + 4096].as_strided((1, 3, 1032), (0, 2**30, 1))
    apart[0, 2] = torch.randn(1032, device="cuda").half()
    assert_rounded_once(norm_modulate(apart, eps=EPS, policy=on(None)), exact(apart))
