"""attention without a GPU: lists of blocks, tails, what is refused, and which of torch's kernels."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusestream.kernels_cuda import OPS, STANDARD, BlockList, KernelPolicy, KernelRefused, Tail, attention
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.attention import attention as op
from fusestream.kernels_cuda.ops.attention import int8_heads, sdpa
from fusestream.kernels_cuda.ops.attention.attention_operands import Operands, arguments, of_heads
from fusestream.kernels_cuda.ops.attention.sdpa import _SWITCHES, BACKENDS, alone

OFF = KernelPolicy.of("off")
ON = KernelPolicy.of("on")


def inputs(b, s, t, h, hk, d, dtype=torch.float32):
    return tuple(torch.randn(b, n, heads, d).to(dtype) for n, heads in ((s, h), (t, hk), (t, hk)))


def by_hand(q, k, v, mask=None, *, scale=None, causal=False, window=(-1, -1), lengths=None, bias=None, blocks=None):
    """The definition in float64, query by query and key by key."""
    b, s, h, d = q.shape
    t, group = k.shape[1], h // k.shape[2]
    scale = d**-0.5 if scale is None else scale
    out = torch.zeros(b, s, h, d, dtype=torch.float64)
    full = None if mask is None else mask.expand(b, h, s, t)

    def is_seen(n, head, i, j):
        at = i + t - s  # the key that stands where the query stands
        if (causal and j > at) or (window[0] >= 0 and j < at - window[0]) or (window[1] >= 0 and j > at + window[1]):
            return False
        if lengths is not None and j >= lengths[n]:
            return False
        if blocks is not None:
            row = min(n, blocks.keys.shape[0] - 1), min(head, blocks.keys.shape[1] - 1), i // blocks.rows
            if j // blocks.size not in blocks.keys[row][: int(blocks.counts[row])].tolist():
                return False
        return full is None or full.dtype is not torch.bool or bool(full[n, head, i, j])

    def score(n, head, i, j):
        value = scale * (q[n, i, head].double() @ k[n, j, head // group].double())
        if full is not None and full.dtype is not torch.bool:
            value = value + full[n, head, i, j].double()
        return value if bias is None else value + bias[head, j - i + s - 1].double()

    for n, head, i in itertools.product(range(b), range(h), range(s)):
        seen = [j for j in range(t) if is_seen(n, head, i, j)]
        if seen:
            weights = torch.softmax(torch.stack([score(n, head, i, j) for j in seen]), 0)
            out[n, i, head] = weights @ v[n, seen, head // group].double()
    return out


def test_long_queries_are_cut(monkeypatch):
    """The reference works through the queries a thousand at a time; where it cuts must not show."""
    q, k, v = inputs(2, 11, 9, 2, 1, 8)
    keys = torch.tensor([[[[0, 1], [1, 0], [2, 2]]]], dtype=torch.int32)
    blocks = BlockList(keys, torch.tensor([[[2, 1, 1]]], dtype=torch.int32), 4, 3)
    whole = attention(q, k, v, causal=True, blocks=blocks)
    monkeypatch.setattr(op, "REFERENCE_ROWS", 3)
    torch.testing.assert_close(whole, attention(q, k, v, causal=True, blocks=blocks), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(whole.double(), by_hand(q, k, v, causal=True, blocks=blocks), atol=2e-6, rtol=1e-5)


def test_a_full_block_list_changes_nothing():
    q, k, v = inputs(1, 20, 21, 2, 2, 16)
    keys = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3).contiguous()
    blocks = BlockList(keys, torch.full((1, 1, 3), 3, dtype=torch.int32), 8, 8)
    torch.testing.assert_close(attention(q, k, v, blocks=blocks), attention(q, k, v), atol=1e-6, rtol=1e-6)


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


def test_rows_without_keys_are_zero():
    q, k, v = inputs(2, 4, 5, 2, 2, 8)
    out = attention(q, k, v, key_lengths=torch.tensor([0, 5], dtype=torch.int32))
    assert not out[0].any() and out[1].all()
    assert not attention(q, k, v, torch.zeros(4, 5, dtype=torch.bool)).any()
    causal = attention(q, k[:, :2], v[:, :2], causal=True)  # the first two queries come before every key
    assert not causal[:, :2].any() and causal[:, 2:].all()
    assert not attention(q, k[:, :0], v[:, :0]).any()


def test_what_is_not_seen_does_not_matter():
    """NaN and Inf behind the key length stay there; in a key that is seen they come through."""
    q, k, v = inputs(1, 4, 6, 2, 2, 8)
    lengths = torch.tensor([4], dtype=torch.int32)
    want = attention(q, k, v, key_lengths=lengths)
    k[:, 4:], v[:, 4:] = torch.nan, torch.inf
    assert torch.equal(attention(q, k, v, key_lengths=lengths), want)
    v[0, 1, 0, 3] = torch.nan
    assert attention(q, k, v, key_lengths=lengths)[0, :, 0, 3].isnan().all()


def call(*operands, policy=STANDARD, **asked):
    return Call("attention", *arguments(*operands, **asked), policy)


def test_every_obstacle_is_spoken():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
    lists = torch.zeros(1, 1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, dtype=torch.int32)
    listed = {"blocks": BlockList(*lists, 128, 64)}
    bits = torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    wide = torch.zeros(1, 8, 1, 384, dtype=torch.float16)
    turned = q.transpose(1, 3).contiguous().transpose(1, 3)
    cases = [
        (call(q.float(), q, q), "q is float32"),
        (call(*(torch.zeros(1, 8, 2, 80).half() for _ in range(3))), "heads have 80 elements"),
        (call(wide, wide, wide, torch.zeros(8, 8).bool()), "heads of 384 elements are served without"),
        (call(q, q, q, scale=-1.0), "scale is -1.0"),
        (call(turned, q, q), "elements of a head are 16 apart"),
        (call(torch.zeros(1, 8, 2, 68).half()[..., 1:65], q, q), "rows do not start at multiples of 16 bytes"),
        (call(q, q, q, torch.zeros(8, 8)), "mask is float32"),
        (call(q, q, q, torch.zeros(8, 1).half()), "mask: the keys of"),
        (call(q, q, q, key_lengths=torch.zeros(1)), "key_lengths is float32"),
        (call(q, q, q, distance_bias=torch.zeros(2, 15).half()), "distance_bias is float16"),
        (call(q, q, q, distance_bias=torch.zeros(2, 30)[:, ::2]), "distance_bias is not contiguous"),
        (call(q, q, q, blocks=BlockList(*lists, 64, 64)), "blocks are 64 x 64"),
        (call(q, q, q, **listed, tail=Tail(q[:, :1].float(), q[:, :1], bits)), "tail_k is float32"),
        (call(q, q, q, **listed, tail=Tail(q[:, :1], turned[:, :1], bits)), "tail_v: elements of a head"),
        (call(q, q, q, **listed, tail=Tail(q[:, :1], q[:, :1], bits.long())), "visited is int64"),
    ]
    for each, words in cases:
        assert words in next(op.obstacles(each)), words
    assert next(op.obstacles(call(q, q, q)), None) is None
    with pytest.raises(KernelRefused, match="tensor is on the CPU"):
        attention(q, q, q, policy=ON)


def test_fast_is_an_offer():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
    fast = call(q, q, q, policy=KernelPolicy.of("auto", precision="fast"))
    assert [str(way) for way in op.ways(fast)] == ["fast", "precise"]
    assert [str(way) for way in op.ways(call(q, q, q))] == ["precise"]
    assert op.shape_class(fast) != op.shape_class(call(q, q, q))


def test_turbo_rounds_many_keys_of_heads_it_has_kernels_for():
    turbo = KernelPolicy.of("auto", precision="turbo")
    few, many, wide = (torch.zeros(1, n, 1, d, dtype=torch.float16) for n, d in ((1024, 64), (1025, 64), (2000, 384)))
    assert [str(way) for way in op.ways(call(few, many, many, policy=turbo))] == [
        "turbo_half",
        "turbo",
        "fast",
        "precise",
    ]
    for keys in (few, wide):
        assert [str(way) for way in op.ways(call(keys, keys, keys, policy=turbo))] == ["fast", "precise"]


@pytest.mark.parametrize(
    ("capability", "way"), [((7, 5), "turbo_half"), ((8, 6), "turbo_half"), ((12, 0), "turbo_half"), ((9, 0), "turbo")]
)
def test_half_sums_where_they_pay(capability, way):
    many = torch.zeros(1, 1025, 1, 64, dtype=torch.float16)
    turbo = call(many, many, many, policy=KernelPolicy.of("on", precision="turbo"))
    assert str(op.first_way(turbo, SimpleNamespace(capability=capability))) == way


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


def test_the_candidates_are_in_stocks_order():
    names = [candidate.name for candidate in OPS["attention"].candidates]
    assert names == ["cuda", "products in stripes", "torch flash", "torch cudnn", "torch mem-efficient", "stock"]


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
