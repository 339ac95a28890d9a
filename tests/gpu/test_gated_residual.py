"""gated_residual and gated_residual_ on the GPU, in both instruction classes."""

from __future__ import annotations

import pytest
import torch
from gpu.support import WAYS, assert_rounded_once, assert_same_special, on, shifted

from fusestream.kernels_cuda import KernelPolicy, gated_residual, gated_residual_
from fusestream.kernels_cuda.ops.elementwise.gated_residual import reference

OFF = KernelPolicy.of("off")
WIDTHS = (1, 3, 8, 127, 128, 1536, 5120, 8200)
FORMS = ("none", "row", "batch", "frame", "ragged", "token", "one")
TYPES = {"h": torch.float16, "b": torch.bfloat16, "f": torch.float32}
of_two_bytes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def inputs(b, s, d, form, dtype=torch.float16, x_dtype=torch.float16, y_dtype=torch.float16):
    x = (torch.randn(b, s, d, device="cuda") * 2).to(x_dtype)
    y = torch.randn(b, s, d, device="cuda").to(y_dtype)
    counts = {"batch": 1, "one": 1, "frame": 3, "ragged": 4, "token": s}
    if form == "none":
        return x, y, None
    if form == "row":
        return x, y, torch.randn(d, device="cuda").to(dtype)
    wide = torch.randn(1 if form == "one" else b, counts[form], 6, d, device="cuda")
    return x, y, wide.to(dtype)[:, :, 2]


def exact(x, y, gate):
    return reference(*(None if t is None else t.double() for t in (x, y, gate)), False)


@pytest.mark.sanitize
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", WIDTHS)
def test_gated_residual(isa, d, form):
    for types in ("hhh", "hhf", "fhh", "fhf", "ffh", "hfh", "bbb", "bbf", "bfb", "bff"):
        x_type, y_type, gate_type = (TYPES[t] for t in types)
        x, y, gate = inputs(2, 21, d, form, gate_type, x_type, y_type)
        got = gated_residual(x, y, gate, policy=on(isa))
        want = exact(x, y, gate)
        assert got.dtype is x_type and got.is_contiguous()
        if x_type is torch.float32:
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
        else:
            assert_rounded_once(got, want, slack=1e-7, what=f"{d} {form} {types}", dtype=x_type)
        if types in ("hhh", "bbb"):
            assert torch.equal(got, gated_residual(x, y, gate, policy=OFF)), "not stock's residual stream, bit for bit"
        gated_residual_(x, y, gate, policy=on(isa))
        assert torch.equal(x, got)


@pytest.mark.parametrize("d", [8, 72, 127, 1536])
@pytest.mark.parametrize("layout", ["shifted", "gaps", "odd gaps", "every other row", "transposed batch"])
@of_two_bytes
def test_layouts(isa, d, layout, dtype):
    for form in ("none", "batch", "token"):
        x, y, gate = inputs(2, 11, d, form, dtype, dtype, dtype)
        x, y = WAYS[layout](x), WAYS[layout](y)
        gate = shifted(gate, 3) if layout == "shifted" and gate is not None else gate
        want = exact(x, y, gate)
        got = gated_residual(x, y, gate, policy=on(isa))
        assert_rounded_once(got, want, slack=1e-7, what=layout, dtype=dtype)
        gated_residual_(x, y, gate, policy=on(isa))
        assert torch.equal(x, got)


def test_gaps_stay(isa):
    room = torch.full((2, 11, 80), torch.nan, device="cuda", dtype=torch.float16)
    x = room[..., :72].copy_(torch.randn(2, 11, 72, device="cuda"))
    gated_residual_(x, torch.ones_like(x), torch.ones(72, device="cuda").half(), policy=on(isa))
    assert room[..., 72:].isnan().all() and x.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4, 64), (2, 0, 64), (2, 4, 0), (1, 1, 1), (5,), (2, 3, 4, 8), (7, 16)])
def test_other_shapes(isa, shape):
    x, y = (torch.randn(shape, device="cuda").half() for _ in range(2))
    assert torch.equal(gated_residual(x, y, policy=on(isa)), x + y)
    if len(shape) > 1:
        gate = torch.randn(shape[-1], device="cuda").half()
        assert torch.equal(gated_residual(x, y, gate, policy=on(isa)), torch.addcmul(x, y, gate))


@pytest.mark.parametrize("d", [65, 1536])
@of_two_bytes
def test_special_values(isa, d, dtype):
    x, y, gate = inputs(1, 12, d, "batch", dtype, dtype, dtype)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, 65504)):
        x[0, 2 * i, i], y[0, 2 * i + 1, i], gate[..., 10 + i] = value, value, value
    y[0, 7], x[0, 7] = 60000, 60000
    assert_same_special(gated_residual(x, y, gate, policy=on(isa)), gated_residual(x, y, gate, policy=OFF))
    assert_same_special(gated_residual(x, y, policy=on(isa)), x + y)


@pytest.mark.sanitize
@pytest.mark.parametrize("odd", [0, 1])
def test_every_rounding_to_bf16(isa, odd):
    """-0 + gate * 1 of floats just below, at and just above what lies between two bf16: all of them, NaN and infinities among them.
    By either kernel: with a column more an element is moved at a time."""
    upper = torch.arange(-32768, 32768, dtype=torch.int32)[:, None] << 16
    floats = upper + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    gate = torch.cat((floats.flatten(), floats.new_zeros(odd))).view(torch.float32)
    x, y = (torch.full((1, 1, len(gate)), value, device="cuda").bfloat16() for value in (-0.0, 1.0))
    got = gated_residual(x, y, gate.cuda(), policy=on(isa)).cpu().flatten()
    want = gate.bfloat16()
    is_nan = gate.isnan()
    assert torch.equal(got.isnan(), is_nan)
    assert torch.equal(got[~is_nan].view(torch.int16), want[~is_nan].view(torch.int16))


@pytest.mark.parametrize("d", [65, 1536])
def test_what_fp16_lacks_does_not_saturate_in_bf16(isa, d):
    x, y = (torch.full((1, 3, d), 60000.0, device="cuda").bfloat16() for _ in range(2))
    assert torch.equal(gated_residual(x, y, saturate=True, policy=on(isa)), x + y)


@pytest.mark.parametrize("d", [65, 1536])
def test_a_saturating_stream_stays_finite(isa, d):
    """By either kernel: rows of 1536 move 16 bytes at a time, those of 65 an element."""
    x, y, gate = inputs(1, 12, d, "batch")
    x[0, 0, :3], y[0, 0, :3], gate[..., :3] = torch.tensor([60000, -60000, 60000]), torch.tensor([60000, -60000, 1]), 1
    x[0, 1, 0] = torch.nan
    got = gated_residual(x, y, gate, saturate=True, policy=on(isa))
    assert got[0, 0, :3].tolist() == [65504, -65504, 60000] and got[0, 1, 0].isnan()
    assert torch.equal(got[0, 2:], gated_residual(x, y, gate, policy=on(isa))[0, 2:])
    gated_residual_(x, y, gate, saturate=True, policy=on(isa))
    assert_same_special(x, got)


def test_many_rows(isa):
    """More rows and batches than a grid dimension holds."""
    for b, s in ((1, 70000), (70000, 2)):
        x, y, gate = inputs(b, s, 8, "batch")
        assert torch.equal(gated_residual(x, y, gate, policy=on(isa)), torch.addcmul(x, y, gate))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_products_beyond_32_bits():
    x = torch.zeros(1, 2**21 + 5, 1032, device="cuda", dtype=torch.float16)
    y = torch.zeros(1, 1, 1032, device="cuda").half().expand_as(x)
    gate = torch.ones(1032, device="cuda").half()
    x[0, -1] = 3
    gated_residual_(x, y, gate, policy=on(None))
    assert (x[0, -1] == 3).all() and not x[0, :-1].any()
