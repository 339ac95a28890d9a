"""silu, gelu, silu_mul and gelu_mul on the GPU, in both instruction classes."""

from __future__ import annotations

import pytest
import torch
from gpu.support import STEPS, WAYS, assert_no_worse_than, assert_rounded_once, assert_same_special, on, padded_rows

from fusestream.kernels_cuda import KernelPolicy, gelu, gelu_mul, silu, silu_mul, silu_mul_
from fusestream.kernels_cuda.ops.elementwise.activations import reference

OFF = KernelPolicy.of("off")
KINDS = ("silu", "tanh", "erf", "quick")
TYPES = {"h": torch.float16, "b": torch.bfloat16, "f": torch.float32}
of_two_bytes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
SHAPES = ((1,), (8,), (3, 127), (2, 5, 1536), (1, 7, 5120), (2, 3, 8960), (4, 65, 8), (3, 1000, 3), (70000, 2, 8))


def plain(x, kind, **options):
    return silu(x, **options) if kind == "silu" else gelu(x, kind, **options)


def gated(gate, up, kind, **options):
    return silu_mul(gate, up, **options) if kind == "silu" else gelu_mul(gate, up, kind, **options)


def exact(x, kind):
    """float64; the exact GELU by erfc, which loses no digits for negative x."""
    if kind == "erf":
        return x.double() * 0.5 * torch.special.erfc(-x.double() * 0.5**0.5)
    return reference(x.double(), kind if kind == "silu" else f"gelu_{kind}", None)


def randn(*shape, size=3.0, dtype=torch.float16):
    return (torch.randn(shape, device="cuda") * size).to(dtype)


def flat(t):
    """One row, so that the peak is the tensor's."""
    return t.reshape(1, -1)


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@of_two_bytes
def test_plain(isa, shape, kind, dtype):
    x = randn(*shape, dtype=dtype)
    got = plain(x, kind, policy=on(isa))
    assert got.shape == x.shape and got.is_contiguous()
    assert_rounded_once(flat(got), flat(exact(x, kind)), what=f"{shape} {kind}", dtype=dtype)
    assert_no_worse_than(got, plain(x, kind, policy=OFF), exact(x, kind), f"{shape} {kind}")


@pytest.mark.parametrize("kind", KINDS)
@of_two_bytes
def test_every_half(isa, kind, dtype):
    """All 65536 values: as near as rounding allows, special values as torch's."""
    x = torch.arange(-32768, 32768, device="cuda", dtype=torch.int32).to(torch.int16).view(dtype)
    got = plain(x, kind, policy=on(isa))
    want = exact(x, kind)
    assert_same_special(got, plain(x, kind, policy=OFF), kind)
    keep = want.isfinite()
    error, (step, smallest) = (got.double() - want)[keep].abs(), STEPS[dtype]
    lost = 1e-15 if dtype is torch.bfloat16 else 0.0  # far below zero, where fp16 has none: the exponential's own error
    assert (error <= want[keep].abs() * (step + 3e-6) + smallest * 1.01 + lost).all(), kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["pair", "split", "interleaved", "views", "other half first"])
@pytest.mark.parametrize("shape", SHAPES)
@of_two_bytes
def test_gated(isa, shape, layout, kind, dtype):
    gate, up = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    arguments, options = {
        "pair": ((gate, up), {}),
        "split": ((torch.cat((gate, up), -1), None), {"layout": "split"}),
        "interleaved": ((torch.stack((gate, up), -1).flatten(-2), None), {"layout": "interleaved"}),
        "views": (torch.cat((gate, up), -1).chunk(2, -1), {}),
        "other half first": (torch.cat((up, gate), -1).chunk(2, -1)[::-1], {}),
    }[layout]
    want = exact(gate, kind) * up.double()
    got = gated(*arguments, kind, policy=on(isa), **options)
    assert got.shape == gate.shape and got.is_contiguous()
    assert_rounded_once(flat(got), flat(want), what=f"{shape} {layout} {kind}", dtype=dtype)
    assert_no_worse_than(got, gated(*arguments, kind, policy=OFF, **options), want, f"{shape} {layout} {kind}")
    scaled = gated(*arguments, kind, scale=2.0**-7, saturate=True, policy=on(isa), **options)
    assert_rounded_once(flat(scaled), flat(want * 2.0**-7), what="scaled", dtype=dtype)


@pytest.mark.parametrize("size", [64, 99])
def test_scale_and_saturate(isa, size):
    """UMT5's feed-forward: what overflows fp16 survives at a 1/64, and saturates if it still does not fit."""
    gate, up = randn(3, size, size=200), randn(3, size, size=400)
    gate[0, :4], up[0, :4] = 65504, torch.tensor([65504, -65504, torch.nan, torch.inf], device="cuda")
    want = exact(gate, "tanh") * up.double()
    assert want[1:].abs().max() > 65504
    for scale in (1.0, 1 / 64):
        got = gelu_mul(gate, up, "tanh", scale=scale, saturate=True, policy=on(isa))
        assert got.isinf().sum() == 0 and got.isnan().sum() == 1 and got[0, 2].isnan()
        keep = ~want.isnan()
        assert_rounded_once(got[keep][None], (want * scale).clamp(-65504, 65504)[keep][None], what=f"{scale}")
    loose = gelu_mul(gate, up, "tanh", scale=1 / 64, policy=on(isa))
    assert loose[0, 0] == torch.inf and loose[1:].isfinite().all()


@pytest.mark.parametrize("layout", ["shifted", "gaps", "odd gaps", "turned", "four dimensions"])
def test_layouts(isa, layout):
    ways = {**WAYS, "four dimensions": lambda t: padded_rows(t.view(2, 6, 4, 32), 8)[:, :, ::2]}
    gate, up = ways[layout](randn(2, 6, 128)), ways[layout](randn(2, 6, 128))
    assert_rounded_once(flat(silu(gate, policy=on(isa))), flat(exact(gate, "silu")), what=layout)
    got = silu_mul(gate, up, policy=on(isa))
    assert_rounded_once(flat(got), flat(exact(gate, "silu") * up.double()), what=layout)


@pytest.mark.parametrize("start", [8, 3])
@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_into_a_part_of_a_buffer(isa, layout, start):
    """By either kernel: a part that begins at a multiple of 16 bytes, and one that does not. The rest stays as it was."""
    both = randn(2, 6, 128)
    room = torch.full((2, 6, 96), 7.0, device="cuda", dtype=torch.float16)
    out = room[..., start : start + 64]
    silu_mul_(out, both, layout=layout, saturate=True, policy=on(isa))
    assert torch.equal(out, silu_mul(both, layout=layout, saturate=True, policy=on(isa)))
    out.fill_(7)
    assert (room == 7).all()


@pytest.mark.parametrize("layout", ["every other column", "turned", "one column"])
def test_into_elements_apart(isa, layout):
    """Neither into places between them."""
    width = 1 if layout == "one column" else 64
    room = torch.full((128, 128), 7.0, device="cuda", dtype=torch.float16)
    out = {"every other column": room[:12, ::2], "turned": room[:64, :12].t(), "one column": room[:12, 5:6]}[layout]
    gate, up = randn(12, width), randn(12, width)
    silu_mul_(out, gate, up, policy=on(isa))
    assert torch.equal(out, silu_mul(gate, up, policy=on(isa)))
    out.fill_(7)
    assert (room == 7).all()


@pytest.mark.parametrize("types", ["hhf", "fhh", "hfh", "fff", "bbf", "bfb", "bff"])
def test_types(isa, types):
    gate_type, up_type, out_type = (TYPES[t] for t in types)
    rtol = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 1e-5}[out_type]
    gate, up = randn(5, 72).to(gate_type), randn(5, 72).to(up_type)
    want = exact(gate, "silu") * up.double()
    got = silu_mul(gate, up, out_dtype=out_type, policy=on(isa))
    assert got.dtype is out_type
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=1e-6)
    got = silu(gate, out_dtype=out_type, policy=on(isa))
    torch.testing.assert_close(got.double(), exact(gate, "silu"), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("size", [16, 17])
@of_two_bytes
def test_special_values(isa, size, dtype):
    x, up = randn(4, size, dtype=dtype), randn(4, size, dtype=dtype)
    x[0, :3], x[1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf], device="cuda"), 65504
    up[2, :3], up[3, 4:7] = torch.tensor([torch.nan, torch.inf, -torch.inf], device="cuda"), 0
    x[2, :3] = torch.tensor(
        [1.0, -1.0, 2.0], device="cuda"
    )  # not what torch alone rounds to 0: infinity times that is NaN
    x[3, 4:7] = torch.tensor([torch.nan, torch.inf, -torch.inf], device="cuda")
    for kind in KINDS:
        assert_same_special(gated(x, up, kind, policy=on(isa)), gated(x, up, kind, policy=OFF), kind)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_products_beyond_32_bits():
    x = torch.zeros(2**31 + 4096, device="cuda", dtype=torch.float16)
    x[-5:] = torch.tensor([1, 2, 3, 4, 5], device="cuda")
    got = silu(x, policy=on(None))
    assert_rounded_once(got[None, -4096:], exact(x[None, -4096:], "silu"))
    assert not got[:-5].any()
    apart = x.as_strided((3, 64), (2**30, 1))
    assert_rounded_once(silu(apart, policy=on(None)), exact(apart, "silu"))
