"""decode_attention and rms_rope_keep on the GPU, in both instruction classes, against float64."""

from __future__ import annotations

import pytest
import torch
from gpu.support import on

from fusestream.kernels_cuda import KernelPolicy, decode_attention, rms_rope_keep
from fusestream.kernels_cuda.ops.attention import decode_attention as decode

OFF = KernelPolicy.of("off")


def place(at):
    return torch.tensor([at], dtype=torch.int32, device="cuda")


def kept(batch, places, heads, d):
    """As a cache has them: the rows of a head together."""
    return torch.randn(batch, heads, places, d, device="cuda").half().transpose(1, 2)


def exact(q, keys, values, at, scale=None):
    group = q.shape[2] // keys.shape[2]
    k, v = (t[:, : at + 1].double().repeat_interleave(group, 2) for t in (keys, values))
    scores = torch.einsum("bhd,bkhd->bhk", q[:, 0].double(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), v)[:, None]


def check(q, keys, values, at, isa, scale=None):
    got = decode_attention(q, keys, values, place(at), scale=scale, policy=on(isa))
    want = exact(q, keys, values, at, scale)
    assert got.dtype is torch.float16 and got.is_contiguous() and got.shape == want.shape
    # One rounding of the result, of sums in fp32; and what the sums of large scores are off by, their exponentials are off by.
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    summed = scale * q.double().norm(dim=-1).max() * keys[:, : at + 1].double().norm(dim=-1).max()
    allowed = want.abs() * 2.0**-11 * 1.01 + (2e-6 + 2.0**-23 * summed) * values[:, : at + 1].abs().max()
    assert ((got.double() - want).abs() <= allowed).all(), (got.double() - want).abs().max().item()
    return got


@pytest.mark.sanitize
@pytest.mark.parametrize("d", decode.HEADS)
@pytest.mark.parametrize(("key_heads", "group"), [(1, 1), (2, 2), (3, 3), (8, 4), (2, 5), (1, 8)])
@pytest.mark.parametrize(("room", "at"), [(1, 0), (70, 0), (70, 31), (70, 69), (500, 333)])
def test_heads_and_lengths(isa, d, key_heads, group, room, at):
    """Groups that leave a block's last heads empty, parts that get no key, rounds that are not full."""
    keys, values = kept(2, room, key_heads, d), kept(2, room, key_heads, d)
    keys[:, at + 1 :], values[:, at + 1 :] = torch.nan, torch.inf  # room that nobody wrote to yet
    check(torch.randn(2, 1, key_heads * group, d, device="cuda").half(), keys, values, at, isa)


@pytest.mark.parametrize("at", [0, 1, 255, 4096, 32766, 32767])
def test_long_caches(isa, at):
    """Qwen3 4B's heads, 32 thousand places."""
    check(torch.randn(1, 1, 32, 128, device="cuda").half(), kept(1, 32768, 8, 128), kept(1, 32768, 8, 128), at, isa)


@pytest.mark.parametrize("sharp", [1e-3, 1.0, 30.0])
def test_scores_of_every_size(isa, sharp):
    """Sharp ones, where one key is all, and flat ones, where all count; a scale of its own."""
    q = (torch.randn(1, 1, 32, 128, device="cuda") * sharp).half()
    check(q, kept(1, 3000, 8, 128), kept(1, 3000, 8, 128), 2999, isa)
    check(q, kept(1, 3000, 8, 128), kept(1, 3000, 8, 128), 2999, isa, scale=0.5)


@pytest.mark.parametrize("first", [1, 40, 599])
def test_scores_of_minus_infinity_weigh_nothing(isa, first):
    """Also where some lanes, or a whole part, meet no others."""
    q, keys, values = torch.randn(1, 1, 8, 128, device="cuda").half(), kept(1, 600, 2, 128), kept(1, 600, 2, 128)
    q[..., 5], keys[:, :first, :, 5] = 1, -torch.inf
    got = decode_attention(q, keys, values, place(599), policy=on(isa))
    torch.testing.assert_close(got.double(), exact(q, keys, values, 599), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("at", [70, 71, 1000, 2**31 - 1])
def test_behind_the_room_nothing_is_read(isa, at):
    """As when a graph is replayed once too often."""
    keys, values = kept(2, 200, 2, 128), kept(2, 200, 2, 128)
    keys[:, 70:], values[:, 70:] = torch.nan, torch.nan
    q = torch.randn(2, 1, 8, 128, device="cuda").half()
    keys, values = keys[:, :70], values[:, :70]
    got = decode_attention(q, keys, values, place(at), policy=on(isa))
    assert torch.equal(got, check(q, keys, values, 69, isa))


def test_rows_of_tokens_and_of_heads(isa):
    """The keys of a token together, or those of a head: whatever lies how."""
    q = torch.randn(1, 1, 8, 128, device="cuda").half()
    by_head, values = kept(1, 100, 2, 128), kept(1, 100, 2, 128)
    got = check(q, by_head, values, 77, isa)
    assert torch.equal(check(q, by_head.contiguous(), values.contiguous(), 77, isa), got)


def test_the_same_bits_and_no_host(isa):
    """A graph that holds the launch sees more keys at each replay."""
    q, keys, values = torch.randn(1, 1, 32, 128, device="cuda").half(), kept(1, 600, 8, 128), kept(1, 600, 8, 128)
    at = place(40)
    policy = on(isa)
    decode_attention(q, keys, values, at, policy=policy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode_attention(q, keys, values, at, policy=policy)
        at.add_(1)
    at.fill_(40)
    for step in range(5):
        graph.replay()
        assert torch.equal(got, decode_attention(q, keys, values, place(40 + step), policy=policy))


# ----------------------------------------------------------------------------------------------------- rms_rope_keep


@pytest.mark.sanitize
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "key_heads", "d", "at"),
    [(1, 1, 32, 8, 128, 0), (1, 1, 32, 8, 128, 19), (2, 5, 3, 1, 64, 7), (1, 3, 2, 2, 256, 17), (1, 4, 2, 1, 8, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_kept(isa, parts, batch, tokens, heads, key_heads, d, at, dtype):
    product = torch.randn(parts, batch, tokens, heads + 2 * key_heads, d, device="cuda") * 3
    q, k, v = product.split([heads, key_heads, key_heads], 3)
    weights = [(1 + 0.1 * torch.randn(d, device="cuda")).to(dtype) for _ in "qk"]
    angle = torch.rand(20, d // 2, device="cuda") * 6
    cos, sin = angle.cos(), angle.sin()
    keys, values = kept(batch, 20, key_heads, d), kept(batch, 20, key_heads, d)
    before = keys.clone(), values.clone()
    got = rms_rope_keep(q, k, v, *weights, cos, sin, keys, values, place(at), eps=1e-6, policy=on(isa))

    def turned(x, weight):
        x = x.double().sum(0)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        low, high = x.chunk(2, -1)
        c, s = (t.double()[at : at + tokens, None] for t in (cos, sin))
        return torch.cat((low * c - high * s, high * c + low * s), -1)

    some = slice(at, at + tokens)
    for name, made, want in (
        ("q", got, turned(q, weights[0])),
        ("k", keys[:, some], turned(k, weights[1])),
        ("v", values[:, some], v.double().sum(0)),
    ):
        assert made.dtype is torch.float16
        allowed = want.abs() * 2.0**-11 * 1.01 + 4e-6 * (1 + want.abs().max())
        assert ((made.double() - want).abs() <= allowed).all(), name
    for now, then in zip((keys, values), before, strict=True):
        assert torch.equal(now[:, :at], then[:, :at]) and torch.equal(now[:, some.stop :], then[:, some.stop :])


def test_what_has_no_place_is_not_written(isa):
    """As when a graph is replayed once too often."""
    x = torch.randn(1, 1, 1, 6, 128, device="cuda")
    q, k, v = x.split([4, 1, 1], 3)
    weight, table = torch.ones(128, device="cuda"), torch.rand(8, 64, device="cuda")
    room = torch.zeros(2, 1, 1, 12, 128, device="cuda").half().transpose(2, 3)
    keys, values = room[0][:, :8], room[1][:, :8]
    got = rms_rope_keep(q, k, v, weight, weight, table, table, keys, values, place(8), eps=1e-6, policy=on(isa))
    assert not room.any() and not got.any()


def test_saturation_and_special(isa):
    x = torch.full((1, 1, 1, 3, 64), 1e15, device="cuda")
    x[..., 2, 5] = torch.nan
    q, k, v = x.split([1, 1, 1], 3)
    weight, angle = torch.full((64,), 1e30, device="cuda"), torch.zeros(2, 32, device="cuda")
    keys, values = kept(1, 2, 1, 64), kept(1, 2, 1, 64)
    got = rms_rope_keep(
        q, k, v, weight, weight, angle.cos(), angle.sin(), keys, values, place(1), eps=1e-6, policy=on(isa)
    )
    assert (got == 65504).all() and (keys[:, 1] == 65504).all()
    assert values[:, 1].isnan().sum() == 1 and (values[:, 1].nan_to_num(65504) == 65504).all()
