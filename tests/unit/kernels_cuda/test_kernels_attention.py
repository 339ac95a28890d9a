"""Attention without a GPU: lists of blocks and their choice, tails, and which of torch's kernels."""

from __future__ import annotations

import contextlib

import pytest
import torch
from contract.launches import Recorder
from contract.op_samples.attention import by_hand
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusestream.kernels_cuda import BlockList, KernelPolicy, Tail, attention, choose_blocks
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.attention import attention as op
from fusestream.kernels_cuda.ops.attention import int8_heads, sdpa
from fusestream.kernels_cuda.ops.attention.attention_operands import Operands, arguments, of_heads
from fusestream.kernels_cuda.ops.attention.sdpa import _SWITCHES, BACKENDS, alone

OFF = KernelPolicy.of("off")


def inputs(b, s, t, h, hk, d, dtype=torch.float32):
    return tuple(torch.randn(b, n, heads, d).to(dtype) for n, heads in ((s, h), (t, hk), (t, hk)))


def test_long_queries_are_cut(monkeypatch):
    """The reference works through the queries a thousand at a time; where it cuts must not show."""
    q, k, v = inputs(2, 11, 9, 2, 1, 8)
    keys = torch.tensor([[[[0, 1], [1, 0], [2, 2]]]], dtype=torch.int32)
    blocks = BlockList(keys, torch.tensor([[[2, 1, 1]]], dtype=torch.int32), 4, 3)
    whole = attention(q, k, v, causal=True, blocks=blocks)
    monkeypatch.setattr(op, "REFERENCE_ROWS", 3)
    torch.testing.assert_close(whole, attention(q, k, v, causal=True, blocks=blocks), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(whole.double(), by_hand(q, k, v, causal=True, blocks=blocks), atol=2e-6, rtol=1e-5)


def test_a_tail_counts_as_often_as_its_block_has_keys():
    """Keys and values that are equal within a block: their mean stands for them exactly. Of others it does not."""
    q, k, v = inputs(2, 20, 5, 4, 2, 16)
    means = k.clone(), v.clone()
    k, v = (t.repeat_interleave(8, 1)[:, :37] for t in (k, v))  # the last block is short
    keys = torch.tensor([[[[4, 2, 9], [4, 9, 9], [0, 3, 4]]]], dtype=torch.int32)
    counts = torch.tensor([[[2, 1, 3]]], dtype=torch.int32)
    words = torch.tensor([[[[0b10100, 0], [0b10000, 0], [0b11001, 0]]]], dtype=torch.int32)
    sparse = {"blocks": BlockList(keys, counts, 8, 8), "tail": Tail(*means, words)}
    dense = attention(q, k, v)
    torch.testing.assert_close(attention(q, k, v, **sparse), dense, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(attention(q, k, v, **sparse, policy=OFF), dense, atol=2e-6, rtol=1e-5)
    k[:, 9] += 3
    assert (attention(q, k, v, **sparse)[:, :8] - attention(q, k, v)[:, :8]).abs().max() > 1e-3


def test_what_is_not_seen_does_not_matter():
    """NaN and Inf behind the key length stay there; in a key that is seen they come through."""
    q, k, v = inputs(1, 4, 6, 2, 2, 8)
    lengths = torch.tensor([4], dtype=torch.int32)
    want = attention(q, k, v, key_lengths=lengths)
    k[:, 4:], v[:, 4:] = torch.nan, torch.inf
    assert torch.equal(attention(q, k, v, key_lengths=lengths), want)
    v[0, 1, 0, 3] = torch.nan
    assert attention(q, k, v, key_lengths=lengths)[0, :, 0, 3].isnan().all()


@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_values_are_rounded_by_channel_less_their_mean(tokens):
    """To half a step; what is left of the mean is what the numbers' sums say; no number, a NaN in the scale of its channel."""
    v = torch.randn(2, tokens, 3, 64).half() + 4
    mean = v.float().mean(1)
    most = torch.maximum(v.float().amax(1) - mean, mean - v.float().amin(1))
    found = int8_heads.values_to_int8(v, mean, most)
    assert found.numbers.shape == (2, 3, -(-tokens // 64), 64, 64)
    flat = found.numbers.transpose(-1, -2).flatten(2, 3)
    assert not flat[:, :, tokens:].any() and torch.equal(flat.sum(2, dtype=torch.int32), found.sums)
    meant = flat[:, :, :tokens].float() * found.scales[:, :, None] + mean[:, :, None]
    assert ((meant - v.float().transpose(1, 2)).abs() <= found.scales[:, :, None] * 0.5001).all()
    mean[0, 1, 7] = torch.nan
    scales = int8_heads.values_to_int8(v, mean, most).scales
    assert scales.isnan().sum() == 1 and scales[0, 1, 7].isnan()


def test_scales_of_the_smallest_rows_have_a_product():
    """With that of the softmax: a product of zero times minus infinity, as keys have that are hidden, is no number."""
    rows = torch.tensor([1e-40, 1e-20, 0.0, 1.0]).bfloat16()[None, :, None, None].expand(1, 4, 1, 64)
    found = int8_heads.to_int8(rows)
    product = found.scales[..., None] * 0.1 * found.scales[..., None, :]
    assert (product > 2.0**-126).all() and found.numbers[0, 0, :, 0].tolist() == [0, 0, 0, 127]


def test_heads_that_belong_together_are_computed_alike(monkeypatch):
    """`turbo` rounds some heads at a time: what they need of a call is theirs alone, or shared by all."""
    q, k, v = inputs(2, 12, 20, 6, 3, 8)
    blocks = BlockList(
        torch.rand(2, 6, 3, 5).argsort(-1).int(), torch.randint(1, 6, (2, 6, 3), dtype=torch.int32), 4, 4
    )
    for asked in (
        {"mask": torch.rand(2, 6, 12, 20) > 0.4, "distance_bias": torch.randn(6, 31)},
        {"mask": torch.rand(12, 20) > 0.4, "key_lengths": torch.tensor([7, 20], dtype=torch.int32)},
        {"blocks": blocks, "tail": Tail(k[:, ::4], v[:, ::4], torch.randint(0, 32, (2, 6, 3, 2), dtype=torch.int32))},
    ):
        tensors, options = arguments(q, k, v, **asked)
        whole = op.reference(*tensors, *options)
        monkeypatch.setattr(int8_heads, "MOST_BYTES", 2 * (2 * 12 + 20) * 128)
        parts = list(int8_heads.pieces(q, k))
        assert [part[0] for part in parts] == [slice(0, 2), slice(2, 4), slice(4, 6)]
        for part in parts:
            torch.testing.assert_close(op.reference(*of_heads(tensors, *part), *options), whole[:, :, part[0]])
    monkeypatch.setattr(int8_heads, "MOST_BYTES", 10**9)
    assert list(int8_heads.pieces(q, k)) == [(slice(0, 6), slice(0, 3))]


@pytest.mark.parametrize("limit", [2**31 - 1, 2**31, 2**40])
def test_a_window_beyond_all_tokens_fits_32_bits(limit):
    """And what the kernels add to it: places of queries, and how far keys reach beyond them."""
    tensors, options = arguments(*inputs(1, 7, 300, 2, 2, 64, torch.float16), window=(limit, limit))
    call = Call("attention", tensors, options)
    params = op._launch(call, Operands.of(tensors, options), Recorder((8, 0)), op.PRECISE, 2).params
    assert 300 <= params.window_left < 2**20 and 300 <= params.window_right < 2**20
    free, settings = arguments(*tensors[:3])
    assert torch.equal(op.reference(*tensors, *options), op.reference(*free, *settings))


@pytest.mark.parametrize("size", [64, 192, 512])
def test_all_keys_of_a_listed_block_have_scales(size):
    """Also those behind the last key, which kernels for values in halves look at, 32 keys each: what lies behind the memory of all
    scales may be anything, and so may minus infinity times that."""
    count = -(-1030 // size)
    blocks = BlockList(torch.zeros(1, 2, 1, count).int(), torch.full((1, 2, 1), count).int(), 128, size)
    o = Operands.of(*arguments(*inputs(1, 100, 1030, 2, 2, 64, torch.float16), blocks=blocks))
    fields = op._of_8_bits(o, op.TURBO)
    assert fields["k_scale_batch"] == 2 * fields["k_scale_head"] >= 2 * count * size // 32


def test_cudnn_begins_for_tokens_that_fill_its_tiles_alike():
    assert [sdpa._few(n) for n in (1, 2, 77, 128, 512, 700, 4096)] == [1, 130, 205, 128, 128, 188, 128]


@pytest.mark.parametrize("backend", BACKENDS.values())
def test_one_backend_alone_and_all_as_before(backend: SDPBackend) -> None:
    def switched_on() -> list[bool]:
        return [is_on() for is_on, _ in _SWITCHES.values()]

    before = switched_on()
    with alone(backend):
        found = switched_on()
        with sdpa_kernel([backend]):
            assert found == switched_on()
    assert switched_on() == before
    _SWITCHES[backend][1](False)  # what somebody has switched off stays off
    try:
        with contextlib.suppress(ZeroDivisionError), alone(backend):
            raise ZeroDivisionError
        assert not _SWITCHES[backend][0]()
    finally:
        _SWITCHES[backend][1](True)


LISTS = BlockList(torch.zeros(1, 1, 2, 1, dtype=torch.int32), torch.ones(1, 1, 2, dtype=torch.int32), 4, 4)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"causal": True},
        {"window": (2, -1)},
        {"key_lengths": torch.tensor([3, 9], dtype=torch.int32)},
        {"mask": torch.ones(1, 1, 7, 9, dtype=torch.bool)},
        {"mask": torch.zeros(1, 1, 1, 9)},
        {"distance_bias": torch.zeros(2, 15), "causal": True},
        {"blocks": LISTS},
        {"blocks": LISTS, "tail": Tail(*(torch.zeros(2, 3, 2, 8),) * 2, torch.zeros(1, 1, 2, 2, dtype=torch.int32))},
    ],
    ids=lambda asked: " ".join(asked) or "plain",
)
def test_torchs_checks_see_a_mask_of_the_same_type_and_size_that_takes_no_memory(asked):
    tensors, options = arguments(*inputs(2, 7, 9, 2, 2, 8), **asked)
    o = Operands.of(tensors, options)
    real, seen = sdpa.dense_mask(o), sdpa.stand_in_mask(o)
    assert (real is None) == (seen is None)
    if real is not None:
        assert (seen.dtype, seen.stride(-1)) == (real.dtype, 1) and seen.shape == (2, 2, 7, real.shape[-1])
        assert seen.untyped_storage().nbytes() == real.shape[-1] * seen.element_size()


# ------------------------------------------------------------------------------------------ where torch has no kernel for it


def of_wide_heads(tokens, **options):
    tensors, settings = arguments(*inputs(1, tokens, tokens, 1, 1, 512), **options)
    return Operands.of(tensors, settings)


def test_torchs_math_goes_by_some_queries_at_a_time(monkeypatch):
    """The same numbers, and never the scores of all pairs."""
    o, lengths, run = of_wide_heads(83), [], sdpa.run_sdpa
    whole = run(o, (SDPBackend.MATH,))
    monkeypatch.setattr(sdpa, "MOST_SCORES", 20 * 83)
    monkeypatch.setattr(sdpa, "run_sdpa", lambda o, *a: lengths.append(o.q.shape[1]) or run(o, *a))
    torch.testing.assert_close(sdpa.run_math(o), whole, atol=1e-6, rtol=1e-5)
    assert lengths == [20, 20, 20, 20, 3]


def test_what_masks_look_at_stays_whole(monkeypatch):
    monkeypatch.setattr(sdpa, "MOST_SCORES", 1)
    o = of_wide_heads(9, causal=True)
    torch.testing.assert_close(sdpa.run_math(o), sdpa.run_sdpa(o, (SDPBackend.MATH,)), atol=0, rtol=0)


@pytest.mark.parametrize("kernels", [False, True], ids=["math alone", "a kernel"])
def test_math_is_bounded_where_torch_has_no_kernel(monkeypatch, kernels):
    called = []
    monkeypatch.setattr(sdpa, "_only_math", lambda _: not kernels)
    for name in ("run_math", "run_sdpa"):
        monkeypatch.setattr(sdpa, name, lambda *_, name=name: called.append(name))
    tensors, settings = arguments(*inputs(1, 3, 3, 1, 1, 8))
    op.stock(*tensors, *settings)
    assert called == ["run_sdpa" if kernels else "run_math"]


# ---------------------------------------------------------------------------------------------------- sparse routing


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


@pytest.mark.parametrize("tokens", [2560, 2530])
@pytest.mark.parametrize("sinks", [0, 3])
def test_a_row_of_nan_has_room_for_all_that_it_visits(tokens, sinks):
    """The best of it are the first, and those that are visited in any case lie elsewhere: the kernel writes both."""
    q, k, v = inputs(1, tokens, tokens, 1, 1, 8)
    q[0, -30:] = torch.nan
    blocks, tail = choose_blocks(q, k, v, most=10, sinks=sinks)
    count = int(blocks.counts[0, 0, -1])
    assert 10 < count <= blocks.keys.shape[-1]
    visited = (~tail.unvisited[0, 0, -1]).nonzero().flatten()
    assert blocks.keys[0, 0, -1, :count].tolist() == visited.tolist()


@pytest.mark.parametrize("tokens", [1280, 1217])
def test_the_best_alone_are_visited_wherever_they_lie(tokens):
    """Neither neighbours nor the first block nor a last one, whole or short; by the product of the means."""
    q, k, v = inputs(2, tokens, tokens, 2, 2, 8)
    blocks, _ = choose_blocks(q, k, v, most=3, near=None)
    assert blocks.keys.shape[-1] == 3 and (blocks.counts == 3).all()
    of_q, of_k = (
        torch.stack([part.mean(1) for part in t.double().split(size, 1)], 1) for t, size in ((q, 128), (k, 64))
    )
    scores = torch.einsum("bihd,bjhd->bhij", of_q, of_k)
    assert torch.equal(blocks.keys.sort(-1).values.long(), scores.topk(3).indices.sort(-1).values)


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


def test_each_head_has_the_blocks_that_its_bound_takes():
    """Heads that look at few blocks, and heads that look at all: with as many blocks on average the worst head is nearer to dense
    than by one number for all, and in no row do the keys that are left to means weigh a tenth more than asked: the weight that is
    bounded is that of the means, near to which they are."""
    generator = torch.Generator().manual_seed(0)
    alike, other = torch.randn(2, 1, 20, 4, 64, generator=generator).repeat_interleave(64, 2)
    noise = torch.randn(3, 1, 1280, 4, 64, generator=generator)
    q = (alike + 0.5 * noise[0]) * torch.tensor([0.5, 1.0, 1.5, 2.0])[:, None]
    k, v = alike + 0.5 * noise[1], other + noise[2]
    dense = attention(q, k, v)
    weights = (q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2) / 8).softmax(-1).unflatten(-1, (-1, 64)).sum(-1)

    def worst(**asked):
        blocks, tail = choose_blocks(q, k, v, **asked)
        off = (attention(q, k, v, blocks=blocks, tail=tail) - dense).norm(dim=(1, 3)) / dense.norm(dim=(1, 3))
        left = (weights.unflatten(2, (-1, 128)).mean(3) * tail.unvisited).sum(-1)
        return float(off.max()), blocks.counts.float().mean((0, 2)), float(left.max())

    before = 1.0
    for bound in (0.1, 0.05, 0.03):
        off, counts, left = worst(most=0, left=bound)
        assert left <= 1.1 * bound and off < before and (counts.diff() <= 0).all() and counts[0] > 1.5 * counts[3]
        assert off < 0.7 * worst(most=round(float(counts.mean())))[0]
        before = off


def test_of_equal_weights_the_earlier_blocks_are_visited():
    q, k, v = inputs(1, 1280, 1280, 1, 1, 8)
    k[:] = 1
    asked = {"near": 0, "sinks": 0, "left": 0.77}  # 4.6 of 20 blocks
    blocks, _ = choose_blocks(q, k, v, most=0, **asked)
    assert blocks.keys[0, 0, 9, : int(blocks.counts[0, 0, 9])].tolist() == [0, 1, 2, 18, 19]
    blocks, _ = choose_blocks(q, k, v, most=7, **asked)
    assert blocks.counts[0, 0, 9] == 7, "`most` are visited at least"
    k[0, 7 * 64] = torch.nan
    blocks, _ = choose_blocks(q, k, v, most=0, **asked)
    assert blocks.keys[0, 0, 9, : int(blocks.counts[0, 0, 9])].tolist() == [0, 1, 2, 7, 18, 19], "and weighs nothing"
