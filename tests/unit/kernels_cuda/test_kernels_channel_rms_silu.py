"""channel_rms_silu without a GPU: layouts, tiles, pixels of zeros."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import channel_rms_silu
from fusestream.kernels_cuda.ops.norm.channel_rms_silu import lane_shape, tile_shape
from fusestream.kernels_cuda.ops.views.planes import planes, strides_like

WAN_WIDTHS = (96, 192, 384, 160, 256, 320, 512, 640, 1024)


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


def test_pixels_of_zeros_stay():
    assert not channel_rms_silu(torch.zeros(1, 6, 2, 2).half(), torch.ones(6).half()).any()
