"""How ops see tensors: tiles, planes of images, chunks of keys, and whether two views share memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import KernelPolicy, gated_residual_, rms_rope_
from fusestream.kernels_cuda.ops.attention import linear_attention
from fusestream.kernels_cuda.ops.views.checks import overlap
from fusestream.kernels_cuda.ops.views.planes import planes
from fusestream.kernels_cuda.ops.views.tiles import packed, tiles


@settings(max_examples=examples(100), deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=5), order=st.randoms(), gap=st.integers(0, 3))
def test_tiles_address_every_element(shape, order, gap):
    """The merged view meets the same addresses in the same order as the shape and strides it was made from."""
    dims = list(range(len(shape)))
    order.shuffle(dims)
    wide = torch.empty([*(shape[i] for i in dims[:-1]), shape[dims[-1]] + gap])[..., : shape[dims[-1]]]
    back = [dims.index(i) for i in range(len(shape))]
    x = wide.permute(back)
    shared = torch.empty([n if order.random() < 0.5 else 1 for n in shape]).expand(shape)
    view = tiles(shape, x.stride(), shared.stride(), packed(shape))
    if isinstance(view, str):
        assert "do not fold" in view
        return
    for t, place in zip((x, shared), view.places, strict=False):
        met = [
            sum(i * s for i, s in zip(index, place, strict=True))
            for index in torch.cartesian_prod(
                *(torch.arange(n) for n in (view.batches, view.rows, view.width))
            ).tolist()
        ]
        index = torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape)).tolist()
        assert met == [sum(i * s for i, s in zip(each, t.stride(), strict=True)) for each in index]


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


@pytest.mark.parametrize("tokens", [1, 31, 255, 256, 257, 32760, 10**6])
@pytest.mark.parametrize("wanted", [0, 1, 7, 264])
def test_chunks_cover_the_keys(tokens, wanted):
    chunk = linear_attention.chunk_of(tokens, wanted)
    chunks = -(-tokens // chunk)
    assert chunk % linear_attention.TOGETHER == 0 and chunks <= max(1, wanted)
    assert chunks == 1 or chunk >= linear_attention.CHUNK


def strided(data):
    """Two views of one buffer, any strides, and the bytes each covers."""
    buffer = torch.zeros(4096, dtype=torch.uint8)
    views, bytes_of = [], []
    for _ in range(2):
        dtype = data.draw(st.sampled_from([torch.float16, torch.float32]))
        sizes = data.draw(st.lists(st.integers(1, 4), max_size=3))
        strides = [data.draw(st.integers(0, 12)) for _ in sizes]
        typed = buffer.view(dtype)
        view = typed.as_strided(sizes, strides, data.draw(st.integers(0, 40)))
        places = torch.arange(typed.numel()).as_strided(sizes, strides, view.storage_offset()).flatten().tolist()
        unit = view.element_size()
        views.append(view)
        bytes_of.append({place * unit + byte for place in places for byte in range(unit)})
    return views, bytes_of


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_overlap_is_exact(data):
    (a, b), (of_a, of_b) = strided(data)
    assert overlap(a, b) == overlap(b, a) == bool(of_a & of_b)


def test_overlap_of_thirds_is_found_fast():
    packed = torch.empty(2, 32760, 3, 40, 128, dtype=torch.float16)
    q, k, _ = packed.unbind(2)
    assert not overlap(q, k) and overlap(q, packed) and overlap(q[:, 5:], q[:, :6])
    assert not overlap(q.transpose(1, 2), k) and not overlap(q[:, :5], q[:, 5:])
    assert not overlap(packed[..., :64], packed[..., 64:])


@pytest.mark.parametrize("policy", [KernelPolicy(), KernelPolicy.of("off")], ids=["reference", "stock"])
def test_rows_between_others_and_itself_are_a_place_of_its_own(policy):
    x = torch.ones(4, 6, 2, 16).half()
    gated_residual_(x[::2], x[1::2], policy=policy)
    rms_rope_(x[:, :3], x[:, 3:], eps=1e-6, policy=policy)
    rms_rope_(x[:, 0::2], x[:, 1::2], eps=1e-6, policy=policy)
    there = torch.ones(2, 6, 8).half()
    gated_residual_(there, there, policy=policy)  # element for element
    assert (there == 2).all()
