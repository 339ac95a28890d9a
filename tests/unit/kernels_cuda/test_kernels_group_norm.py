"""group_norm_silu and instance_norm without a GPU: pictures in parts, chunks, and which kernels are launched."""

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
    group_moments,
    group_norm_silu,
    join_moments,
)
from fusestream.kernels_cuda.build import matrix
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.norm import group_norm
from fusestream.kernels_cuda.ops.norm.group_norm_cut import ONCE_THREADS, column_shape, group_shape
from fusestream.kernels_cuda.ops.views.planes import Planes

EPS = 1e-5
OFF = KernelPolicy.of("off")


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


class FakeKernel:
    """What a plan asked of a kernel: notes name, blocks, threads and whether it begins ahead."""

    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def prepare(self, params, *, grid, block, ahead, **_):
        self.params = params
        self.asked.append((self.name, grid[0], block, ahead))
        return self

    def filler(self, places, behind):
        pass

    def send(self):
        pass


class FakeCard:
    index = 0

    def __init__(self, multiprocessors=132, ahead=False):
        self.multiprocessors, self.ahead = multiprocessors, ahead
        self.asked = []

    def launches_ahead(self, unit, names):
        waiting = ("merge", "first_apply", "first_apply_any", "last_apply", "last_apply_any")
        waiting += ("last_joined", "last_joined_any")
        assert unit == "group_norm" and set(names) == {f"group_norm_{name}" for name in waiting}
        return self.ahead

    def kernel(self, unit, name):
        assert name in OPS["group_norm_silu"].kernels[unit]
        return FakeKernel(name, self.asked)

    def begun(self):
        asked = [ahead for _, _, _, ahead in self.asked]
        self.asked.clear()
        return asked


def call_of(x, groups, moments=None):
    return Call("group_norm_silu", (x, None, None, moments), (groups, EPS, "silu"), KernelPolicy())


def picture(*shape):
    return torch.ones(*shape).half().contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("ahead", [False, True])
def test_launches_begin_ahead_where_their_code_waits(monkeypatch, ahead):
    """Only where it was chosen, and never the first of a call: it waits for all before."""
    card = FakeCard(ahead=ahead)
    monkeypatch.setattr(group_norm, "card_at", lambda *_: card)
    ours = OPS["instance_norm"].candidates[0]
    first = Call("instance_norm", (torch.ones(1, 8, 16, 16).half(), None, None, None), (8, EPS, "relu"), KernelPolicy())
    assert [way.name for way in ours.tactics(first)] == (["cuda apart", "cuda ahead"] if ahead else ["cuda"])
    for tactic, wanted in ((None, [False] * 3), ("apart", [False] * 3), ("ahead", [False, True, True])):
        group_norm.plan(first, card, tactic)
        assert card.begun() == wanted
    last = call_of(picture(1, 32, 64, 64), 8)
    for tactic, wanted in (("joined", [False] * 2), ("joined ahead", [False, True]), ("ahead", [False, True, True])):
        group_norm.plan(last, card, tactic)
        assert card.begun() == wanted


@pytest.mark.parametrize("ahead", [False, True])
def test_which_ways_a_picture_has(monkeypatch, ahead):
    """One launch where a block holds a group, two where parts are few, three where they are many; and of the channels-first and
    of what is normed by given moments the usual ones."""
    card = FakeCard(ahead=ahead)
    monkeypatch.setattr(group_norm, "card_at", lambda *_: card)

    def ways(x, groups, moments=None):
        found = group_norm.ways(call_of(x, groups, moments))
        assert found == sorted(found, key=lambda way: way.endswith("ahead"))
        return [way for way in found if not way.endswith("ahead")], [way for way in found if way.endswith("ahead")]

    joined, apart = (["joined ahead"], ["ahead"]) if ahead else ([], [])
    assert ways(picture(2, 320, 64, 64), 32) == (["once", "joined"], joined)
    assert ways(picture(2, 640, 64, 64), 32) == (["joined"], joined)  # 160 KB
    assert ways(picture(1, 64, 20, 20), 2) == (["joined", "once"], joined)  # two blocks are few
    assert ways(picture(2, 128, 64, 64), 32) == (["joined"], joined)  # four channels: of a sector a quarter
    assert ways(picture(1, 256, 128, 128), 32) == (["joined", "apart"], joined + apart)
    assert ways(picture(1, 8, 1024, 1024), 1) == ((["apart"], apart) if ahead else ([], []))
    assert ways(picture(2, 320, 64, 64).contiguous(), 32) == ((["apart"], apart) if ahead else ([], []))
    given = torch.ones(2, 32, 2)
    assert ways(picture(2, 320, 64, 64), 32, given) == ((["apart"], apart) if ahead else ([], []))
    assert ways(picture(0, 320, 64, 64), 32) == ((["apart"], apart) if ahead else ([], []))


@pytest.mark.parametrize(
    ("shape", "kernel", "threads"),
    [  # all norms of SD 1.5 for a picture of 512x512 with guidance whose groups a block holds
        ((2, 320, 64, 64), "once_2", 1024),
        ((2, 320, 32, 32), "once_2", 1024),
        ((2, 640, 32, 32), "once_4", 1024),
        ((2, 960, 32, 32), "once_2", 1024),
        ((2, 1280, 32, 32), "once_8", 1024),
        ((2, 1920, 32, 32), "once_4", 1024),
        ((2, 640, 16, 16), "once_4", 320),
        ((2, 1280, 16, 16), "once_8", 320),
        ((2, 1920, 16, 16), "once_4", 960),
        ((2, 2560, 16, 16), "once_8", 640),
        ((2, 1280, 8, 8), "once_8", 96),
        ((2, 2560, 8, 8), "once_8", 160),
    ],
)
def test_norms_of_a_u_net_are_one_launch(shape, kernel, threads):
    card = FakeCard()
    group_norm.plan(
        call_of(
            torch.empty(*shape, dtype=torch.float16, device="meta").contiguous(memory_format=torch.channels_last), 32
        ),
        card,
    )
    assert card.asked == [(f"group_norm_{kernel}", 64, threads, False)]


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


def test_the_source_holds_as_many_pixels():
    source = (matrix.SOURCES / "group_norm.cu").read_text(encoding="utf-8")
    for width, held in group_norm.ONCE_HELD.items():
        assert f"\nONCE({width}, {held})\n" in source
    assert f"constexpr int kOnceThreads = {ONCE_THREADS};" in source
