"""Networks of torch's whose calls are captured: the same bits as launch after launch, whatever was changed in between, and no VRAM
that stays behind. The same again under the allocator that ComfyUI takes, in a process of its own.
"""

from __future__ import annotations

import gc

import pytest
import torch
from gpu.support import under_comfyuis_allocator, until_chosen
from torch import nn

from fusestream.kernels_cuda import LEDGER
from fusestream.kernels_cuda.modules import fuse, unfuse
from fusestream.kernels_cuda.modules.graphs import captures_of, launch_after_launch, release

MIB = 2**20


class Net(nn.Module):
    """A folded norm, an instance norm, a doubled picture, taps of 9x9, and a sum."""

    def __init__(self, c=32):
        super().__init__()
        self.first = nn.Sequential(
            nn.ReflectionPad2d(4), nn.Conv2d(3, c, 9), nn.InstanceNorm2d(c, affine=True), nn.ReLU()
        )
        self.conv, self.norm, self.relu = nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()
        self.larger = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(c, c, 3, padding=1), nn.SiLU())
        self.last = nn.Conv2d(c, 3, 9, padding=4, padding_mode="reflect")

    def forward(self, x):
        x = self.first(x)
        return self.last(self.larger(self.relu(self.norm(self.conv(x))) + x))


@pytest.fixture(autouse=True)
def _without_gradients():
    LEDGER.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def net():
    made = drawn()
    for shape in (SMALL, WIDE):
        x = picture(shape)
        until_chosen(lambda x=x: plain(made, x))
    return made


SMALL, WIDE = (1, 3, 64, 64), (1, 3, 48, 96)


def drawn():
    made = Net()
    made.norm.running_mean.normal_()
    made.norm.running_var.uniform_(0.5, 2)
    made = made.half().cuda().eval().requires_grad_(False).to(memory_format=torch.channels_last)
    fuse(made, graphs=True)
    return pays(made)


def pays(made):
    """It is captured even where the card is the bound: poisoned outputs cost it time."""
    for captures in captures_of(made):
        recorder = type("Pays", (type(captures._recorder),), {})()
        timed = captures._recorder.timed
        recorder.timed = lambda device, work, timed=timed: timed(device, work)._replace(host=1.0, whole=1.0)
        captures._recorder = recorder
    return made


def state(made):
    (found,) = captures_of(made)
    return found


def picture(shape=SMALL):
    return torch.randn(shape, device="cuda").half().contiguous(memory_format=torch.channels_last)


def plain(made, x):
    with launch_after_launch():
        return made(x)


def same(made, shape=SMALL, calls=4):
    for _ in range(calls):
        x = picture(shape)
        out = made(x)
        assert torch.equal(out, plain(made, x)), (state(made).captured, state(made).replayed, reasons())
        assert out.stride() == plain(made, x).stride()


def reasons():
    return [refusal.reason for refusal in LEDGER.refusals if refusal.op == "network"]


def used():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def test_replays_have_the_same_bits_and_results_are_the_callers(net):
    same(net, calls=6)
    assert (state(net).captured, state(net).replayed) == (1, 3) and not reasons()
    kept = [(x, net(x)) for x in (picture() for _ in range(8))]
    for x, out in kept:
        assert torch.equal(out, plain(net, x))
    assert 0 < state(net).nbytes < 2**30


def test_two_shapes_in_turns(net):
    for _ in range(6):
        same(net, SMALL, 1)
        same(net, WIDE, 1)
    assert state(net).captured == state(net).count == 2 and state(net).replayed == 6


@pytest.mark.parametrize("what", ["read as they lie", "folded", "of a norm", "replaced", "loaded", "a value"])
def test_changed_weights_are_seen_at_the_next_call(net, what):
    same(net)
    x = picture()
    before = net(x)
    if what == "read as they lie":
        net.last.weight.mul_(-1)
    elif what == "folded":
        net.conv.weight.mul_(-0.5)
    elif what == "of a norm":
        net.first[2].weight.mul_(0.5)
    elif what == "replaced":
        net.last.bias = nn.Parameter(net.last.bias + 4, requires_grad=False)
    elif what == "loaded":
        net.load_state_dict({name: t * 0.5 for name, t in net.state_dict().items()})
    else:
        net.norm.eps = 0.5
        net.norm._original.eps = 0.5
    after = net(x)
    assert torch.equal(after, plain(net, x))
    assert what == "a value" or not torch.equal(after, before)
    replayed = state(net).replayed
    same(net)
    assert state(net).replayed > replayed, reasons()


def test_of_inference_mode_what_is_read_as_it_lies_counts():
    with torch.inference_mode():
        net = drawn()
        until_chosen(lambda: plain(net, picture()))
        same(net)
        net.first[2].weight.mul_(0.5)  # of which torch counts nothing
        replayed = state(net).replayed
        same(net)
        assert state(net).replayed == replayed + 4


def test_a_stream_of_its_own_and_two_in_turns(net):
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(6):
        xs = [picture() for _ in streams]
        torch.cuda.synchronize()
        outs = []
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                outs.append(net(x))
        torch.cuda.synchronize()
        for x, out in zip(xs, outs, strict=True):
            assert torch.equal(out, plain(net, x))
    assert state(net).captured == 2 and state(net).replayed == 6


def test_what_moves_unfuses_or_dies_leaves_no_vram():
    net = drawn()
    until_chosen(lambda: plain(net, picture(WIDE)))
    same(net, WIDE)
    release(net)
    before = used()
    for end in ("release", "moved", "unfused", "dead"):
        same(net, WIDE)
        assert state(net).count == 1 and state(net).nbytes > 0, end
        if end == "release":
            assert release(net) > 0
        elif end == "moved":
            net.cpu()
            net.cuda()
        elif end == "unfused":
            unfuse(net)
            fuse(net, graphs=True)
            pays(net)
        else:
            del net
        assert used() < before + 4, end


def test_in_a_little_room_it_goes_on_without(net):
    x = picture(WIDE)
    want = plain(net, x)
    state(net)._recorder.record = fails
    for _ in range(6):
        assert torch.equal(net(x), want)
    assert state(net).captured == 0 and reasons() == ["too little VRAM is left for what was captured"]


def fails(_device, _work):
    raise torch.OutOfMemoryError("none")


def test_within_anothers_recording_it_is_recorded(net):
    same(net)
    x, replayed = picture(), state(net).replayed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = net(x)
    x.copy_(picture())
    graph.replay()
    assert torch.equal(out, plain(net, x)) and state(net).replayed == replayed


def test_under_the_allocator_that_comfyui_takes():
    under_comfyuis_allocator(__file__)
