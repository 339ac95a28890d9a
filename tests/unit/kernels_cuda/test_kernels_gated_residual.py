"""gated_residual and gated_residual_: shapes of videos, streams that saturate, and which memory overlaps."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import KernelPolicy, gated_residual, gated_residual_
from fusestream.kernels_cuda.ops.views.checks import overlap

OFF = KernelPolicy.of("off")


def test_video_shapes():
    x, y, gate = torch.randn(2, 3, 4, 8).half(), torch.randn(2, 3, 4, 8).half(), torch.randn(2, 3, 1, 8).half()
    want = (x.double() + gate.double() * y.double()).half()
    assert torch.equal(gated_residual(x, y, gate), want)
    for policy in (KernelPolicy(), OFF):
        there = x.clone()
        gated_residual_(there, y, gate, policy=policy)
        torch.testing.assert_close(there, want, rtol=2e-3, atol=2e-3)


def test_rows_between_others_and_itself_are_a_place_of_its_own():
    x = torch.ones(4, 6, 8).half()
    for policy in (KernelPolicy(), OFF):
        gated_residual_(x[::2], x[1::2], policy=policy)
        there = torch.ones(2, 6, 8).half()
        gated_residual_(there, there, policy=policy)  # element for element
        assert (there == 2).all()


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


def test_a_saturating_stream_stays_finite():
    """Flux in fp16: what its blocks add does not always fit. A NaN is no large number, and an fp32 stream holds all of it."""
    x = torch.tensor([[60000, -60000, 60000, 1.0, torch.nan, 60000]]).half()
    y = torch.tensor([[60000, -60000, torch.inf, 1.0, 1.0, -60000]]).half()
    want = torch.tensor([[65504, -65504, 65504, 2.0, torch.nan, 0.0]]).half()
    for policy in (KernelPolicy(), OFF):
        for gate in (None, torch.ones(6).half()):
            got = gated_residual(x, y, gate, saturate=True, policy=policy)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            there = x.clone()
            gated_residual_(there, y, gate, saturate=True, policy=policy)
            torch.testing.assert_close(there, want, rtol=0, atol=0, equal_nan=True)
        assert gated_residual(x.float(), y.float(), saturate=True, policy=policy)[0, 0] == 120000
