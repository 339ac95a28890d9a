"""choose_blocks: the reference against the definition, and what attention makes of its lists."""

from __future__ import annotations

import pytest
import torch

from fusestream.kernels_cuda import KernelPolicy, KernelRefused, attention, choose_blocks
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.attention import sparse_routing as op


def inputs(b, s, t, h, hk, d, dtype=torch.float32):
    return tuple(torch.randn(b, n, heads, d).to(dtype) for n, heads in ((s, h), (t, hk), (t, hk)))


def by_hand(q, k, most, near, sinks, deviations):
    """The blocks of each row of (batch, head, query block), by the definition."""
    b, s, h, _ = q.shape
    group = h // k.shape[2]
    query_blocks, blocks = -(-s // 128), -(-k.shape[1] // 64)
    found = {}
    for n in range(b):
        for head in range(h):
            k_means = [k[n, j * 64 : j * 64 + 64, head // group].mean(0) for j in range(blocks)]
            for i in range(query_blocks):
                q_mean = q[n, i * 128 : i * 128 + 128, head].mean(0)
                scores = torch.stack([q_mean @ mean for mean in k_means])
                each = blocks / query_blocks
                chosen = {j for j in range(blocks) if j < sinks or i * each - near - 1 < j < (i + 1) * each + near}
                if k.shape[1] % 64:
                    chosen.add(blocks - 1)
                best = sorted(set(range(blocks)) - chosen, key=lambda j: (-float(scores[j]), j))
                chosen |= set(best[: max(most - len(chosen), 0)])
                if deviations is not None:
                    bar = scores.mean() + deviations * scores.std(correction=0)
                    chosen |= {j for j in range(blocks) if scores[j] > bar}
                found[n, head, i] = sorted(chosen)
    return found


@pytest.mark.parametrize(
    "sizes", [(1, 700, 700, 2, 2, 8), (2, 300, 2500, 4, 2, 16), (1, 1, 1, 1, 1, 8), (1, 640, 640, 1, 1, 8)]
)
@pytest.mark.parametrize(
    ("most", "near", "sinks", "deviations"), [(3, 1, 1, None), (0, 0, 0, 1.0), (2, 0, 0, None), (99, 2, 3, 0.5)]
)
def test_rows_visit_what_the_definition_says(sizes, most, near, sinks, deviations):
    q, k, v = (t.double() for t in inputs(*sizes))
    blocks, tail = choose_blocks(q, k, v, most=most, near=near, sinks=sinks, deviations=deviations)
    for (n, head, i), chosen in by_hand(q, k, most, near, sinks, deviations).items():
        count = int(blocks.counts[n, head, i])
        assert blocks.keys[n, head, i, :count].tolist() == chosen
        assert (~tail.unvisited[n, head, i]).nonzero().flatten().tolist() == chosen
    assert tail.visited.shape[-1] % 2 == 0
    torch.testing.assert_close(tail.k[:, 0], k[:, :64].mean(1))
    torch.testing.assert_close(tail.v[:, -1], v[:, (v.shape[1] - 1) // 64 * 64 :].mean(1))


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": torch.zeros(1, 4, 3, 8)}, "k: 3 heads do not go with q's 2"),
        ({"k": torch.zeros(2, 4, 2, 8)}, "batch and d are equal"),
        ({"v": torch.zeros(1, 5, 2, 8)}, "is not k's shape"),
        ({"most": -1}, "most is -1"),
        ({"near": -1}, "near is -1"),
        ({"sinks": -2}, "sinks is -2"),
        ({"deviations": float("nan")}, "deviations is nan"),
    ],
)
def test_what_makes_no_sense_is_named(change, words):
    given = {
        "q": torch.zeros(1, 4, 2, 8),
        "k": torch.zeros(1, 4, 2, 8),
        "v": torch.zeros(1, 4, 2, 8),
        "most": 1,
        **change,
    }
    with pytest.raises(ValueError, match=f"choose_blocks: .*{words}"):
        choose_blocks(given.pop("q"), given.pop("k"), given.pop("v"), **given)


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


def test_nothing_to_choose_from():
    q = torch.zeros(1, 130, 2, 64)
    blocks, tail = choose_blocks(q, q[:, :0], q[:, :0], most=2)
    assert blocks.keys.shape == (1, 2, 2, 0) and not blocks.counts.any() and tail.k.shape == (1, 0, 2, 64)
    blocks, _ = choose_blocks(q[:, :0], q, q, most=2)
    assert blocks.counts.shape == (1, 2, 0)


def test_compiles_as_one_node():
    q, k, v = inputs(1, 300, 300, 2, 2, 16)

    def run(q, k, v):
        blocks, tail = choose_blocks(q, k, v, most=2)
        return attention(q, k, v, blocks=blocks, tail=tail)

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v), run(q, k, v))
