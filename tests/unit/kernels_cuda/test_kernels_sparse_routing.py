"""choose_blocks without a GPU: equal scores, and what attention makes of its lists."""

from __future__ import annotations

import pytest
import torch

from fusestream.kernels_cuda import KernelPolicy, KernelRefused, attention, choose_blocks
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.attention import sparse_routing as op


def inputs(b, s, t, h, hk, d, dtype=torch.float32):
    return tuple(torch.randn(b, n, heads, d).to(dtype) for n, heads in ((s, h), (t, hk), (t, hk)))


def test_equal_scores_go_to_the_earlier_block_and_nan_goes_first():
    q, k, v = inputs(1, 128, 640, 1, 1, 8)
    k[:] = 1
    blocks, _ = choose_blocks(q, k, v, most=3, near=0, sinks=0)
    whole = set(range(10))  # one query block: the diagonal is everywhere
    assert set(blocks.keys[0, 0, 0, : int(blocks.counts)].tolist()) == whole
    q, k, v = inputs(1, 1280, 1280, 1, 1, 8)
    k[:] = 1
    blocks, _ = choose_blocks(q, k, v, most=5, near=0, sinks=0)
    assert blocks.keys[0, 0, 9, : int(blocks.counts[0, 0, 9])].tolist() == [0, 1, 2, 18, 19]
    k[0, 7 * 64] = torch.nan
    blocks, _ = choose_blocks(q, k, v, most=3, near=0, sinks=0)
    assert blocks.keys[0, 0, 9, : int(blocks.counts[0, 0, 9])].tolist() == [7, 18, 19]


def test_all_blocks_are_dense_attention_and_half_with_a_tail_is_near_it():
    """Queries that look at few blocks, as those of trained models do."""
    q, k, v = inputs(1, 1100, 1100, 2, 2, 64)
    near = torch.linspace(0, 12, 1100)[:, None] + torch.arange(32) * 0.7
    wave = torch.cat((near.sin(), near.cos()), -1)[None, :, None]
    q, k = q * 0.3 + wave, k * 0.3 + wave
    dense = attention(q, k, v)
    blocks, tail = choose_blocks(q, k, v, most=99)
    torch.testing.assert_close(attention(q, k, v, blocks=blocks, tail=tail), dense, atol=1e-6, rtol=1e-5)
    blocks, tail = choose_blocks(q, k, v, most=9)
    assert blocks.counts.float().mean() < 10
    with_tail = (attention(q, k, v, blocks=blocks, tail=tail) - dense).norm() / dense.norm()
    without = (attention(q, k, v, blocks=blocks) - dense).norm() / dense.norm()
    assert with_tail < 0.7 * without < 0.2


def test_every_obstacle_is_spoken():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
    long = torch.empty_strided((1, 64 * 8192 + 1, 1, 64), (0, 0, 0, 1), dtype=torch.float16)
    one = torch.zeros(1, 8, 1, 64, dtype=torch.float16)
    cases = [
        ((q.float(), q, q), "q is float32"),
        (tuple(torch.zeros(1, 8, 2, 80).half() for _ in range(3)), "heads have 80 elements"),
        ((q, q, q.transpose(1, 3).contiguous().transpose(1, 3)), "v: elements of a head are 16 apart"),
        ((one, long, long), "8193 blocks of keys"),
    ]
    for tensors, words in cases:
        assert words in next(op.obstacles(Call("choose_blocks", tensors, (1, 1, 1, None)))), words
    assert next(op.obstacles(Call("choose_blocks", (q, q, q), (1, 1, 1, None))), None) is None
    with pytest.raises(KernelRefused, match="tensor is on the CPU"):
        choose_blocks(q, q, q, most=1, policy=KernelPolicy.of("on"))
