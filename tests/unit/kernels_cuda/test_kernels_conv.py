"""conv3d, conv2d and upsample_conv2d without a GPU: stock's and torch's ways, what is refused and why, the folds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from bed.depth import examples
from fusestream.kernels_cuda import (
    OPS,
    KernelPolicy,
    conv2d,
    conv3d,
    fold_batch_norm,
    fold_upsample,
    upsample_conv2d,
)
from fusestream.kernels_cuda.build import matrix
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import Pointer
from fusestream.kernels_cuda.ops.conv import conv as op
from fusestream.kernels_cuda.ops.conv import conv_flat, conv_torch, upsample_conv
from fusestream.kernels_cuda.ops.conv.conv_operands import Operands, compute
from fusestream.kernels_cuda.ops.matmul.linear_operands import ACTIVATIONS
from fusestream.kernels_cuda.policy import PRECISIONS

OFF = KernelPolicy.of("off")


def last(t):
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def test_stock_is_comfyui_s_causal_convolution():
    """Against torch's Conv3d with the frames that comfy/ldm/wan/vae.py puts before the chunk."""
    torch.manual_seed(0)
    module = nn.Conv3d(4, 6, 3, padding=(0, 1, 1))
    x, cache = torch.randn(1, 4, 3, 5, 7), torch.randn(1, 4, 1, 5, 7)
    with torch.no_grad():
        zeros = torch.zeros(1, 4, 1, 5, 7)
        want = module(torch.cat((zeros, cache, x), 2))
        single = module(functional.pad(x[:, :, :1], (0, 0, 0, 0, 2, 0)))
    for policy in (KernelPolicy(), OFF):
        torch.testing.assert_close(conv3d(x, module.weight, module.bias, cache=cache, policy=policy), want)
        torch.testing.assert_close(conv3d(x[:, :, :1], module.weight, module.bias, policy=policy), single)


def test_steps_of_two_pad_behind():
    """An autoencoder's downsampling: ZeroPad2d((0, 1, 0, 1)), then a stride of two."""
    x, weight = torch.randn(2, 3, 8, 10), torch.randn(5, 3, 3, 3)
    want = functional.conv2d(functional.pad(x, (0, 1, 0, 1)), weight, stride=2)
    torch.testing.assert_close(conv2d(x, weight, stride=2), want, atol=1e-5, rtol=1e-5)
    want = functional.conv2d(x, weight, stride=2, padding=1)
    torch.testing.assert_close(
        conv2d(x, weight, stride=2, padding=(1, 1, 1, 1), policy=OFF), want, atol=1e-5, rtol=1e-5
    )


def test_time_steps_of_two_over_one_cached_frame():
    x, cache, weight = torch.randn(1, 4, 4, 3, 3), torch.randn(1, 4, 1, 3, 3), torch.randn(4, 4, 3, 1, 1)
    want = functional.conv3d(torch.cat((cache, x), 2), weight, stride=(2, 1, 1))
    got = conv3d(x, weight, cache=cache, time_stride=2, before=1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=examples(30), deadline=None)
def test_four_phases_are_the_upsampled_convolution(n, c, h, w):
    """The kernel's maths, done in float64: 2x2 taps of each phase, at the places the kernel writes them to."""
    x, weight = torch.randn(2, c, h, w).double(), torch.randn(n, c, 3, 3).double()
    folded = fold_upsample(weight).double().reshape(4, n, c, 2, 2)
    got = torch.empty(2, n, 2 * h, 2 * w, dtype=torch.float64)
    padded = functional.pad(x, (1, 1, 1, 1))
    for down in range(2):
        for across in range(2):
            seen = padded[:, :, down : down + h + 1, across : across + w + 1]
            got[:, :, down::2, across::2] = functional.conv2d(seen, folded[2 * down + across])
    want = functional.conv2d(functional.interpolate(x, scale_factor=2.0, mode="nearest-exact"), weight, padding=1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)  # folded in fp32
    torch.testing.assert_close(upsample_conv2d(x, weight), want)
    torch.testing.assert_close(upsample_conv2d(x, weight, policy=OFF), want)


def test_a_folded_weight_is_made_for_the_kernel():
    folded = fold_upsample(torch.randn(6, 8, 3, 3).half())
    assert folded.shape == (24, 8, 2, 2) and folded.dtype is torch.float16
    assert folded.is_contiguous(memory_format=torch.channels_last)


def test_a_batch_norm_is_folded_into_the_convolution():
    torch.manual_seed(1)
    module, norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5).eval()
    with torch.no_grad():
        for t in (norm.weight, norm.bias, norm.running_mean):
            t.normal_()
        norm.running_var.uniform_(0.5, 2)
        x = torch.randn(2, 3, 6, 6)
        for bias in (module.bias, None):
            plain = functional.conv2d(x, module.weight, bias, padding=1)
            weight, added = fold_batch_norm(
                module.weight, bias, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps
            )
            torch.testing.assert_close(conv2d(x, weight, added), norm(plain), atol=1e-5, rtol=1e-5)


def half(*shape):
    return last(torch.zeros(*shape, dtype=torch.float16))


def why_not(x, weight, bias=None, cache=None, residual=None, stride=1):
    reach = weight.shape[-1] // 2
    options = ("none", 1, weight.shape[2] - 1, stride, *[reach] * 4)
    return next(op.obstacles(Call("conv", (x, weight, bias, cache, residual), options)), None)


def test_the_kernels_say_what_they_do_not_serve():
    x, weight = half(1, 8, 2, 6, 6), half(16, 8, 3, 3, 3)
    assert why_not(x, weight) is None
    assert why_not(half(1, 3, 2, 6, 6), half(16, 3, 3, 3, 3)) is None  # brought to eight channels
    assert "x is float32" in why_not(x.float(), weight)
    assert "x is not channels-last" in why_not(x.contiguous(), weight)
    assert "weight is not in torch.channels_last_3d" in why_not(x, weight.contiguous())
    assert "5x5 taps with stride 1" in why_not(x, half(16, 8, 1, 5, 5))
    assert "1x1 taps with stride 2" in why_not(x, half(16, 8, 1, 1, 1), stride=2)
    assert "multiples of 16 bytes" in why_not(half(1, 20, 2, 6, 6)[:, 4:12], weight)
    assert "bias is not contiguous" in why_not(x, weight, torch.zeros(32)[::2])
    assert why_not(half(1, 8, 2, 0, 6), weight) is None  # nothing to compute
    call = Call("upsample_conv2d", (half(1, 8, 4, 4), half(8, 8, 3, 3), None, None), ("none",))
    assert "fold_upsample" in next(upsample_conv.obstacles(call))


@pytest.mark.parametrize("n", [1, 16, 17, 96, 97, 128, 160, 192, 256, 320, 384, 640, 1024])
@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_cuts_leave_little_to_spare(n, precision):
    tactics = op.cuts_for(n, op.CUTS[(3, 3), 1], True, precision)
    assert len(set(tactics)) == len(tactics)
    if n <= op.THIN:
        assert [str(t) for t in tactics] == ["thin precise"]
        return
    assert tactics[0].precision == precision
    widths = [int(t.cut.split("x")[1]) for t in tactics if t.precision == precision]
    spare = [-(-n // width) * width for width in widths]
    assert spare == sorted(spare)


def test_every_kernel_named_is_compiled():
    """The names the ops ask for are those that conv.cu spells."""
    source = (matrix.SOURCES / "conv.cu").read_text(encoding="utf-8")
    named = {*OPS["conv"].kernels["conv"], *OPS["upsample_conv2d"].kernels["conv"]}
    assert named == {line.split("(")[1].split(",")[0] for line in source.splitlines() if line.startswith("CONV(")}


@pytest.mark.parametrize("layout", ["first", "last"])
def test_results_keep_the_format(layout):
    x, weight = torch.randn(2, 8, 2, 4, 4), torch.randn(8, 8, 1, 3, 3)
    x = last(x) if layout == "last" else x
    for value in (conv3d(x, weight), conv3d(x, weight, policy=OFF)):
        assert value.stride() == x.stride()
    for value in (upsample_conv2d(x[:, :, 0], weight[:, :, 0]), conv2d(x[:, :, 0], weight[:, :, 0])):
        assert (value.stride(1) == 1) == (layout == "last")


@pytest.mark.parametrize("n", [1, 3, 16, 17, 96, 200])
@pytest.mark.parametrize(("taps", "stride"), op.CUTS)
def test_every_tactic_has_its_kernel(taps, stride, n):
    for precision in PRECISIONS:
        weight = torch.zeros(n, 8, 1, *taps).half()
        tensors = (torch.zeros(1, 8, 1, 9, 9).half(), weight, None, None, None)
        call = Call("conv", tensors, ("none", 1, 0, stride, 1, 1, 1, 1), KernelPolicy.of("on", precision=precision))
        tactics = op.ways(call)
        assert tactics
        for tactic in tactics:
            assert op.kernel_name(Operands.of_call(call), tactic) in op.CONV.kernels["conv"]


def test_turbo_convolves_as_fast_does():
    tensors = (torch.zeros(1, 8, 1, 9, 9).half(), torch.zeros(96, 8, 1, 3, 3).half(), None, None, None)
    options, folded = ("none", 1, 0, 1, 1, 1, 1, 1), fold_upsample(torch.zeros(96, 8, 3, 3)).half()
    up = (torch.zeros(1, 8, 9, 9).half(), torch.zeros(96, 8, 3, 3).half(), None, folded)
    for name, module, arguments in (
        ("conv", op, (tensors, options)),
        ("upsample_conv2d", upsample_conv, (up, ("none",))),
    ):
        fast, turbo = (Call(name, *arguments, KernelPolicy.of("on", precision=p)) for p in ("fast", "turbo"))
        assert module.ways(turbo) == module.ways(fast) and module.ways(fast)[0].precision == "fast"
        assert module.shape_class(turbo) == module.shape_class(fast)


# ------------------------------------------------------------------------------------------ torch's, and one pass behind it


def why_not_fused(x, weight, bias=None, residual=None, activation="none"):
    options = (activation, 1, weight.shape[2] - 1, 1, *[weight.shape[-1] // 2] * 4)
    return next(conv_torch.obstacles(Call("conv", (x, weight, bias, None, residual), options)), None)


def test_one_pass_behind_torch_where_there_is_something_to_fuse():
    x, weight, bias, out = half(1, 8, 1, 6, 6), half(16, 8, 1, 3, 3), torch.zeros(16), half(1, 16, 1, 6, 6)
    assert why_not_fused(x, weight, bias) is None
    assert why_not_fused(x, weight, bias.half(), out, "silu") is None
    assert why_not_fused(x, weight, None, out, "relu") is None
    for residual, activation in ((None, "none"), (None, "silu"), (out, "none")):
        assert "nothing to fuse" in why_not_fused(x, weight, None, residual, activation)
    assert "3 channels" in why_not_fused(x, half(3, 8, 1, 3, 3), torch.zeros(3))
    assert "x is not channels-last" in why_not_fused(x.contiguous(), weight, bias)
    assert "x is float32" in why_not_fused(x.float(), weight, bias)
    assert "nothing to compute" in why_not_fused(half(1, 8, 1, 0, 6), weight, bias)
    assert "bias is not contiguous" in why_not_fused(x, weight, torch.zeros(32)[::2])
    larger = half(1, 16, 1, 9, 6)
    assert why_not_fused(x, weight, bias, larger[:, :, :, 2:8]) is None  # rows of one picture are dense
    two = half(2, 16, 1, 9, 6)[:, :, :, 2:8]
    assert "residual is not dense" in why_not_fused(half(2, 8, 1, 6, 6), weight, bias, two)
    assert "residual is not dense" in why_not_fused(x, weight, bias, out.contiguous())


class Recorded:
    """A card and its kernel: what the pass was launched with, and on what."""

    def kernel(self, *name):
        self.name = name
        return self

    def prepare(self, params, *, grid, block, shape):
        self.params, self.grid, self.block = params, grid, block
        return self

    def filler(self, places, behind):
        names = [name for name, kind in self.params._fields_ if kind is Pointer]

        def fill(tensors):
            self.pointers = tuple(tensors[places[name]].data_ptr() if name in places else 0 for name in names)

        return fill

    def send(self):
        pass


@pytest.mark.parametrize("side", [1, 33])
def test_the_pass_is_given_what_torch_made(side):
    x, weight = last(torch.randn(1, 16, 1, side, side).half()), last(torch.randn(24, 16, 1, 3, 3).half())
    bias, residual = torch.randn(24).half(), last(torch.randn(1, 24, 1, side, side).half())
    card, call = Recorded(), Call("conv", (x, weight, bias, None, residual), ("silu", 1, 0, 1, 1, 1, 1, 1))
    out = conv_torch.plan(call, card)(*call.tensors)
    torch.testing.assert_close(out, conv3d(x, weight, None, policy=OFF))
    assert conv_torch.is_dense(out) and card.pointers == (out.data_ptr(), bias.data_ptr(), residual.data_ptr(), 0)
    p, threads = card.params, card.grid[0] * card.block * conv_torch.HELD
    assert (p.packs, p.across, p.bias_is_float) == (out.numel() // 8, 3, 0) and ACTIVATIONS[p.activation] == "silu"
    assert p.packs <= threads < p.packs + card.block * conv_torch.HELD
    assert card.name == ("conv_rest", op.CONV.kernels["conv_rest"][0])


@pytest.mark.parametrize("bias_type", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("step", [24, 40, 0])
def test_a_residual_of_one_pixel_goes_with_the_bias(bias_type, step):
    """One launch for all of a batch, which is told where each one's row lies: alone, among others, or the same for all."""
    x, weight = last(torch.randn(2, 16, 1, 5, 6).half()), last(torch.randn(24, 16, 1, 3, 3).half())
    bias, pixels = torch.randn(24).to(bias_type), torch.randn(2, max(step, 24)).half()
    residual = pixels.as_strided((2, 24, 1, 5, 6), (step, 1, 0, 0, 0))
    card, call = Recorded(), Call("conv", (x, weight, bias, None, residual), ("none", 1, 0, 1, 1, 1, 1, 1))
    assert why_not_fused(x, weight, bias, residual) is None
    out = conv_torch.plan(call, card)(*call.tensors)
    torch.testing.assert_close(out, conv3d(x, weight, None, policy=OFF))
    assert card.pointers == (out.data_ptr(), bias.data_ptr(), 0, pixels.data_ptr())
    p = card.params
    assert (p.packs, p.across, p.added_step) == (out[0].numel() // 8, 3, step)
    assert (card.grid[1], p.bias_is_float) == (2, bias_type is torch.float32)


def test_where_a_residual_of_one_pixel_does_not_go_with_the_bias():
    x, weight, bias, pixel = half(2, 8, 1, 6, 6), half(16, 8, 1, 3, 3), torch.zeros(16), half(2, 16, 1, 1, 1)
    spread = pixel.expand(-1, -1, 1, 6, 6)
    assert why_not(x, weight, bias, None, spread) is None, "our own kernels read it where it lies"
    assert "residual is not dense" in why_not_fused(x, weight, bias, spread, "silu"), "the activation comes before it"
    assert "nothing to fuse" in why_not_fused(x, weight, None, spread)
    apart, shifted = half(2, 20, 1, 1, 1)[:, :16], half(2, 24, 1, 1, 1)[:, 3:19]
    for rows in (apart, shifted):
        assert "do not start at multiples" in why_not_fused(x, weight, bias, rows.expand(-1, -1, 1, 6, 6))
    assert why_not_fused(x[:1], weight, bias, apart[:1].expand(-1, -1, 1, 6, 6)) is None
    assert "residual is not dense" in why_not_fused(x, weight, bias, half(2, 16, 1, 6, 1).expand(-1, -1, 1, 6, 6))


def test_a_residual_of_one_pixel_is_a_class_of_its_own():
    x, weight, options = half(2, 8, 1, 6, 6), half(16, 8, 1, 3, 3), ("none", 1, 0, 1, 1, 1, 1, 1)
    kinds = half(2, 16, 1, 6, 6), half(2, 16, 1, 1, 1).expand(-1, -1, 1, 6, 6)
    assert len({op.shape_class(Call("conv", (x, weight, None, None, one), options)) for one in kinds}) == 2


def test_the_pass_cuts_the_work_as_its_source_does():
    source = (matrix.SOURCES / "conv_rest.cu").read_text(encoding="utf-8")
    for name, value in (("kThreads", conv_torch.THREADS), ("kHeld", conv_torch.HELD)):
        assert f"constexpr int {name} = {value};" in source


def test_what_is_fused_behind_torch_is_a_class_of_its_own():
    x, weight, options = half(1, 8, 1, 6, 6), half(16, 8, 1, 3, 3), ("none", 1, 0, 1, 1, 1, 1, 1)
    classes = {op.shape_class(Call("conv", (x, weight, b, None, None), options)) for b in (None, torch.zeros(16))}
    assert len(classes) == 2
    assert [each.name for each in op.CONV.candidates] == ["cuda", "stock", "cudnn + fused pass", "cudnn 2d"]


# ------------------------------------------------------------------------------------ torch's convolution of pictures


@settings(max_examples=examples(60), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(9, 14), st.integers(9, 13)),
    n=st.sampled_from([1, 3, 5, 8]),
    taps=st.sampled_from([(9, 9), (5, 3), (7, 1), (3, 3), (1, 1)]),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from([(0, 0, 0, 0), (4, 4, 1, 1), (0, 1, 2, 0)]),
    activation=st.sampled_from(["none", "relu", "silu"]),
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_way_of_pictures_is_the_definition(
    shape, n, taps, stride, padding, activation, with_bias, with_residual, seed
):
    torch.manual_seed(seed)
    b, c, h, w = shape
    x, weight = last(torch.randn(b, c, 1, h, w).double()), last(torch.randn(n, c, 1, *taps).double())
    bias, options = torch.randn(n).double() if with_bias else None, (activation, 1, 0, stride, *padding)
    size = Operands.of((x, weight, bias, None, None), options).shape
    residual = last(torch.randn(size).double()) if with_residual else None
    tensors = x, weight, bias, None, residual
    want = compute(Operands.of(tensors, options))
    ways = {conv_flat.PLAIN, conv_flat.PADDED} | ({conv_flat.ROWS} if stride == 1 else set())
    for way in ways:
        got = conv_flat.plan(Call("conv", tensors, options), None, way)(*tensors)
        torch.testing.assert_close(got, want)
        assert conv_torch.is_dense(got) and got.dtype is want.dtype


def ways_of(n, taps, stride=1, bias=True):
    x, weight = half(1, 32, 1, 16, 16), half(n, 32, 1, taps, taps)
    return conv_flat.ways(
        Call("conv", (x, weight, torch.zeros(n) if bias else None, None, None), ("relu", 1, 0, stride, *[0] * 4))
    )


def test_which_ways_pictures_have():
    assert ways_of(3, 9) == ["padded", "rows"]  # the last layer of a style network
    assert ways_of(3, 9, stride=2) == ways_of(3, 3) == ways_of(12, 9) == ["padded"]
    assert ways_of(32, 9) == ["fused pass"]  # and its first
    assert ways_of(32, 9, bias=False) == ["plain"]
    for x, weight, options in (
        (half(1, 8, 2, 9, 9), half(8, 8, 1, 3, 3), ("none", 1, 0, 1, *[0] * 4)),
        (half(1, 8, 1, 9, 9), half(8, 8, 3, 3, 3), ("none", 1, 2, 1, *[0] * 4)),
    ):
        assert next(conv_flat.obstacles(Call("conv", (x, weight, None, None, None), options))) == "it is a video"
    options = ("none", 1, 0, 1, *[0] * 4)
    of_channels_first = Call("conv", (half(1, 8, 1, 9, 9).contiguous(), half(8, 8, 1, 3, 3), None, None, None), options)
    assert "not channels-last" in next(conv_flat.obstacles(of_channels_first))


def test_the_pass_behind_pictures_is_given_what_torch_made():
    x, weight, bias = (
        last(torch.randn(1, 16, 1, 9, 9).half()),
        last(torch.randn(24, 16, 1, 5, 5).half()),
        torch.randn(24),
    )
    card, call = Recorded(), Call("conv", (x, weight, bias, None, None), ("relu", 1, 0, 1, *[2] * 4))
    out = conv_flat.plan(call, card, conv_flat.FUSED_PASS)(*call.tensors)
    torch.testing.assert_close(
        out, compute(Operands.of((x, weight, None, None, None), ("none", *call.options[1:]))), atol=0.01, rtol=0.01
    )
    assert conv_torch.is_dense(out) and card.pointers == (out.data_ptr(), bias.data_ptr(), 0, 0)


# -------------------------------------------------------------------------------------------------------- what is measured


def picture(*shape):
    return torch.empty(*shape, dtype=torch.float16, device="meta").contiguous(memory_format=torch.channels_last)
