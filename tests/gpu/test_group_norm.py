"""group_norm_silu and instance_norm on the GPU, in both instruction classes."""

from __future__ import annotations

import pytest
import torch
from gpu.support import LAYOUTS, assert_no_worse_than, assert_rounded_once, assert_same_special, laid_out, on, shifted

from fusestream.kernels_cuda import (
    KernelPolicy,
    group_moments,
    group_norm_silu,
    instance_norm,
    join_moments,
)
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.launcher import card as card_at
from fusestream.kernels_cuda.ops.norm import group_norm
from fusestream.kernels_cuda.ops.norm.group_norm import (
    AHEAD,
    APART,
    JOINED,
    JOINED_AHEAD,
    MOST_JOINED,
    ONCE,
    UNIT,
    WAITING,
    Cut,
    Once,
    reference,
)

EPS = 1e-5
OFF = KernelPolicy.of("off")


def inputs(layout, b, c, *image, dtype=torch.float16):
    x = (torch.randn(b, c, *image, device="cuda") * 2 + 0.75).half()
    weight, bias = (torch.randn(c, device="cuda").to(dtype) for _ in range(2))
    return laid_out(x, layout), weight, bias


def exact(x, groups, weight=None, bias=None, act="none"):
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    return reference(*wide, None, groups, EPS, act)


def tactics_for(x, groups, isa):
    """All that can compute it, whether or not they are worth a race."""
    card, found = card_at(torch.cuda.current_device(), isa), [APART]
    cut = Cut.of(x, groups, card.multiprocessors)
    if cut.view.layout == "last" and cut.params["chunks"] <= MOST_JOINED:
        found.append(JOINED)
    if card.launches_ahead(UNIT, WAITING):
        found += [{APART: AHEAD, JOINED: JOINED_AHEAD}[way] for way in found]
    return found + [ONCE] * (Once.of(x, groups) is not None)


def by(tactic, isa, x, groups, weight=None, bias=None, act="silu", moments=None):
    call = Call("group_norm_silu", (x, weight, bias, moments), (groups, EPS, act), on(isa))
    return group_norm.plan(call, card_at(torch.cuda.current_device(), isa), tactic)(*call.tensors)


def flat(t):
    """A row per batch: errors are judged against its peak."""
    return t.reshape(t.shape[0], -1)


def check(x, groups, weight, bias, act, isa, what="", slack=4e-6):
    if act == "silu":
        got = group_norm_silu(x, groups, weight, bias, eps=EPS, policy=on(isa))
    else:
        got = instance_norm(x, weight, bias, eps=EPS, relu=act == "relu", policy=on(isa))
    assert got.stride() == torch.empty_like(x).stride()
    want = exact(x, groups, weight, bias, act)
    assert_rounded_once(flat(got), flat(want), slack=slack, what=what)
    return got, want


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("c", "groups"), [(1, 1), (3, 3), (8, 2), (13, 1), (32, 32), (96, 4), (128, 32), (320, 10), (1000, 5)]
)
def test_shapes(isa, c, groups, layout):
    for image in ((8, 24), (5, 7), (3, 40, 33), (129,)):
        for affine, dtype in ((True, torch.float16), (True, torch.float32), (False, torch.float16)):
            x, weight, bias = inputs(layout, 2, c, *image, dtype=dtype)
            weight, bias = (weight, bias) if affine else (None, None)
            what = f"{c}/{groups} {layout} {image} {affine} {dtype}"
            got, want = check(x, groups, weight, bias, "silu", isa, what)
            if dtype is torch.float16:
                eager = group_norm_silu(x, groups, weight, bias, eps=EPS, policy=OFF)
                assert_no_worse_than(got, eager, want, what)
            check(x, c, weight, bias, "relu", isa, what)
            check(x, c, weight, None, "none", isa, what)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", [1, 13, 40])
@pytest.mark.parametrize("way", ["plain", "shifted", "frames", "channels", "batch", "shifted weight"])
def test_ways_to_lie(isa, c, layout, way):
    if c == 1 and layout == "last":
        pytest.skip("one channel is in either layout, and torch takes it for channels-first")
    x, weight, bias = inputs(layout, 2, c, 3, 4, 8)
    if way == "shifted":
        x = shifted(x.movedim(1, -1), 3).movedim(-1, 1) if layout == "last" else shifted(x, 3)
    elif way == "frames":
        x = laid_out(torch.randn(2, c, 5, 4, 8, device="cuda").half(), layout)[:, :, 1:4]
    elif way == "channels":
        x = laid_out(torch.randn(2, c + 8, 3, 4, 8, device="cuda").half(), layout)[:, 8:]
    elif way == "batch":
        x = laid_out(torch.randn(5, c, 3, 4, 8, device="cuda").half(), layout)[::2][:2]
    elif way == "shifted weight":
        weight, bias = shifted(weight), shifted(bias, 2)
    check(x, 1, weight, bias, "silu", isa, way)
    check(x, c, weight, bias, "relu", isa, way)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(0, 8, 4, 4), (2, 8, 0, 4), (1, 1, 1, 1), (3, 96, 1, 1), (2, 96), (2, 16, 5), (1, 96, 1, 8)]
)
def test_empty_and_tiny(isa, shape, layout):
    x, weight, bias = inputs(layout, *shape)
    got = group_norm_silu(x, 1, weight, bias, eps=EPS, policy=on(isa))
    assert got.shape == x.shape
    if x.numel():
        check(x, 1, weight, bias, "silu", isa)
        check(x, shape[1], weight, bias, "relu", isa)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 40, 61, 47), (1, 32, 512, 512), (1, 128, 96, 96), (3, 1000, 9, 8)])
@pytest.mark.parametrize("given", [False, True])
def test_launches_that_begin_ahead(layout, shape, given):
    """The same bits as launches that wait for each other's end, of x that is written just before and of results that are written
    over just behind: as they are called, and in a graph."""
    groups = shape[1] // 4 if given else shape[1]
    sources = [inputs(layout, *shape)[0] for _ in range(6)]
    _, weight, bias = inputs(layout, *shape)
    moments = group_moments(sources[0], groups, policy=on(None)) if given else None
    x = torch.empty_like(sources[0])
    possible = tactics_for(x, groups, None)
    if AHEAD not in possible:
        pytest.skip("this card's code waits for the launch before it to end")
    card = card_at(torch.cuda.current_device())
    for apart, ahead in ((APART, AHEAD), (JOINED, JOINED_AHEAD)):
        if ahead not in possible or (given and ahead == JOINED_AHEAD):
            continue
        call = Call("group_norm_silu", (x, weight, bias, moments), (groups, EPS, "silu"), on(None))
        ways = {way: group_norm.plan(call, card, way) for way in (apart, ahead)}
        check_that_it_may_begin(ways[apart], ways[ahead], x, sources, call.tensors[1:])


def check_that_it_may_begin(apart, ahead, x, sources, others):
    want = [apart(source, *others) for source in sources]

    def turn(found):
        for source, result in zip(sources, found, strict=True):
            x.copy_(source)
            result.copy_(ahead(x, *others))

    found = [torch.full_like(x, 7) for _ in sources]
    for _ in range(20):
        turn(found)
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn(found)
    for result in found:
        result.fill_(7)
    for _ in range(20):
        graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 320, 64, 64), 32),  # SD 1.5, each kind of group that it has
        ((2, 960, 32, 32), 32),
        ((2, 1280, 32, 32), 32),
        ((2, 1920, 32, 32), 32),
        ((2, 640, 64, 64), 32),
        ((3, 1280, 8, 8), 32),
        ((3, 39, 17, 5), 3),  # groups of 13 channels
        ((2, 21, 40, 33), 7),
        ((3, 1000, 9, 8), 5),  # wider than a column of channels
        ((2, 1400, 12, 20), 2),
        ((1, 64, 1, 1), 4),
        ((5, 96, 3, 3), 96),
        ((2, 512, 40, 40), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("act", ["silu", "none"])
def test_every_tactic(isa, shape, groups, act):
    """Each picture of a batch has a spread and a mean of its own, so nothing may be taken from another's parts. The same bits each
    time, and no matter what lies beside: x is a part of what is NaN elsewhere."""
    x, weight, bias = inputs("last", *shape, dtype=torch.float32)
    own = torch.arange(1.0, shape[0] + 1, device="cuda").reshape(-1, 1, 1, 1)
    x = laid_out((x.float() * own - 3 * own).half(), "last")
    want = exact(x, groups, weight, bias, act)
    room = torch.full((shape[0], *shape[2:], shape[1] + 16), torch.nan, device="cuda").half()
    for margin in (0, 8, 4, 2, 1):
        beside = room[..., margin : margin + shape[1]].movedim(-1, 1)
        beside.copy_(x)
        for tactic in tactics_for(beside, groups, isa):
            got = by(tactic, isa, beside, groups, weight, bias, act)
            what = f"{tactic} at {margin}"
            assert_rounded_once(flat(got), flat(want), slack=8e-6, what=what)
            assert torch.equal(got, by(tactic, isa, beside, groups, weight, bias, act)), what
        beside.fill_(torch.nan)


@pytest.mark.sanitize
@pytest.mark.parametrize(("c", "groups"), [(13, 1), (40, 4), (64, 2), (24, 3), (320, 32)])
@pytest.mark.parametrize("image", [(1, 1), (7, 5), (16, 16), (33, 20)], ids=str)
def test_every_tactic_stays_within_its_tensors(isa, c, groups, image):
    x, weight, bias = inputs("last", 2, c, *image)
    want = exact(x, groups, weight, bias, "silu")
    for tactic in tactics_for(x, groups, isa):
        assert_rounded_once(flat(by(tactic, isa, x, groups, weight, bias)), flat(want), slack=4e-6, what=tactic)


@pytest.mark.parametrize("c", [24, 120])
def test_every_tactic_with_what_is_large_or_no_number(isa, c):
    x, weight, bias = inputs("last", 3, c, 24, 20)
    x[0, ::3, 1], x[0, 1, 2] = 65504, -65000
    want = exact(x, 3, weight * 0.1, bias, "silu")
    for tactic in tactics_for(x, 3, isa):
        got = by(tactic, isa, x, 3, weight * 0.1, bias)
        assert got.isfinite().all(), tactic
        assert_rounded_once(flat(got), flat(want), slack=4e-6, what=tactic)
    x[1, 1, 2, 3], x[2, c - 1, 0, 0] = torch.nan, -torch.inf
    want = group_norm_silu(x, 3, weight, bias, eps=EPS, policy=OFF)
    for tactic in tactics_for(x, 3, isa):
        got = by(tactic, isa, x, 3, weight, bias)
        assert_same_special(got, want, tactic)
        bad = got.isnan().reshape(3, 3, -1).any(-1)  # no other picture's and no other group's
        assert bad.nonzero().tolist() == [[1, 0], [2, 2]], tactic
    far = laid_out((1000 + torch.randn(2, c, 24, 20, device="cuda") * 4).half(), "last")
    for tactic in tactics_for(far, 3, isa):
        got = by(tactic, isa, far, 3, act="none")
        assert_rounded_once(flat(got), flat(exact(far, 3)), slack=1e-4, what=tactic)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_groups_far_from_zero(isa, layout):
    """Millions of elements whose mean is a thousand times their spread: sums of squares would lose the variance."""
    x = laid_out((1000 + torch.randn(1, 16, 700, 999, device="cuda") * 4).half(), layout)
    check(x, 2, None, None, "silu", isa, slack=1e-4)
    check(x, 16, None, None, "none", isa, slack=1e-4)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("c", "groups"), [(13, 1), (32, 32), (128, 32), (512, 32)])
def test_a_picture_in_parts(isa, c, groups, layout):
    """Bands of unequal height, as slices of the whole, with a mean that is far from zero."""
    x, weight, bias = inputs(layout, 1, c, 37, 24)
    x = laid_out(x + 20, layout)
    parts = x.split((16, 1, 20), 2)
    if layout == "first":  # a band of such a picture does not fold into one plane
        parts = tuple(part.contiguous() for part in parts)
    found = [group_moments(part, groups, policy=on(isa)) for part in parts]
    again = [group_moments(part, groups, policy=on(isa)) for part in parts]
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    joined = join_moments(found, [part.shape[2] for part in parts])
    variance, mean = torch.var_mean(x.double().reshape(1, groups, -1), -1, correction=0)
    torch.testing.assert_close(joined.double(), torch.stack((mean, variance), -1), rtol=1e-5, atol=1e-5)
    got = [group_norm_silu(part, groups, weight, bias, eps=EPS, moments=joined, policy=on(isa)) for part in parts]
    want = exact(x, groups, weight, bias, "silu")
    assert_rounded_once(flat(torch.cat(got, 2)), flat(want), slack=1e-5, what=f"{c}/{groups} {layout}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outliers_and_many_batches(isa, layout):
    x, weight, _ = inputs(layout, 2, 24, 40, 64)
    x[:, ::3, 1], x[:, 1, 2] = 65504, -65000
    got, _ = check(x, 3, weight * 0.1, None, "silu", isa)
    assert got.isfinite().all()
    x, weight, bias = inputs(layout, 70001, 8, 2, 4)
    check(x, 4, weight, bias, "silu", isa)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("image", [(16, 16), (5, 7)])
def test_special_values(isa, image, layout):
    x, weight, bias = inputs(layout, 4, 12, *image)
    x[0, 1, 2, 3], x[1, 5, 0, 0], x[2, 9, 1, 1] = torch.nan, torch.inf, -torch.inf
    weight[0], bias[2] = torch.nan, torch.inf  # an infinite weight: torch's GroupNorm makes all NaN, ours +-inf
    for run in (
        lambda policy: group_norm_silu(x, 3, weight, bias, eps=EPS, policy=policy),
        lambda policy: instance_norm(x, weight, bias, eps=EPS, relu=True, policy=policy),
    ):
        assert_same_special(run(on(isa)), run(OFF), f"{image} {layout}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", [13, 64])
def test_bitwise_repeatable(isa, c, layout):
    x, weight, bias = inputs(layout, 2, c, 300, 400)
    first = [group_norm_silu(x, 1, weight, bias, eps=EPS, policy=on(isa)), instance_norm(x, eps=EPS, policy=on(isa))]
    for _ in range(5):
        assert torch.equal(first[0], group_norm_silu(x, 1, weight, bias, eps=EPS, policy=on(isa)))
        assert torch.equal(first[1], instance_norm(x, eps=EPS, policy=on(isa)))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_beyond_32_bits(layout):
    """More than 2^31 elements: ones but for the last frame of every channel, which is twos."""
    shape = (1, 96, 2**21, 11)
    x = torch.ones(shape if layout == "first" else (1, *shape[2:], 96), device="cuda", dtype=torch.float16)
    x = x if layout == "first" else x.movedim(-1, 1)
    x[:, :, -(2**19) :] = 2
    got = instance_norm(x, eps=EPS, policy=on(None))  # a quarter is 2: mean 1.25, variance 0.1875
    want = torch.tensor([-0.25, 0.75], dtype=torch.float64) / (0.1875 + EPS) ** 0.5
    for part, value in ((got[:, :, : -(2**19)], want[0]), (got[:, :, -(2**19) :], want[1])):
        assert (part == value.half().item()).all()
