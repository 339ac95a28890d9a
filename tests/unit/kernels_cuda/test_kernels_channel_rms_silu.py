"""channel_rms_silu without a GPU: the reference against float64, layouts, shapes, compile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy, KernelRefused, channel_rms_silu
from fusestream.kernels_cuda.ops.norm.channel_rms_silu import lane_shape, tile_shape
from fusestream.kernels_cuda.ops.views.planes import planes, strides_like

OFF = KernelPolicy.of("off")
WAN_WIDTHS = (96, 192, 384, 160, 256, 320, 512, 640, 1024)


@settings(max_examples=examples(60), deadline=None)
@given(
    batch=st.integers(1, 3),
    channels=st.sampled_from([1, 3, 8, 96, 160]),
    image=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    last=st.booleans(),
    bias=st.booleans(),
    silu=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_reference_is_the_definition(batch, channels, image, last, bias, silu, dtype, seed):
    """Against the formula in float64, one pixel at a time."""
    make = torch.Generator().manual_seed(seed)
    x = (torch.randn(batch, channels, *image, generator=make) * 3).half()
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    weight = torch.randn(channels, *[1] * len(image), generator=make).to(dtype)
    plus = torch.randn(channels, *[1] * len(image), generator=make).to(dtype) if bias else None
    got = channel_rms_silu(x, weight, plus, silu=silu)
    assert got.dtype is torch.float16
    assert got.stride() == torch.empty_like(x).stride()

    pixels = x.double().movedim(1, -1).reshape(-1, channels)
    want = pixels * channels**0.5 * weight.double().flatten()
    want = want / pixels.norm(dim=1, keepdim=True).clamp_min(1e-12)
    want = want + (plus.double().flatten() if bias else 0)
    want = want * torch.sigmoid(want) if silu else want
    torch.testing.assert_close(got.double().movedim(1, -1).reshape(-1, channels), want, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("silu", [True, False])
def test_stock_and_reference_agree(silu):
    x, weight, bias = (
        torch.randn(2, 96, 3, 4, 5).half(),
        torch.randn(96, 1, 1, 1).half(),
        torch.randn(96, 1, 1, 1).half(),
    )
    for plus in (None, bias):
        torch.testing.assert_close(
            channel_rms_silu(x, weight, plus, silu=silu),
            channel_rms_silu(x, weight, plus, silu=silu, policy=OFF),
            rtol=8e-3,
            atol=8e-3,
        )


def test_views():
    x = torch.zeros(2, 6, 3, 4, 5)
    assert (planes(x.shape, x.stride()).layout, planes(x.shape, x.stride()).step) == ("first", 60)
    cut = x[:, :, 1:]
    assert (planes(cut.shape, cut.stride()).pixels, planes(cut.shape, cut.stride()).step) == (40, 60)
    assert "do not fold into one" in planes(x[..., :4].shape, x[..., :4].stride())
    last = x.to(memory_format=torch.channels_last_3d)
    assert (planes(last.shape, last.stride()).layout, planes(last.shape, last.stride()).step) == ("last", 6)
    assert planes(last[:, :4].shape, last[:, :4].stride()).step == 6
    assert "neither pixels" in planes((2, 6, 4, 4), (192, 32, 8, 2))
    one = torch.zeros(2, 6, 1, 1)
    assert planes(one.shape, one.stride()).layout == "last"
    assert planes((2, 6), (6, 1)).pixels == 1


@settings(max_examples=examples(40), deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    order=st.permutations(range(5)),
    cut=st.integers(0, 4),
)
def test_a_view_addresses_every_element(shape, order, cut):
    """Batch, channel and pixel strides find the same elements as torch's own indexing."""
    order = [i for i in order if i < len(shape)]
    room = [shape[i] + (1 if i == cut else 0) for i in order]
    x = torch.arange(torch.Size(room).numel()).view(room).permute([order.index(i) for i in range(len(shape))])
    x = x[tuple(slice(0, size) for size in shape)]
    view = planes(x.shape, x.stride())
    if isinstance(view, str):
        return
    channel, pixel = (view.step, 1) if view.layout == "first" else (1, view.step)
    found = x.as_strided((view.batches, view.channels, view.pixels), (view.batch_stride, channel, pixel))
    assert torch.equal(found, x.reshape(found.shape))


def test_the_format_is_kept():
    x = torch.zeros(2, 6, 3, 4)
    for t in (x, x.to(memory_format=torch.channels_last), x[:, :4], x.to(memory_format=torch.channels_last)[:, :4]):
        assert strides_like(t) == (t * 1.0).stride()


@pytest.mark.parametrize("channels", [*WAN_WIDTHS, 1, 8, 24, 1280, 2048, 4000])
def test_a_tile_holds_every_channel(channels):
    tile = tile_shape(channels)
    if tile:
        lanes, threads = tile
        assert threads % lanes == 0
        assert threads // lanes * 12 >= channels
        assert threads <= 352
    split = lane_shape(channels)
    if split:
        lanes, packs = split
        assert lanes * packs * 8 >= channels
        assert 32 % lanes == 0
    if channels in WAN_WIDTHS:
        assert split[0] * split[1] * 8 == channels, "no idle lanes at the model's widths"
        assert tile[0] >= 4, "64 bytes of a row at least"


def test_wrong_shapes_are_value_errors():
    x = torch.zeros(2, 6, 3, 4).half()
    for weight, bias in ((torch.ones(7), None), (torch.ones(1, 6), None), (torch.ones(6), torch.ones(5))):
        for policy in (KernelPolicy(), OFF):
            with pytest.raises(ValueError, match="is not one value for each of 6 channels"):
                channel_rms_silu(x, weight.half(), bias, policy=policy)


@pytest.mark.parametrize(
    ("operand", "x", "weight", "bias"),
    [
        ("x", (), (1,), None),
        ("x", (6,), (6,), None),
        ("weight", (2, 6, 3), (), None),
        ("weight", (2, 6, 3), (1,), None),
        ("weight", (2, 6, 3), (12,), None),
        ("weight", (2, 6, 3), (1, 6, 1), None),
        ("weight", (2, 6, 3), (6, 2), None),
        ("weight", (0, 6, 3), (5,), None),
        ("bias", (2, 6, 3), (6,), (3,)),
        ("bias", (2, 6, 3), (6,), (1, 6)),
    ],
)
def test_wrong_operands_are_named(operand, x, weight, bias):
    tensors = [None if shape is None else torch.ones(shape).half() for shape in (x, weight, bias)]
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=rf"^channel_rms_silu: {operand}: "):
            channel_rms_silu(*tensors, policy=policy)


@pytest.mark.parametrize("tail", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 3), (2, 6, 3, 4), (2, 6, 2, 3, 4), (0, 6, 3), (2, 6, 0)])
def test_forms_that_broadcast(tail, shape):
    for policy in (KernelPolicy(), OFF):
        x, t = torch.ones(shape).half(), torch.ones(6, *tail).half()
        assert channel_rms_silu(x, t, t, policy=policy).shape == x.shape


def test_empty_zero_and_special():
    weight = torch.ones(6).half()
    assert channel_rms_silu(torch.zeros(2, 6, 0, 4).half(), weight).shape == (2, 6, 0, 4)
    assert not channel_rms_silu(torch.zeros(1, 6, 2, 2).half(), weight).any()
    x = torch.ones(1, 6, 3, 1).half()
    x[0, 1, 0], x[0, 2, 1] = torch.nan, torch.inf
    got = channel_rms_silu(x, weight, silu=False)[0, :, :, 0]
    assert got[:, 0].isnan().all()
    assert got[:, 1].isnan().tolist() == [False, False, True, False, False, False]
    assert got[:, 2].isfinite().all()


def test_modes():
    x, weight = torch.randn(1, 6, 2, 2).half(), torch.ones(6).half()
    LEDGER.clear()
    OPS["channel_rms_silu"].forget()
    channel_rms_silu(x, weight, policy=KernelPolicy.of("auto", channel_rms_silu="auto"))
    assert [(r.op, r.reason) for r in LEDGER.refusals] == [("channel_rms_silu", "tensor is on the CPU")]
    with pytest.raises(KernelRefused, match="on the CPU"):
        channel_rms_silu(x, weight, policy=KernelPolicy.of("on"))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_compile_and_registration(memory_format):
    x, weight = torch.randn(2, 8, 3, 4, 5).half().to(memory_format=memory_format), torch.randn(8, 1, 1, 1).half()

    def block(x, weight):
        return channel_rms_silu(channel_rms_silu(x, weight) + x, weight, silu=False)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x, weight)
    torch.testing.assert_close(compiled, block(x, weight), rtol=0, atol=0)
    torch.library.opcheck(OPS["channel_rms_silu"].traced, (x, weight, None, True, KernelPolicy().token))
