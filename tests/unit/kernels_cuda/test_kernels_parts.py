"""rms_parts, join_sums and rms_rope_sums without a GPU: parts, what is too large, threads."""

from __future__ import annotations

import math

import pytest
import torch

from fusestream.kernels_cuda import KernelPolicy, join_sums, rms_parts, rms_rope_sums
from fusestream.kernels_cuda.ops.norm.rms_parts import THREADS, WIDEST, threads_for
from fusestream.kernels_cuda.ops.views.parts import split

EPS = 1e-6
OFF = KernelPolicy.of("off")
POLICIES = (KernelPolicy(), OFF)
LARGEST = 65504


def added(parts):
    assert parts.dtype is torch.float16 and parts.shape[0] == 2 and parts.is_contiguous()
    return parts[0].double() + parts[1].double()


def sums(*shape, scale=1.0):
    """As a product of two parts leaves them: the second is small."""
    return torch.randn(2, *shape) * torch.tensor([scale, scale * 2**-11]).view(2, *[1] * len(shape))


def tables(tokens, d, batch=1):
    angle = torch.rand(batch, 1, tokens, d // 2) * 6
    return angle.cos(), angle.sin()


def test_parts_add_up():
    x = torch.cat((torch.randn(999) * 100, torch.tensor([65503.9, 65519.0, -7e4, math.inf, -math.inf, 1e-9])))
    value, rest = split(x)
    assert torch.equal(value, x.clamp(-LARGEST, LARGEST).half())
    error = (value.double() + rest.double() - x.clamp(-LARGEST, LARGEST).double()).abs()
    assert (error <= x.clamp(-LARGEST, LARGEST).abs() * 2**-22 + 2**-25).all()
    assert not rest[-5:-1].any(), "nothing is left of what is too large"
    assert split(torch.tensor([math.nan])).isnan().all()


def test_large_and_special_values():
    """What does not fit saturates with nothing left, an infinity too; NaN stays where it is."""
    numbers = torch.tensor([1e5, -1e5, math.inf, -math.inf, math.nan, 65504.0, 1.0, 300.0])
    first = torch.stack((numbers, torch.zeros(8)))[:, None]
    want = torch.tensor([LARGEST, -LARGEST, LARGEST, -LARGEST, math.nan, LARGEST, 1.0, 300.0])
    for policy in POLICIES:
        parts = join_sums(first, policy=policy)[:, 0]
        torch.testing.assert_close(parts[0].float(), want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(parts[1].isnan(), want.isnan()) and parts[1][~want.isnan()].count_nonzero() == 0
        kept = join_sums(first, first, activation="relu", scale=2.0**-6, policy=policy)[:, 0]
        assert added(kept)[[0, 5]].tolist() == [LARGEST, LARGEST] and added(kept)[7] == 300.0**2 / 64
        normed = rms_parts(torch.tensor([[1.0, 1.0]]), torch.tensor([1e5, math.nan]), eps=0.0, policy=policy)[:, 0]
        assert normed[0, 0] == LARGEST and normed[1, 0] == 0 and normed[:, 1].isnan().all()
        q = sums(1, 1, 2, 4)
        q[0, 0, 0, 0, 1] = math.nan
        ones = torch.ones(4) * 1e6
        turned, _ = rms_rope_sums(q, q, ones, ones, *tables(1, 4), eps=EPS, policy=policy)
        assert turned[0, 0, 0].isnan().all() and turned[0, 0, 1].isfinite().all()
        assert turned[0, 0, 1].abs().max() == LARGEST


def test_the_value_alone_is_the_first_part():
    first, second = sums(3, 5, 16, scale=3.0).chunk(2, -1)
    for policy in POLICIES:
        for other in (None, second):
            value = join_sums(first, other, activation="silu", parts=False, policy=policy)
            assert value.is_contiguous()
            assert torch.equal(value, join_sums(first, other, activation="silu", policy=policy)[0])


@pytest.mark.parametrize(("d", "whole"), [(8, True), (2560, True), (WIDEST, True), (1, False), (100_000, False)])
def test_threads_hold_a_row(d, whole):
    threads = threads_for(d, whole=whole)
    assert threads % 32 == 0 and threads <= THREADS and (not whole or threads * 16 >= d)
