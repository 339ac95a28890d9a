"""Attention as two products and a pass between them, without a GPU: the pass in torch, products in fp32."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.attention import attention as op
from fusestream.kernels_cuda.ops.attention import attention_products as products
from fusestream.kernels_cuda.ops.attention.attention_operands import arguments


def tensor_at(address, shape, dtype):
    """The memory at an address."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


class Card:
    """Launches the pass in torch, on plain memory."""

    index = 0

    def __init__(self):
        self.launched = []

    def kernel(self, *name):
        assert name == (products.UNIT, *products.KERNELS)
        return self

    def prepare(self, params, *, grid, block, shape):
        assert block == products.THREADS and shape

        def launch(*pointers):
            self.launched.append((grid[0], params.keys, bool(params.is_first)))
            rows, keys, d = grid[0], params.keys, params.d
            assert params.pitch % products.PITCH == 0 <= params.pitch - keys < products.PITCH
            assert not any(pointer % 16 for pointer in (pointers[0], pointers[1], pointers[4]))
            scores = tensor_at(pointers[0], (rows, params.pitch), torch.float32)[:, :keys]
            weights = tensor_at(pointers[1], (rows, params.pitch), torch.float16)[:, :keys]
            most, sums = (tensor_at(pointer, (rows,), torch.float32) for pointer in pointers[2:4])
            mixed = tensor_at(pointers[4], (rows, d), torch.float32)
            scale = params.scale_log2 / torch.tensor(2.0).log2().item() * torch.tensor(2.0).log().item()
            products.softmax_stripe(scores, weights, most, sums, mixed, scale, first=bool(params.is_first))

        return launch


@pytest.fixture
def card(monkeypatch):
    def multiply(out, x, weight, scale, *, added):
        made = x.float() @ weight.float().transpose(1, 2) * scale
        out.copy_(out + made if added else made)

    monkeypatch.setattr(products, "multiply", multiply)
    monkeypatch.setattr(
        products, "output", lambda shape, dtype, _: lambda: torch.full(tuple(shape), torch.nan, dtype=dtype)
    )
    monkeypatch.setattr(products, "STRIPE", 24)
    monkeypatch.setattr(products, "ROWS", 16)
    return Card()


def call(*tensors, **options):
    return Call("attention", *arguments(*tensors, **options))


def inputs(b, s, t, h, hk, d, size=1.0):
    return tuple(
        torch.randn(b, n, heads, d).mul(by).half() for n, heads, by in ((s, h, size), (t, hk, size), (t, hk, 1.0))
    )


@pytest.mark.parametrize(("s", "t"), [(16, 24), (33, 61), (7, 5), (40, 96), (1, 1)], ids=str)
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_stripes_add_up_to_the_whole(card, s, t, size):
    """Also with maxima that grow from stripe to stripe, heads that share keys, and rows that lie apart."""
    q, k, v = inputs(2, s, t, 4, 2, 256, size)
    k = torch.stack((k, k.flip(1)), 2)[:, :, 0]  # as views of a packed projection lie
    asked = call(q, k, v)
    got = products.plan(asked, card)(*asked.tensors)
    want = op.reference(*asked.tensors, *asked.options)
    assert got.shape == q.shape and got.is_contiguous()
    torch.testing.assert_close(got.float(), want.float(), atol=2e-3, rtol=2e-3)
    per_head = -(-s // 16) * -(-t // 24)
    assert len(card.launched) == 8 * per_head
    assert sum(first for *_, first in card.launched) == 8 * -(-s // 16)


def test_weights_of_half_a_million_keys_stay_in_range(card, monkeypatch):
    """Sums of weights exceed what fp16 holds, where all keys are alike."""
    monkeypatch.setattr(products, "STRIPE", 4096)
    q, k = torch.zeros(1, 1, 1, 256).half(), torch.zeros(1, 1 << 17, 1, 256).half()
    asked = call(q, k, torch.full_like(k, 3.0))
    got = products.plan(asked, card)(*asked.tensors)
    assert torch.equal(got, torch.full_like(q, 3.0))


def test_a_nan_stays_in_its_row(card):
    q, k, v = inputs(1, 5, 30, 1, 1, 256)
    q[0, 2, 0, 7] = torch.nan
    asked = call(q, k, v)
    got = products.plan(asked, card)(*asked.tensors)
    assert got[0, 2].isnan().all() and got[0, [0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("some", [slice(0, 24), slice(24, 48), slice(0, 60)], ids=["first", "second", "all"])
def test_a_stripe_of_infinitely_small_scores_weighs_nothing(card, some):
    """A row of nothing else is zero, as in every attention."""
    q, k, v = inputs(1, 5, 60, 1, 1, 256)
    q[..., 7], k[:, some, :, 7] = 1, -torch.inf
    asked = call(q, k, v)
    got = products.plan(asked, card)(*asked.tensors)
    want = op.reference(*asked.tensors, *asked.options)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
    assert want.any() == (some.stop < 60)


@pytest.mark.parametrize(
    ("d", "options", "words"),
    [
        (128, {}, "heads have 128"),
        (260, {}, "heads have 260"),
        (256, {"causal": True}, "masks"),
        (256, {"key_lengths": torch.tensor([3], dtype=torch.int32)}, "lengths"),
        (256, {"scale": -1.0}, "scale is -1"),
    ],
)
def test_what_it_does_not_serve(d, options, words):
    asked = call(*inputs(1, 4, 4, 1, 1, d), **options)
    assert words in next(products.obstacles(asked))


def test_it_serves_the_heads_of_the_vaes():
    for d in (384, 512, 640, 1024):
        assert not list(products.obstacles(call(*inputs(1, 4, 4, 1, 1, d)))), d


def test_what_it_takes_beside_the_operands(card):
    """As VAEs plan with it: at most."""
    q, k, v = inputs(1, 33, 61, 1, 1, 256)
    asked, made = call(q, k, v), []
    empty = torch.empty

    def counted(*sizes, **options):
        made.append(empty(*sizes, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products.torch, "empty", counted)
        products.plan(asked, card)(*asked.tensors)
    assert sum(t.numel() * t.element_size() for t in made) == products.scratch_bytes(33, 61, 256)
