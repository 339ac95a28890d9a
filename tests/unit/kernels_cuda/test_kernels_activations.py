"""silu, gelu, silu_mul and gelu_mul: what would overflow, and how tensors are seen as tiles."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import gelu_mul, silu_mul
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.elementwise import activations
from fusestream.kernels_cuda.ops.views.tiles import Tiles, packed, tiles


def test_scale_keeps_what_would_overflow():
    """T5: gate and up fit fp16, their product does not, its 1/16 does, with the same digits."""
    gate = torch.tensor([1000.0, 3.0, 60000.0, 60000.0]).half()
    up = torch.tensor([900.0, 5.0, 60000.0, -60000.0]).half()
    assert gelu_mul(gate, up).tolist()[0] == math.inf
    small = gelu_mul(gate, up, scale=1 / 16)
    assert small[0] == 56250 and small[2] == math.inf
    assert gelu_mul(gate, up, scale=1 / 16, saturate=True).tolist()[2:] == [65504, -65504]
    assert small[1] * 16 == gelu_mul(gate, up)[1]
    nan = torch.tensor([math.nan]).half()
    assert silu_mul(nan, nan, saturate=True).isnan().all()


def test_a_part_of_a_buffer_is_written_where_it_lies():
    x, room = torch.zeros(2, 5, 8).half(), torch.zeros(2, 7, 20).half()
    call = Call("silu_mul_", (room[:, 1:6, 8:16], x, x), ("silu", "split", 0.5, True))
    assert next(activations.obstacles(call), None) is None


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


def test_contiguous_tensors_are_one_row():
    assert tiles((2, 3, 8), packed((2, 3, 8))) == Tiles(1, 1, 48, ((0, 0, 1),))
    assert tiles((2, 3, 8), (48, 16, 1)) == Tiles(1, 6, 8, ((0, 16, 1),))
    assert tiles((2, 4, 6, 6), (144, 36, 6, 1), (0, 1, 0, 0)) == Tiles(2, 4, 36, ((144, 36, 1), (0, 1, 0)))
    assert tiles((1, 1), (1, 1)).width == 1
    assert tiles((2, 4, 8), (64, 16, 2)).wide((2,)) and not tiles((2, 4, 8), (64, 15, 1)).wide()


@pytest.mark.parametrize(
    ("width", "grid", "threads"),
    [(1, (1, 1, 1), 32), (8960, (3, 1, 1), 192), (8192, (2, 1, 1), 256), (2**34, (2**22, 1, 1), 256)],
)
def test_chunks(width, grid, threads):
    assert Tiles(1, 1, width, ()).grid(wide=width > 8) == (grid, threads)
