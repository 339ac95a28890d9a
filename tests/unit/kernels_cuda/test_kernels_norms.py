"""Norms without a GPU: pictures in parts, how groups are cut, and heads that are turned where they lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_memory import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

from bed.depth import examples
from fusestream.kernels_cuda import (
    OPS,
    KernelPolicy,
    channel_rms_silu,
    group_moments,
    group_norm_silu,
    join_moments,
    rms_rope_,
)
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.norm import group_norm, norm_modulate
from fusestream.kernels_cuda.ops.norm.group_norm_cut import ONCE_THREADS, column_shape, group_shape
from fusestream.kernels_cuda.ops.views.planes import Planes

EPS = 1e-5
OFF = KernelPolicy.of("off")


@pytest.mark.parametrize("spread", [1, 2, 6, 12])
@pytest.mark.parametrize("frames", [1, 2, 3, 12])
def test_modulation_is_read_where_it_lies(spread, frames):
    """A row that was expanded to other frames than the other operand has, which then has as many as the kernel counts."""
    x, own = torch.ones(2, 12, 8).half(), torch.ones(2, frames, 8).half()
    for pair in ((torch.ones(1, 1, 8).half().expand(2, spread, 8), own), (own, own[:, :1].expand(2, spread, 8))):
        o = norm_modulate.Operands(x, *pair, None, None)
        assert next(norm_modulate.operand_obstacles(o), None) is None
        fields = norm_modulate.fields_of(o, EPS, "layer", swap=False)
        last = 11 // fields["tokens_per_frame"]
        assert last * max(fields["scale_frame"], fields["shift_frame"]) + 8 <= 8 * frames


def laid_out(x, last):
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


@pytest.mark.parametrize("policy", [KernelPolicy(), OFF], ids=["reference", "stock"])
@pytest.mark.parametrize("last", [False, True])
def test_a_picture_in_parts_is_normed_as_the_whole(last, policy):
    """Of parts of unequal height, far from zero; and the whole's own moments change nothing."""
    x = laid_out((torch.randn(2, 12, 9, 4) * 3 + 40).half(), last)
    weight, bias = torch.randn(12), torch.randn(12)
    whole = group_norm_silu(x, 3, weight, bias, eps=EPS)
    parts = x.split((4, 1, 4), 2)
    joined = join_moments([group_moments(part, 3, policy=policy) for part in parts], [part.shape[2] for part in parts])
    torch.testing.assert_close(joined, group_moments(x, 3), rtol=1e-5, atol=1e-5)
    variance, mean = torch.var_mean(x.double().reshape(2, 3, -1), -1, correction=0)
    torch.testing.assert_close(joined.double(), torch.stack((mean, variance), -1), rtol=1e-5, atol=1e-5)
    got = [group_norm_silu(part, 3, weight, bias, eps=EPS, moments=joined, policy=policy) for part in parts]
    torch.testing.assert_close(torch.cat(got, 2), whole, rtol=2e-3, atol=2e-3)


def test_what_stock_has_not_is_not_measured():
    """Moments, and a norm by given ones: torch's passes for them would hold several of a picture in fp32."""
    x, moments = torch.ones(1, 6, 3).half(), torch.ones(1, 3, 2)
    assert all(candidate.ours for candidate in OPS["group_moments"].candidates)
    theirs = [candidate for candidate in OPS["group_norm_silu"].candidates if not candidate.ours]
    for of_whole, serves in ((None, True), (moments, False)):
        call = Call("group_norm_silu", (x, None, None, of_whole), (3, EPS, "silu"), KernelPolicy())
        assert [candidate.refuse(call) is None for candidate in theirs] == [serves]


def test_the_moments_of_a_large_picture_hold_little():
    """And so does what is normed by them, where our kernels do not serve."""
    with FakeTensorMode():
        x = torch.empty(1, 128, 1024, 2048, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
        size = x.numel() * x.element_size()
        with LiveBytes(x) as live:
            moments = group_norm.moments_of(x, 32)
        assert live.most < size / 4
        with LiveBytes(x, moments) as live:
            group_norm.reference(x, None, None, moments, 32, EPS, "silu")
        assert live.most <= size + 16 * group_norm.ENOUGH < 3 * size


@pytest.mark.parametrize("last", [False, True])
def test_rows_normed_by_themselves_are_those_of_all(monkeypatch, last):
    x = laid_out(torch.randn(2, 12, 9, 4).half(), last)
    weight, moments = torch.randn(12), group_moments(x, 3)
    whole = group_norm_silu(x, 3, weight, eps=EPS, moments=moments)
    monkeypatch.setattr(group_norm, "ENOUGH", x.numel() // 4)
    part = group_norm.reference(x, weight, None, moments, 3, EPS, "silu")
    assert torch.equal(part, whole)
    assert part.stride() == x.stride()


@pytest.mark.parametrize("channels", [1, 8, 96, 128, 320, 1000, 5000])
@pytest.mark.parametrize("pixels", [1, 100, 10**6])
def test_columns_cover_everything(channels, pixels):
    lanes, blocks, threads, chunk = column_shape(Planes("last", 2, channels, pixels, 0, channels), 68)
    assert lanes * blocks * 8 >= channels
    assert lanes <= 32
    assert threads % lanes == 0
    assert threads <= 256
    assert chunk % (threads // lanes * 8) == 0
    assert -(-pixels // chunk) * blocks * 2 <= 16 * 68 + 2 * blocks


@settings(max_examples=examples(200), deadline=None)
@given(
    per_group=st.integers(1, 200),
    groups=st.integers(1, 8),
    pixels=st.integers(1, 5000),
    margin=st.sampled_from([0, 1, 2, 4, 8]),
)
def test_a_group_that_is_kept_is_all_there(per_group, groups, pixels, margin):
    """Every pixel has a thread for each of its channels, none has more than it can hold, and all accesses are aligned."""
    channels = per_group * groups
    wide = torch.empty(2, pixels, channels + margin, dtype=torch.float16, device="meta").movedim(-1, 1)
    once = group_norm.Once.of(wide[:, :channels], groups)
    if once is None:
        assert per_group * pixels * 2 > 24 * 2 * 512 or channels == 1
        return
    rows = once.threads // once.across
    assert once.across * once.width == per_group and rows >= 1
    assert once.threads % 32 == 0 and once.threads <= ONCE_THREADS
    assert rows * group_norm.ONCE_HELD[once.width] >= pixels
    assert not (channels + margin) % once.width


@settings(max_examples=examples(200), deadline=None)
@given(per_group=st.integers(1, 700), groups=st.integers(1, 64), pixels=st.sampled_from([1, 64, 4000]))
def test_a_column_has_a_team_for_each_of_its_groups(per_group, groups, pixels):
    channels = per_group * groups
    lanes, blocks, threads, _ = column_shape(Planes("last", 1, channels, pixels, 0, channels), 34)
    slots, team = group_shape(per_group, groups, lanes, blocks, threads)
    width, columns = lanes * 8, {}
    for group in range(groups):
        for column in range(group * per_group // width, ((group + 1) * per_group - 1) // width + 1):
            columns.setdefault(column, []).append(group)
    assert max(map(len, columns.values())) <= slots <= threads // team
    assert team in (1, 2, 4, 8, 16, 32)
    most = max(sum(group in found for found in columns.values()) for group in range(groups))
    assert most <= min(blocks, (per_group - 2) // width + 2)


def test_pixels_of_zeros_stay():
    assert not channel_rms_silu(torch.zeros(1, 6, 2, 2).half(), torch.ones(6).half()).any()


# -------------------------------------------------------------------------------------------------- norms of heads, turned


def normed(q, k=None, *rest, **options):
    """rms_rope_ of copies, each contiguous, which it returns."""
    copies = tuple(None if t is None else t.clone(memory_format=torch.contiguous_format) for t in (q, k))
    rms_rope_(*copies, *rest, **options)
    return copies


def angles(b, s, d):
    return torch.rand(b, s, d // 2, dtype=torch.float64) * 6.28


def matrices(angle):
    c, s = angle.cos(), angle.sin()
    return torch.stack((c, -s, s, c), -1).unflatten(-1, (2, 2))


def tables(form, angle, dtype=torch.float32):
    """(rotation, sin) as the models hand them over, and the same as float64 matrices."""
    if form == "none":
        return None, None
    if form.startswith("cos"):
        c, s = angle.cos().to(dtype), angle.sin().to(dtype)
        return (c, s) if form == "cos" else (c.unsqueeze(1), s.unsqueeze(1))
    m = matrices(angle).to(dtype)
    return {"flux": m[:1].unsqueeze(1), "wan": m[:1].unsqueeze(2), "batch": m.unsqueeze(1), "plain": m[0]}[form], None


def test_packed_buffers():
    """The thirds of a packed projection are served where they lie, and the values between them stay."""
    packed = torch.randn(2, 5, 3, 4, 16).half()
    before = packed.clone()
    q, k, v = packed.unbind(2)
    w = torch.rand(64).half()
    angle = angles(1, 5, 16)
    want = normed(q.clone(), k.clone(), w, w, *tables("wan", angle), eps=EPS)
    rms_rope_(q, k, w, w, *tables("wan", angle), eps=EPS)
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])
    assert torch.equal(v, before[:, :, 2])


def test_one_stream_and_other_lengths():
    q, k = torch.randn(2, 7, 2, 16).half(), torch.randn(2, 3, 2, 16).half()
    w = torch.rand(32).half()
    alone, nothing = normed(q, None, w, eps=EPS)
    assert nothing is None
    both = normed(q, k, w, w, eps=EPS)
    assert torch.equal(both[0], alone) and both[1].shape == k.shape
    long, short = tables("cos", angles(1, 9, 16)), angles(1, 9, 16)
    assert short.shape[1] > 7
    first = normed(q, k, w, w, *long, eps=EPS)  # the first of nine rotations
    assert torch.equal(first[0], normed(q, k, w, w, *(t[:, :7] for t in long), eps=EPS)[0])


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float16)


@pytest.mark.parametrize("lead", [(6,), (9,), (1,), (1, 6), (2, 6), (1, 1, 6), (2, 6, 1), (2, 1, 1), (1, 9, 1)])
@pytest.mark.parametrize("heads", [1, 2])
def test_forms_that_broadcast(lead, heads):
    q, k = zeros(2, 6, 2, 16), zeros(2, 3, heads, 16)
    for norm, weights in (("token", (zeros(32), zeros(16 * heads))), ("head", (zeros(16),) * 2), ("none", (None,) * 2)):
        for table in ((zeros(*lead, 8, 2, 2), None), (zeros(*lead, 8), zeros(*lead, 8))):
            out = normed(q, k, *weights, *table, eps=EPS, norm=norm)
            assert [t.shape for t in out] == [q.shape, k.shape]


@pytest.mark.parametrize("shape", [(1, 0, 2, 8), (0, 4, 2, 8)])
def test_no_tokens_have_no_rotation_that_could_lie_badly(shape):
    b, tokens, _, d = shape
    call = Call(
        "rms_rope_", (zeros(*shape), None, None, None, zeros(b, tokens, d // 2, 2, 2), None), (EPS, "none", True)
    )
    assert next(OPS["rms_rope_"].candidates[0].obstacles(call), None) is None


def test_what_nothing_is_done_to_stays_whatever_its_strides() -> None:
    """Stock's way hands it back. Of one row torch counts other strides as another tensor in the same memory."""
    q = torch.randn(64, dtype=torch.float16).as_strided((1, 1, 1, 4), (40, 30, 20, 1))
    before = q.clone()
    for policy in (KernelPolicy.of("off"), KernelPolicy()):
        rms_rope_(q, eps=1e-6, norm="none", policy=policy)
        assert torch.equal(q, before)
