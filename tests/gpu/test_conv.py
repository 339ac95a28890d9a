"""conv3d, conv2d and upsample_conv2d on the GPU, in both instruction classes and both ways to accumulate."""

from __future__ import annotations

import os

import pytest
import torch
from gpu.support import HALF_STEP, SMALLEST, SUM_STEP, laid_out, on, tried, until_chosen
from gpu.support import assert_sums as check
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch.nn import functional

from fusestream.kernels_cuda import (
    LEDGER,
    KernelPolicy,
    KernelRefused,
    conv2d,
    conv3d,
    fold_upsample,
    upsample_conv2d,
)
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card
from fusestream.kernels_cuda.ops.conv import conv as op
from fusestream.kernels_cuda.ops.conv import conv_flat, conv_torch, upsample_conv
from fusestream.kernels_cuda.ops.conv.conv_operands import Operands, compute
from fusestream.kernels_cuda.ops.matmul.linear_operands import ACTIVATIONS

EXAMPLES = int(os.environ.get("FUSESTREAM_EXAMPLES") or 2500) // 16
# Channels of the Wan 2.1 and 2.2 VAEs.
CHANNELS = (3, 12, 16, 48, 96, 160, 192, 256, 320, 384, 512, 640, 1024)


def video(*shape):
    return laid_out(torch.randn(*shape, device="cuda").half(), "last")


def weights(n, c, *taps):
    return laid_out((torch.randn(n, c, *taps, device="cuda") * (c * taps[0]) ** -0.5).half(), "last")


def exactly(tensors, options):
    """float64, and the sum of magnitudes behind each element: what rounding errors grow with."""
    wide = [None if t is None else t.double() for t in tensors]
    sizes = [None if t is None else t.abs() for t in (*wide[:4], None)]
    return compute(Operands.of(tuple(wide), options)), compute(Operands.of(tuple(sizes), ("none", *options[1:])))


def with_tactic(tactic, tensors, options, isa):
    """One way to cut the work, whatever the rule would choose."""
    call = Call("conv", tensors, options, on(isa, tactic.precision))
    assert next(op.obstacles(call), None) is None
    return op.plan(call, card(0, isa), tactic)(*tensors)


def all_tactics(n, down, stride, precision):
    found = [
        way for way in op.cuts_for(n, op.CUTS[(down, down), stride], False, precision) if way.precision == precision
    ]
    thin = stride == 1 and precision == "precise" and n <= 40
    return [*found, op.Tactic("thin", "precise")] if thin else found


@st.composite
def configurations(draw):
    down = draw(st.sampled_from([3, 3, 1]))
    stride = draw(st.sampled_from([1, 1, 2])) if down == 3 else 1
    taps = draw(st.sampled_from([1, 1, 3, 2])) if stride == 1 else 1
    before = draw(st.integers(0, taps - 1)) if draw(st.booleans()) else taps - 1
    t = draw(st.integers(max(1, taps - before), 4))
    return {
        "sizes": (draw(st.integers(1, 2)), t, draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        "c": draw(st.one_of(st.sampled_from([3, 8, 12, 16, 24, 32, 40, 64, 96]), st.integers(1, 12))),
        "n": draw(st.one_of(st.sampled_from([1, 3, 8, 12, 16, 24, 48, 96, 104, 192, 200]), st.integers(1, 40))),
        "down": down,
        "stride": stride,
        "taps": taps,
        "time_stride": draw(st.sampled_from([1, 1, 2])),
        "before": before,
        "cached": draw(st.integers(0, before)),
        "padding": draw(st.sampled_from([None, (0, 1, 0, 1), (2, 0, 1, 2), (0, 0, 0, 0)])) if down == 3 else None,
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "bias": draw(st.sampled_from([None, torch.float16, torch.float32])),
        "residual": draw(st.booleans()),
        "layout": draw(st.sampled_from(["plain", "frames", "channels", "rows"])),
    }


def operands_of(c):
    """Tensors with NaN wherever a kernel has no business, and options."""
    b, t, h, w = c["sizes"]
    left, right, top, bottom = c["padding"] or [c["down"] // 2] * 4
    # Enough pixels for the taps.
    h, w = max(h, c["down"] - top - bottom), max(w, c["down"] - left - right)
    x, cache = video(b, c["c"], t, h, w), video(b, c["c"], c["cached"], h, w) if c["cached"] else None
    if c["layout"] == "frames" and cache is not None:
        both = torch.cat((cache, x), 2).contiguous(memory_format=torch.channels_last_3d)
        cache, x = both[:, :, : c["cached"]], both[:, :, c["cached"] :]
    elif c["layout"] in ("channels", "rows"):
        more, below = (8, 0) if c["layout"] == "channels" else (0, 3)
        room = laid_out(torch.full((b, c["c"] + more, t, h + below, w), torch.nan, device="cuda").half(), "last")
        if c["c"] % 8 == 0 or not more:
            x = room[:, more:, :, below:].copy_(x)
    weight = weights(c["n"], c["c"], c["taps"], c["down"], c["down"])
    bias = None if c["bias"] is None else torch.randn(c["n"], device="cuda").to(c["bias"])
    options = (c["activation"], c["time_stride"], c["before"], c["stride"], left, right, top, bottom)
    shape = Operands.of((x, weight, bias, cache, None), options).shape
    return (x, weight, bias, cache, video(*shape) if c["residual"] else None), options


@given(configurations())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_random_configurations(isa, precision, c):
    tensors, options = operands_of(c)
    exact, sizes = exactly(tensors, options)
    for tactic in all_tactics(c["n"], c["down"], c["stride"], precision):
        got = with_tactic(tactic, tensors, options, isa)
        assert got.shape == exact.shape and got.stride() == exact.stride()
        check(got, exact, sizes, tactic.precision, f"{tactic} {c}")


@pytest.mark.sanitize
@pytest.mark.parametrize("cached", [0, 1, 2])
@pytest.mark.parametrize(("down", "stride"), [(3, 1), (3, 2), (1, 1)])
def test_ends_and_corners(isa, precision, down, stride, cached):
    """Small, with everything on: what the sanitizers see."""
    taps = 3 if stride == 1 else 1
    x, cache = video(1, 40, 2, 9, 19), video(1, 40, cached, 9, 19) if cached and taps > 1 else None
    weight, bias = weights(104, 40, taps, down, down), torch.randn(104, device="cuda")
    options = ("silu", 1, taps - 1, stride, down // 2, down // 2, down // 2, down // 2)
    residual = video(*Operands.of((x, weight, bias, cache, None), options).shape)
    tensors = (x, weight, bias, cache, residual)
    exact, sizes = exactly(tensors, options)
    for tactic in all_tactics(8, down, stride, precision):
        check(with_tactic(tactic, tensors, options, isa), exact, sizes, tactic.precision, f"{tactic}")


@pytest.mark.parametrize("n", [3, 16, 96, 1024])
@pytest.mark.parametrize("c", CHANNELS)
def test_channels_of_the_autoencoders(isa, precision, c, n):
    x, weight, bias = video(1, c, 2, 10, 18), weights(n, c, 3, 3, 3), torch.randn(n, device="cuda").half()
    options = ("none", 1, 2, 1, 1, 1, 1, 1)
    exact, sizes = exactly((x, weight, bias, None, None), options)
    check(conv3d(x, weight, bias, policy=on(isa, precision)), exact, sizes, precision, f"{c} to {n}")


# (channels in, out, frames, rows, columns) of the 3x3x3 convolutions of the Wan 2.1 and 2.2 VAEs.
def wan_21(h, w):
    """An image of h x w: decoder, then what only the encoder has."""
    return [
        (16, 384, 1, h // 8, w // 8),
        (384, 384, 1, h // 8, w // 8),
        (192, 384, 2, h // 4, w // 4),
        (384, 384, 2, h // 4, w // 4),
        (192, 192, 4, h // 2, w // 2),
        (96, 96, 4, h, w),
        (96, 3, 4, h, w),
        (3, 96, 4, h, w),
        (96, 192, 4, h // 2, w // 2),
        (384, 32, 1, h // 8, w // 8),
    ]


def wan_22(h, w):
    return [
        (48, 1024, 1, h // 16, w // 16),
        (1024, 1024, 2, h // 8, w // 8),
        (1024, 512, 4, h // 4, w // 4),
        (512, 256, 4, h // 2, w // 2),
        (256, 12, 4, h // 2, w // 2),
        (12, 160, 4, h // 2, w // 2),
        (160, 320, 4, h // 4, w // 4),
        (320, 640, 2, h // 8, w // 8),
        (640, 96, 1, h // 16, w // 16),
    ]


REAL = [*wan_21(480, 832), *wan_21(720, 1280), *wan_22(480, 832), *wan_22(704, 1280)]


@pytest.mark.parametrize("chunk", ["first", "one frame", "with cache"])
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_real_shapes(isa, precision, sizes, chunk):
    """The whole result is computed; strips of it are judged, at both ends and in the middle."""
    c, n, t, h, w = sizes
    t = 1 if chunk == "one frame" else t
    x, weight, bias = video(1, c, t, h, w), weights(n, c, 3, 3, 3), torch.randn(n, device="cuda").half()
    cache = video(1, c, 2, h, w) if chunk == "with cache" else None
    got = conv3d(x, weight, bias, cache=cache, policy=on(isa, precision))
    for y in (0, h // 2 - 3, h - 4):
        above, below = min(1, y), min(1, h - y - 4)
        strip = slice(y - above, y + 4 + below)
        tensors = x[..., strip, :], weight, bias, None if cache is None else cache[..., strip, :], None
        exact, magnitudes = exactly(tensors, ("none", 1, 2, 1, 1, 1, 1 - above, 1 - below))
        check(got[..., y : y + 4, :], exact, magnitudes, precision, f"rows from {y}")


@pytest.mark.parametrize("c", [16, 96, 384])
@pytest.mark.parametrize(("t", "cached"), [(1, 2), (4, 2), (3, 0)])
def test_convolutions_of_time(isa, precision, c, t, cached):
    """Upsampling doubles channels over three frames; downsampling steps by two over one cached frame."""
    x, cache = video(1, c, t, 12, 20), video(1, c, cached, 12, 20) if cached else None
    weight, bias = weights(2 * c, c, 3, 1, 1), torch.randn(2 * c, device="cuda")
    exact, sizes = exactly((x, weight, bias, cache, None), ("none", 1, 2, 1, 0, 0, 0, 0))
    check(conv3d(x, weight, bias, cache=cache, policy=on(isa, precision)), exact, sizes, precision, "up")
    if t == 4:
        one = cache[:, :, 1:]
        exact, sizes = exactly((x, weight, bias, one, None), ("none", 2, 1, 1, 0, 0, 0, 0))
        got = conv3d(x, weight, bias, cache=one, time_stride=2, before=1, policy=on(isa, precision))
        check(got, exact, sizes, precision, "down")


@pytest.mark.parametrize("padding", [None, (1, 1, 1, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("stride", [1, 2])
def test_images(isa, precision, stride, padding):
    x, weight, bias = video(3, 96, 33, 50), weights(96, 96, 3, 3), torch.randn(96, device="cuda").half()
    got = conv2d(x, weight, bias, stride=stride, padding=padding, activation="relu", policy=on(isa, precision))
    left, right, top, bottom = padding or ((1, 1, 1, 1) if stride == 1 else (0, 1, 0, 1))
    tensors = (x.unsqueeze(2), weight.unsqueeze(2), bias, None, None)
    exact, sizes = exactly(tensors, ("relu", 1, 0, stride, left, right, top, bottom))
    check(got, exact.squeeze(2), sizes.squeeze(2), precision, "image")
    if stride == 2 and padding is None:
        torch.testing.assert_close(
            got.double(),
            functional.conv2d(functional.pad(x.double(), (0, 1, 0, 1)), weight.double(), bias.double(), 2).relu(),
            atol=0.01,
            rtol=0.01,
        )


def by_torch_and_a_pass(tensors, options, isa):
    """torch's convolution with our pass behind it, whatever is faster. None: it refuses."""
    call = Call("conv", tensors, options, on(isa))
    if conv_torch.FUSED.refuse(call) is not None:
        return None
    return conv_torch.FUSED.prepare(call)(*tensors)


def check_two_roundings(got, tensors, options, exact, sizes, what):
    """What torch added up was rounded before the bias came: half a step of it on top of what `check` allows, and as much of the
    sum of magnitudes, since its sums may be of parts that are rounded themselves."""
    x, weight, _, cache, _ = tensors
    products, magnitudes = exactly((x, weight, None, cache, None), ("none", *options[1:]))
    allowed = 1.2 * HALF_STEP * (products.abs() + magnitudes)  # GELU and SiLU magnify it by 1.13 at most
    nearest = got.double() + (exact - got.double()).clamp(-allowed, allowed)
    check(nearest, exact, sizes, "precise", what, rounded_to=got.dtype)


@given(configurations())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_random_configurations_by_torch_and_a_pass(isa, c):
    tensors, options = operands_of(c)
    got = by_torch_and_a_pass(tensors, options, isa)
    if got is not None:
        exact, sizes = exactly(tensors, options)
        assert got.shape == exact.shape and conv_torch.is_dense(got)
        check_two_roundings(got, tensors, options, exact, sizes, f"{c}")


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 8), (1, 1, 17, 33, 24), (2, 1, 9, 7, 128), (1, 3, 5, 6, 40)], ids=str)
@pytest.mark.parametrize("extras", ["bias", "bias and residual", "residual", "wide bias and residual"])
def test_one_pass_behind_torchs_convolution(isa, kind, sizes, extras):
    """With every part of it, at sizes that fill no block: neither x nor the residual is written to."""
    b, t, h, w, n = sizes
    x, weight = video(b, 16, t, h, w), weights(n, 16, 1, 3, 3)
    bias = torch.randn(n, device="cuda") if "bias" in extras else None
    bias = bias if bias is None or "wide" in extras else bias.half()
    residual = video(b, n, t, h, w) if "residual" in extras else None
    tensors, options = (x, weight, bias, None, residual), (kind, 1, 0, 1, 1, 1, 1, 1)
    before = [None if each is None else each.clone() for each in tensors]
    got = by_torch_and_a_pass(tensors, options, isa)
    if got is None:  # one pass of torch's is all there is to do
        assert bias is None and kind == "none"
        return
    check_two_roundings(got, tensors, options, *exactly(tensors, options), f"{kind} {extras}")
    assert all(each is None or torch.equal(each, then) for each, then in zip(tensors, before, strict=True))


@pytest.mark.sanitize
@pytest.mark.parametrize("sizes", [(1, 5, 6, 8), (2, 9, 7, 24), (3, 17, 33, 128)], ids=str)
@pytest.mark.parametrize("kind", ["none", "silu"])
def test_a_residual_of_one_pixel(isa, precision, sizes, kind):
    """One for each of a batch, as a U-Net adds the time: ours read it where it lies, the pass behind torch's has it with the
    bias."""
    b, h, w, n = sizes
    x, weight, bias = video(b, 16, 1, h, w), weights(n, 16, 1, 3, 3), torch.randn(n, device="cuda").half()
    residual = torch.randn(b, n, device="cuda").half()[:, :, None, None, None].expand(-1, -1, 1, h, w)
    tensors, options = (x, weight, bias, None, residual), (kind, 1, 0, 1, 1, 1, 1, 1)
    exact, sums = exactly(tensors, options)
    for tactic in all_tactics(n, 3, 1, precision):
        check(with_tactic(tactic, tensors, options, isa), exact, sums, precision, str(tactic))
    got = by_torch_and_a_pass(tensors, options, isa)
    assert (got is None) == (kind != "none")
    if got is not None:
        check_two_roundings(got, tensors, options, exact, sums, "a pass each")


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ["half", "wide"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 8), (2, 1, 1, 1280), (3, 33, 31, 40), (5, 16, 16, 328)], ids=str)
@pytest.mark.parametrize("rows", ["dense", "among others", "one for all"])
def test_one_pass_adds_each_pictures_own_row(isa, kind, sizes, rows):
    """Pictures that fill no block or several, with rows that lie close, among others, or once for all; and the bits of bias and row
    added up in float before the product is."""
    b, h, w, n = sizes
    x, weight, bias = video(b, 16, 1, h, w), weights(n, 16, 1, 3, 3), torch.randn(n, device="cuda")
    bias = bias if kind == "wide" else bias.half()
    wide = torch.randn(b, n if rows == "dense" else n + 24, device="cuda").half() * 4
    own = wide[:, :n] if rows == "dense" else wide[:, 16 : n + 16]
    own = own[:1].expand(b, -1) if rows == "one for all" else own
    residual = own[:, :, None, None, None].expand(-1, -1, 1, h, w)
    tensors, options = (x, weight, bias, None, residual), ("none", 1, 0, 1, 1, 1, 1, 1)
    before = [None if each is None else each.clone() for each in tensors]
    got = by_torch_and_a_pass(tensors, options, isa)
    check_two_roundings(got, tensors, options, *exactly(tensors, options), f"{kind} {rows}")
    assert all(each is None or torch.equal(each, then) for each, then in zip(tensors, before, strict=True))
    products = torch.nn.functional.conv3d(x, weight, padding=(0, 1, 1))
    want = (products.float() + (own.float() + bias.float())[:, :, None, None, None]).half()
    if torch.equal(products, torch.nn.functional.conv3d(x, weight, padding=(0, 1, 1))):  # the library repeats itself
        torch.testing.assert_close(got, want, rtol=2**-10, atol=1e-3)


def test_one_pass_keeps_what_is_no_number_to_its_picture(isa):
    x, weight, bias = video(3, 16, 1, 20, 20), weights(64, 16, 1, 3, 3), torch.randn(64, device="cuda").half()
    own = torch.randn(3, 64, device="cuda").half()
    own[0, 3], own[1, 9], own[2, 63] = torch.nan, torch.inf, -torch.inf
    residual = own[:, :, None, None, None].expand(-1, -1, 1, 20, 20)
    got = by_torch_and_a_pass((x, weight, bias, None, residual), ("none", 1, 0, 1, 1, 1, 1, 1), isa)[:, :, 0]
    odd = ~got.isfinite()
    assert got[0, 3].isnan().all() and (got[1, 9] == torch.inf).all() and (got[2, 63] == -torch.inf).all()
    assert int(odd.sum()) == 3 * 400


def test_every_candidate_computes_the_same():
    """`auto` may choose any of them, on rows of a picture as on a whole one."""
    picture, weight, bias = video(1, 128, 40, 64), weights(128, 128, 3, 3), torch.randn(128, device="cuda").half()
    x, residual = picture[:, :, 3:20], video(1, 128, 40, 64)[:, :, 3:20]
    LEDGER.clear()
    got = until_chosen(lambda: conv2d(x, weight, bias, residual=residual, policy=KernelPolicy.of("auto")))
    assert {"stock", "cudnn + fused pass", "cudnn 2d fused pass"} < set(tried("conv"))
    tensors, options = tuple(t.unsqueeze(2) for t in (x, weight)), ("none", 1, 0, 1, 1, 1, 1, 1)
    call = Call("conv", (*tensors, bias, None, residual.unsqueeze(2)), options, KernelPolicy())
    exact, _ = exactly(call.tensors, options)
    for candidate in op.CONV.candidates:
        assert candidate.refuse(call) is None
        made = candidate.prepare(call)(*call.tensors)
        torch.testing.assert_close(made, exact.half(), atol=5e-3, rtol=4e-3)
    torch.testing.assert_close(got, exact.half().squeeze(2), atol=5e-3, rtol=4e-3)


@pytest.mark.parametrize("kind", ["none", "relu"])
@pytest.mark.parametrize(("c", "n", "taps"), [(3, 32, 9), (32, 3, 9), (16, 12, 5), (40, 3, 7)])
def test_pictures_and_taps_that_none_of_ours_has(c, n, taps, kind):
    """Torch's ways take turns; those that add rows up round each of them."""
    x, weight, bias = video(1, c, 40, 50), weights(n, c, taps, taps), torch.randn(n, device="cuda")
    tensors, options = (x.unsqueeze(2), weight.unsqueeze(2), bias, None, None), (kind, 1, 0, 1, *[0] * 4)
    exact, sizes = exactly(tensors, options)
    call = Call("conv", tensors, options, KernelPolicy())
    for way in conv_flat.FLAT.tactics(call):
        got, parts = way.prepare(call)(*tensors), taps if way.tactic == conv_flat.ROWS else 2
        assert got.shape == exact.shape and conv_torch.is_dense(got)
        allowed = HALF_STEP * exact.abs() * 1.001 + SMALLEST * parts + (HALF_STEP + SUM_STEP["precise"]) * sizes
        assert float(((got.double() - exact).abs() - allowed).max()) <= 0, way.name
    LEDGER.clear()
    got = until_chosen(lambda: conv2d(x, weight, bias, padding=(0, 0, 0, 0), activation=kind, policy=KernelPolicy()))
    assert {way.name for way in conv_flat.FLAT.tactics(call)} < set(tried("conv"))
    torch.testing.assert_close(got, exact.half().squeeze(2), atol=5e-2, rtol=5e-3)


@pytest.mark.sanitize
@pytest.mark.parametrize(("c", "n"), [(8, 8), (12, 3), (96, 48), (192, 96), (384, 192)])
@pytest.mark.parametrize(("h", "w"), [(1, 1), (5, 7), (17, 33)])
def test_upsampling(isa, precision, c, n, h, w):
    x, weight, bias = video(2, c, h, w), weights(n, c, 3, 3), torch.randn(n, device="cuda")
    folded = fold_upsample(weight)
    exact = upsample_conv.reference(x.double(), weight.double(), bias.double(), None, "none")
    sizes = upsample_conv.reference(x.double().abs(), weight.double().abs(), bias.double().abs(), None, "none")
    call = Call("upsample_conv2d", (x, weight, bias, folded), ("none",), on(isa, precision))
    assert next(upsample_conv.obstacles(call), None) is None
    for tactic in upsample_conv.ways(call):
        got = upsample_conv.plan(call, card(0, isa), tactic)(*call.tensors)
        check(got, exact, sizes, tactic.precision, str(tactic), folded=HALF_STEP)
        assert got.stride() == exact.stride()
    with pytest.raises(KernelRefused, match="fold_upsample"):
        upsample_conv2d(x, weight, bias, policy=on(isa))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_special_values(isa, precision, value):
    """A NaN reaches the pixels that see it and no others; so does an infinity."""
    x, weight = video(1, 32, 3, 12, 20), weights(96, 32, 3, 3, 3)
    clean = conv3d(x, weight, policy=on(isa, precision))
    x[0, 5, 1, 6, 9] = value
    got = conv3d(x, weight, policy=on(isa, precision))
    seen = torch.zeros(3, 12, 20, dtype=torch.bool, device="cuda")
    seen[1:, 5:8, 8:11] = True
    assert not got[0][:, seen].isfinite().any()
    if precision == "precise":  # a `fast` block that sees it computes with float sums
        assert torch.equal(got[0][:, ~seen], clean[0][:, ~seen])
    else:
        torch.testing.assert_close(got[0][:, ~seen], clean[0][:, ~seen], atol=0.02, rtol=0.02)


def test_half_sums_that_overflow_are_found(isa):
    """32 products of 200 x 30 exceed fp16; with signs that cancel over time the result itself fits."""
    x, weight = video(1, 64, 3, 10, 18), weights(96, 64, 3, 3, 3)
    x.fill_(200), weight.fill_(30)
    x[:, :, 1:] *= -1
    bias, options = torch.zeros(96, device="cuda"), ("none", 1, 2, 1, 1, 1, 1, 1)
    x[:, :, 2] = 0.5
    exact, sizes = exactly((x, weight, bias, None, None), options)
    got = conv3d(x, weight, bias, policy=on(isa, "fast"))
    check(got, exact, sizes, "precise", "overflow")


def test_error_of_half_sums(isa):
    """Against float64, at most twice that of float sums, at the depths of the VAE."""
    for c in (96, 192, 384):
        x, weight = video(1, c, 2, 16, 32), weights(96, c, 3, 3, 3)
        exact, _ = exactly((x, weight, None, None, None), ("none", 1, 2, 1, 1, 1, 1, 1))
        rms = {}
        for precision in ("precise", "fast"):
            got = conv3d(x, weight, policy=on(isa, precision))
            rms[precision] = float((got.double() - exact).square().mean().sqrt())
        assert rms["fast"] <= 2 * rms["precise"], f"{c} channels: {rms}"


def test_bitwise_repeatable(isa, precision):
    x, weight, cache = video(1, 96, 2, 30, 40), weights(192, 96, 3, 3, 3), video(1, 96, 2, 30, 40)
    first, *others = (conv3d(x, weight, cache=cache, policy=on(isa, precision)) for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


def test_chunks_give_what_the_whole_gives(isa, precision):
    """Frames in chunks with the cache read in place: bitwise what one call over all frames gives."""
    x, weight = video(1, 48, 7, 11, 21), weights(96, 48, 3, 3, 3)
    whole = conv3d(x, weight, policy=on(isa, precision))
    parts = [conv3d(x[:, :, :1], weight, policy=on(isa, precision))]
    for first in range(1, 7, 2):
        cache = x[:, :, max(0, first - 2) : first]
        parts.append(conv3d(x[:, :, first : first + 2], weight, cache=cache, policy=on(isa, precision)))
    assert torch.equal(torch.cat(parts, 2), whole)


def test_nothing_is_allocated_but_the_result(isa, precision):
    x, weight, cache = video(1, 96, 4, 64, 64), weights(96, 96, 3, 3, 3), video(1, 96, 2, 64, 64)
    residual = video(1, 96, 4, 64, 64)
    run = lambda: conv3d(x, weight, cache=cache, residual=residual, policy=on(isa, precision))  # noqa: E731
    size = run().numel() * 2
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    poison = 2 * size if os.environ.get("FUSESTREAM_POISON") else 0  # the tests' own poison makes copies
    assert torch.cuda.max_memory_allocated() - before <= size + poison


def test_empty_and_refused(isa):
    weight = weights(16, 8, 3, 3, 3)
    assert conv3d(video(0, 8, 2, 4, 4), weight, policy=on(isa)).shape == (0, 16, 2, 4, 4)
    assert conv3d(video(1, 8, 2, 0, 4), weight, policy=on(isa)).shape == (1, 16, 2, 0, 4)
    x = video(1, 8, 2, 4, 4)
    with pytest.raises(KernelRefused, match="x is not channels-last"):
        conv3d(x.contiguous(), weight, policy=on(isa))
    with pytest.raises(KernelRefused, match=r"weight is not in torch\.channels_last_3d"):
        conv3d(x, weight.contiguous(), policy=on(isa))
    with pytest.raises(KernelRefused, match="float32"):
        conv3d(x.float(), weight, policy=on(isa))


def test_auto_serves_any_layout():
    x, weight = video(1, 16, 2, 8, 8), weights(16, 16, 3, 3, 3)
    LEDGER.clear()
    both = [conv3d(each, weight, policy=KernelPolicy.of("auto")) for each in (x, x.contiguous())]
    torch.testing.assert_close(*both, atol=0.01, rtol=0.01)
