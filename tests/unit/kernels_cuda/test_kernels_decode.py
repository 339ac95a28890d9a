"""decode_attention and rms_rope_keep without a GPU: against float64, what they write, what the kernels take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import OPS, KernelPolicy, decode_attention, rms_rope_keep
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.attention import decode_attention as decode
from fusestream.kernels_cuda.ops.norm import rms_rope_keep as keep

POLICIES = [KernelPolicy(), KernelPolicy.of("off")]


def kept(batch: int, places: int, heads: int, d: int, make: torch.Generator | None = None) -> torch.Tensor:
    """As a cache has them: the rows of a head together."""
    return torch.randn(batch, heads, places, d, generator=make).half().transpose(1, 2)


@settings(max_examples=examples(40), deadline=None)
@given(
    batch=st.integers(1, 2),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    d=st.sampled_from([8, 64, 128]),
    room=st.integers(1, 70),
    part=st.floats(0, 1),
    scale=st.sampled_from([None, 0.3]),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**31),
)
def test_attention_over_what_is_kept(batch, key_heads, group, d, room, part, scale, policy, seed):
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 1, key_heads * group, d, generator=make).half()
    keys, values = (kept(batch, room, key_heads, d, make) for _ in range(2))
    at = min(int(part * room), room - 1)
    keys[:, at + 1 :], values[:, at + 1 :] = torch.nan, torch.inf  # room that nobody wrote to yet
    got = decode_attention(q, keys, values, torch.tensor([at], dtype=torch.int32), scale=scale, policy=policy)
    scores = torch.einsum("bhd,bkhd->bhk", q[:, 0].double(), keys[:, : at + 1].double().repeat_interleave(group, 2)) * (
        d**-0.5 if scale is None else scale
    )
    want = torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), values[:, : at + 1].double().repeat_interleave(group, 2))
    assert got.dtype is torch.float16 and got.shape == q.shape and got.is_contiguous()
    assert (got[:, 0].double() - want).abs().max() <= (2e-3 if policy is POLICIES[0] else 2e-2) * (1 + want.abs().max())


Q, KEYS, AT = torch.zeros(1, 1, 4, 64).half(), torch.zeros(1, 8, 2, 64).half(), torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ((torch.zeros(1, 2, 4, 64).half(), KEYS, KEYS, AT), r"q: \[1, 2, 4, 64\] is not \[batch, 1, heads, d\]"),
        ((Q, KEYS[:, :, :, :32], KEYS, AT), r"keys: .* is not \[1, room, heads, 64\]"),
        ((Q, torch.zeros(1, 8, 3, 64).half(), KEYS, AT), "with heads that divide 4"),
        ((Q, KEYS, KEYS[:, :4], AT), r"values: \[1, 4, 2, 64\] is not the keys' shape"),
        ((Q, KEYS[:, :0], KEYS[:, :0], AT), "there is no key to see"),
        ((Q, KEYS, KEYS, AT.long()), "at: torch.int64"),
    ],
)
def test_wrong_operands_of_attention(given_, message):
    for policy in POLICIES:
        with pytest.raises(ValueError, match=message):
            decode_attention(*given_, policy=policy)


@pytest.mark.parametrize(
    ("given_", "scale", "reason"),
    [
        ((Q.float(), KEYS, KEYS, AT), None, "q is float32"),
        ((Q[..., :32], KEYS[..., :32], KEYS[..., :32], AT), None, "heads have 32 elements, the kernels serve 64, 128"),
        ((Q, KEYS, KEYS, AT), -1.0, "scale is -1.0"),
        ((Q, torch.zeros(1, 8, 2, 65).half()[..., 1:], KEYS, AT), None, "keys: rows do not start at multiples of 16"),
    ],
)
def test_what_the_attention_does_not_take(given_, scale, reason):
    assert next(decode.obstacles(Call("decode_attention", given_, (scale,)))).startswith(reason)


def test_keys_are_dealt_to_about_as_many_blocks_as_run_at_once():
    assert decode.parts_for(32768, 8, 132) == 33 and decode.parts_for(256, 8, 132) == 4
    assert decode.parts_for(1, 8, 132) == 1 and decode.parts_for(2**20, 1, 200) == decode.MOST_PARTS
    assert [decode.together(group) for group in (1, 2, 3, 4, 7)] == [1, 2, 4, 4, 4]


# ----------------------------------------------------------------------------------------------------- rms_rope_keep


@settings(max_examples=examples(40), deadline=None)
@given(
    parts=st.sampled_from([1, 2]),
    batch=st.integers(1, 2),
    tokens=st.integers(1, 4),
    heads=st.integers(1, 3),
    key_heads=st.integers(1, 2),
    d=st.sampled_from([8, 64, 128]),
    at=st.integers(0, 5),
    half=st.booleans(),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**31),
)
def test_what_is_kept(parts, batch, tokens, heads, key_heads, d, at, half, policy, seed):
    make = torch.Generator().manual_seed(seed)
    product = torch.randn(parts, batch, tokens, heads + 2 * key_heads, d, generator=make)
    q, k, v = product.split([heads, key_heads, key_heads], 3)
    weights = [(1 + 0.1 * torch.randn(d, generator=make)).to(torch.float16 if half else torch.float32) for _ in "qk"]
    angle = torch.rand(9, d // 2, generator=make) * 6
    keys, values = (kept(batch, 9, key_heads, d, make) for _ in range(2))
    before = keys.clone(), values.clone()
    place = torch.tensor([at], dtype=torch.int32)
    got = rms_rope_keep(q, k, v, *weights, angle.cos(), angle.sin(), keys, values, place, eps=1e-6, policy=policy)

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.double().sum(0)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        turn = torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double())[at : at + tokens, None]
        pairs = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    some = slice(at, at + tokens)
    for made, want in (
        (got, turned(q, weights[0])), (keys[:, some], turned(k, weights[1])), (values[:, some], v.double().sum(0)),
    ):  # fmt: skip
        assert made.dtype is torch.float16 and (made.double() - want).abs().max() <= 2e-3 * (1 + want.abs().max())
    for now, then in zip((keys, values), before, strict=True):
        assert torch.equal(now[:, :at], then[:, :at]) and torch.equal(now[:, some.stop :], then[:, some.stop :])


def test_it_saturates():
    q = torch.full((1, 1, 1, 1, 8), 1e15)
    keys, values = (torch.zeros(1, 2, 1, 8).half() for _ in range(2))
    large, angle = torch.full((8,), 1e30), torch.zeros(2, 4)
    at = torch.ones(1, dtype=torch.int32)
    got = rms_rope_keep(q, q, q, large, large, angle.cos(), angle.sin(), keys, values, at, eps=1e-6)
    assert {float(t.max()) for t in (got, keys, values)} == {65504.0} and not keys[:, 0].any()


X, W, TABLE = torch.zeros(2, 1, 1, 2, 64), torch.ones(64), torch.zeros(8, 32)
ROOM = torch.zeros(1, 8, 2, 64).half()
WHOLE = (X, X, X, W, W, TABLE, TABLE, ROOM, ROOM.clone(), AT)


def but(**changed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(keep.Operands(*WHOLE)._replace(**changed))


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (but(q=X[0]), r"q: .* is not \[1 or 2, batch, tokens, heads, d\]"),
        (but(v=X[..., :1, :]), r"v: .* is not \[2, 1, 1, key heads, 64\]"),
        (but(k_weight=W[:3]), r"k_weight: \[3\] is not \[64\]"),
        (but(cos=TABLE[:3]), r"cos: \[3, 32\] is not \[8, 32\]"),
        (but(values=ROOM[:, :4]), r"values: .* is not \[1, places, 2, 64\]"),
        (but(keys=ROOM[:, :0], values=ROOM[:, :0]), "has no room for 1 tokens"),
        (but(at=AT.float()), "at: torch.float32"),
        (but(values=ROOM), "keys|values"),
    ],
)
def test_wrong_operands(given_, message):
    for policy in POLICIES:
        with pytest.raises(ValueError, match=message):
            rms_rope_keep(*given_, eps=1e-6, policy=policy)


@pytest.mark.parametrize(
    ("given_", "reason"),
    [
        (but(q=X.half()), "q is float16"),
        (but(k_weight=W.half()), "q_weight is float32, k_weight is float16"),
        (but(keys=ROOM.float()), "keys is float32"),
        (but(cos=torch.zeros(8, 64)[:, ::2]), "cos is not contiguous"),
    ],
)
def test_what_the_kernel_does_not_take(given_, reason):
    assert next(keep.obstacles(Call("rms_rope_keep", given_, (1e-6,)))).startswith(reason)


def test_both_are_registered():
    assert not list(keep.obstacles(Call("rms_rope_keep", WHOLE, (1e-6,))))
    assert not list(decode.obstacles(Call("decode_attention", (Q, KEYS, KEYS, AT), (None,))))
    token = KernelPolicy().token
    torch.library.opcheck(OPS["decode_attention"].traced, (Q, KEYS, KEYS.clone(), AT, None, token))
    torch.library.opcheck(OPS["rms_rope_keep"].traced, (*WHOLE, 1e-6, token))

    def step(q: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return decode_attention(q, KEYS, KEYS, at)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(Q, AT), step(Q, AT), rtol=0, atol=0)
