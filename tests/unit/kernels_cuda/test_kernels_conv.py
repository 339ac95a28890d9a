"""Convolutions without a GPU: torch's ways, the folds of weights, borders."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from contract.launches import Recorder, of_device
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from bed.depth import examples
from fusestream.kernels_cuda import (
    KernelPolicy,
    bordered_upsample_conv2d,
    conv2d,
    fold_batch_norm,
    fold_upsample,
    upsample_conv2d,
)
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.conv import bordered_conv, conv, conv_flat, conv_torch
from fusestream.kernels_cuda.ops.conv.borders import border_obstacle, with_border
from fusestream.kernels_cuda.ops.conv.conv_operands import Operands, compute

OFF = KernelPolicy.of("off")
LAST = torch.channels_last


def last(t):
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def test_steps_of_two_pad_behind():
    """An autoencoder's downsampling: ZeroPad2d((0, 1, 0, 1)), then a stride of two."""
    x, weight = torch.randn(2, 3, 8, 10), torch.randn(5, 3, 3, 3)
    want = functional.conv2d(functional.pad(x, (0, 1, 0, 1)), weight, stride=2)
    torch.testing.assert_close(conv2d(x, weight, stride=2), want, atol=1e-5, rtol=1e-5)
    want = functional.conv2d(x, weight, stride=2, padding=1)
    torch.testing.assert_close(
        conv2d(x, weight, stride=2, padding=(1, 1, 1, 1), policy=OFF), want, atol=1e-5, rtol=1e-5
    )


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


# ------------------------------------------------------------------------------------------------------- torch's ways


@pytest.mark.parametrize(
    "plan", [conv_torch.plan, partial(conv_flat.plan, tactic=conv_flat.FUSED_PASS), bordered_conv.fused_plan]
)
@pytest.mark.parametrize("side", [2, 33])
def test_the_pass_behind_torch_is_given_its_products(monkeypatch, plan, side):
    of_device(monkeypatch)
    card, border = Recorder((8, 0)), plan is bordered_conv.fused_plan
    x, weight, bias = (
        last(torch.randn(1, 16, 1, side, side).half()),
        last(torch.randn(24, 16, 1, 3, 3).half()),
        torch.randn(24),
    )
    call = Call("conv", (x, weight, bias, None, None), ("silu", 1, 0, 1, 1, 1, 1, 1))
    want = compute(Operands.of((x, weight, None, None, None), ("none", *call.options[1:])))
    if border:
        call = Call("bordered_conv", (x[:, :, 0], weight[:, :, 0], bias), ("silu", 1, 1, 1, 1, 1, "reflect"))
        want = functional.conv2d(functional.pad(x[:, :, 0].float(), (1, 1, 1, 1), "reflect"), weight[:, :, 0].float())
    for t in call.present:
        card.memory.add(t, "an operand")
    with card.memory:
        out = plan(call, card)(*call.tensors)
    torch.testing.assert_close(out, want.half(), atol=0.01, rtol=0.01)
    assert len(card.launched) == 1 and (border or conv_torch.is_dense(out))


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


# ------------------------------------------------------------------------------------------------------------ borders


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(4, 7), st.integers(4, 7)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    mode=st.sampled_from(["reflect", "replicate", "circular"]),
    last=st.booleans(),
)
@settings(max_examples=examples(80), deadline=None)
def test_a_border_is_torchs_in_one_format(sizes, padding, mode, last):
    x = torch.randn(sizes).contiguous(memory_format=LAST if last else torch.contiguous_format)
    got = with_border(x, padding, mode)
    assert torch.equal(got, functional.pad(x, padding, mode)) and got.is_contiguous(memory_format=LAST)
    assert border_obstacle(x, padding, mode) is None


@pytest.mark.parametrize(("mode", "most"), [("reflect", 3), ("circular", 4), ("replicate", 9)])
def test_borders_that_torch_has_no_pixels_for(mode, most):
    x = torch.zeros(1, 1, 6, 4)
    assert border_obstacle(x, (most, 0, 0, 0), mode) is None and functional.pad(x, (most, 0, 0, 0), mode) is not None
    if mode != "replicate":
        assert "too small for a border" in border_obstacle(x, (0, most + 1, 0, 0), mode)
        with pytest.raises(RuntimeError):
            functional.pad(x, (0, most + 1, 0, 0), mode)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 5)])
def test_upsampled_either_border_is_the_edges_own_pixels(mode, size):
    x, weight, bias = torch.randn(2, 3, *size).contiguous(memory_format=LAST), torch.randn(4, 3, 3, 3), torch.randn(4)
    larger = functional.pad(functional.interpolate(x.double(), scale_factor=2), (1, 1, 1, 1), mode)
    want = functional.conv2d(larger, weight.double(), bias.double()).relu()
    for policy in (KernelPolicy(), OFF):
        got = bordered_upsample_conv2d(x, weight, bias, activation="relu", policy=policy)
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    # And so are the phases of the folded weight, which the kernel computes.
    around = functional.pad(x.double(), (1, 1, 1, 1), "replicate")
    phases = functional.conv2d(around, fold_upsample(weight.double()))
    _, n, h, w = want.shape
    for row in (0, 1):
        for column in (0, 1):
            part = phases[:, (2 * row + column) * n :][:, :n, row : row + h // 2, column : column + w // 2]
            got = (part + bias.double().view(-1, 1, 1)).relu()
            torch.testing.assert_close(got, want[:, :, row::2, column::2], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("channels", "side", "is_refused"), [(3, 16384, True), (3, 16000, False), (8, 16384, True)])
def test_offsets_fit_31_bits_in_the_channels_that_are_read(channels, side, is_refused):
    """Three channels are read as eight."""
    x = torch.empty(
        1, channels, 1, side, side, dtype=torch.float16, device="meta", memory_format=torch.channels_last_3d
    )
    weight = torch.empty(3, channels, 1, 3, 3, dtype=torch.float16, device="meta", memory_format=torch.channels_last_3d)
    call = Call("conv", (x, weight, None, None, None), ("none", 1, 0, 1, 1, 1, 1, 1))
    assert any("spans more than" in reason for reason in conv.obstacles(call)) == is_refused
