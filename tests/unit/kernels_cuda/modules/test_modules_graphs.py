"""Networks as owners of captured calls: what of a network ends its graphs, and which calls are none of theirs. Over a recorder
that tapes torch's operations; the CPU counts as a device of ours, and the ops run their references.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from taped import NBYTES, TapingRecorder
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fusestream.kernels_cuda import LEDGER
from fusestream.kernels_cuda.modules import (
    fallback,
    fuse,
    graphs,
    unfuse,
)
from fusestream.kernels_cuda.modules.graphs import (
    STATE,
    attach,
    captures_of,
    launch_after_launch,
    release,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A chain whose batch norm is folded, one with an instance norm, and a plain layer; it counts how often it ran."""

    def __init__(self, c: int = 4):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.conv, self.norm = nn.Conv2d(c, c, 3, padding=1), nn.InstanceNorm2d(c, affine=True)
        self.last = nn.Conv2d(c, 3, 1)
        self.scale = 2.0

    def forward(self, x, more=None):
        RAN.append(id(self))
        value = self.last(self.norm(self.conv(self.first(x)))) * self.scale
        return value if more is None else (value + more, {"twice": value * 2})


RAN: list[int] = []


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(fallback, "DEVICES", ("cuda", "cpu"))
    torch.manual_seed(1)
    LEDGER.clear()
    RAN.clear()
    yield
    LEDGER.clear()


@pytest.fixture
def recorder():
    return TapingRecorder()


@pytest.fixture
def net(recorder):
    return taped(drawn(Net()), recorder)


def drawn(net):
    """With statistics of its own, in halves."""
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    return net.half().eval().requires_grad_(False).to(memory_format=torch.channels_last)


def taped(net, recorder):
    fuse(net, graphs=True)
    for captures in captures_of(net):
        captures._recorder = recorder
    return net


def state(net):
    return net.__dict__[STATE]


def picture(*shape):
    return torch.randn(*(shape or (1, 3, 8, 6))).half().contiguous(memory_format=torch.channels_last)


def wanted(net, *given, **named):
    with launch_after_launch():
        return net(*given, **named)


def same(net, *given, **named):
    torch.testing.assert_close(net(*given, **named), wanted(net, *given, **named), rtol=0, atol=0)


def warm(net, *shape, calls=4):
    for _ in range(calls):
        same(net, picture(*shape))
    return state(net)


def reasons():
    return [refusal.reason for refusal in LEDGER.refusals if refusal.op == "network"]


# ------------------------------------------------------------------------------------------------------- captured, replayed


def test_two_calls_run_the_third_is_captured_the_others_are_replayed(net, recorder):
    captures = warm(net, calls=3)
    assert (captures.captured, captures.replayed, captures.count) == (1, 0, 1)
    RAN.clear()
    kept = [(x, net(x)) for x in (picture() for _ in range(3))]
    assert not RAN and captures.replayed == 3 and captures.nbytes > NBYTES
    for x, out in kept:  # what comes out is the callers'
        assert torch.equal(out, wanted(net, x)) and out.is_contiguous(memory_format=torch.channels_last)
    assert not reasons()


def test_what_is_given_by_name_and_how_torch_is_set_makes_another_call(net, monkeypatch):
    captures, x, more = warm(net), picture(), picture()
    for i in range(4):
        same(net, x, more=more)
        assert captures.captured == 1 + (i >= 2)
    assert captures.replayed == 2
    for owner, name in ((torch.backends.cudnn, "benchmark"), (torch.backends.cudnn, "deterministic")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, not getattr(owner, name))
            same(net, x)
        assert captures.replayed == 2, name


def test_what_is_within_is_captured_with_the_whole(recorder):
    whole = nn.ModuleDict({"net": drawn(Net())})
    whole.forward = None
    outer = nn.Sequential(nn.Identity(), whole.pop("net"))
    attach(outer[1])
    taped(outer.half().eval(), recorder)
    for _ in range(5):
        same(outer, picture())
    assert state(outer).replayed == 2 and state(outer[1]).captured == 0


# ------------------------------------------------------------------------------------------------------------ what ends it


def write(net):
    with torch.no_grad():
        net.conv.weight.mul_(-1)


def write_folded(net):
    with torch.no_grad():
        net.first[0].weight.mul_(0.5)
        net.first[1].running_mean.add_(1)


def load(net):
    net.load_state_dict({name: t * 0.75 for name, t in net.state_dict().items()})


def replace(net):
    net.last.weight = nn.Parameter(net.last.weight * 2, requires_grad=False)


def replace_data(net):
    net.last.weight.data = net.last.weight.data * 3


def replace_part(net):
    net.norm = nn.InstanceNorm2d(4).half().eval()


def set_a_value(net):
    net.scale = 0.5


def set_a_value_within(net):
    net.first[1].eps = 0.5


def put_a_hook(net):
    net.last.register_forward_hook(lambda _module, _given, out: out + 1)


def replace_a_forward(net):
    net.last.forward = lambda x: x[:, :3] * 2


def move(net):
    net.to(torch.float16).to(memory_format=torch.contiguous_format)


def move_a_part(net):
    net.first.to(memory_format=torch.contiguous_format)


CHANGES = [
    write,
    write_folded,
    load,
    replace,
    replace_data,
    replace_part,
    set_a_value,
    set_a_value_within,
    put_a_hook,
    replace_a_forward,
    move,
    move_a_part,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_changes_is_seen_at_the_next_call(net, recorder, change):
    captures = warm(net)
    x = picture()
    before = net(x)
    change(net)
    after = net(x)
    assert torch.equal(after, wanted(net, x)) and not recorder.tapes
    if change not in (move, move_a_part):
        assert not torch.equal(after, before)
    captured_before = captures.captured
    for _ in range(4):
        same(net, picture())
    again = change not in (put_a_hook, replace_a_forward)
    assert (captures.captured > captured_before) is again, reasons()
    assert bool(reasons()) is not again


def test_weights_that_change_at_each_call_are_looked_at_ever_more_seldom(net, monkeypatch):
    captures, looks, holds = warm(net), [], graphs.Standing.holds
    monkeypatch.setattr(graphs.Standing, "holds", lambda self, net: (looks.append(1), holds(self, net))[1])
    for _ in range(40):
        same(net, picture())
        write(net)
    assert captures.captured == 1 and len(looks) < 12, "no call finds the network as it was"
    for _ in range(60):
        write(net)
        for _ in range(2):
            same(net, picture())
    assert captures.captured < 8
    for _ in range(2 * graphs.LONGEST_PAUSE):
        same(net, picture())
    assert captures.replayed > 4


def test_what_torch_does_not_count_is_told(recorder):
    """Parameters of inference mode: who writes to them says so."""
    with torch.inference_mode():
        net = taped(drawn(Net()), recorder)
        warm(net)
        net.first[0].weight.mul_(2)
        for step in net.first._steps:
            step.fused.refold()
        same(net, picture())
        net.conv.weight.mul_(2)  # read where it lies
        for _ in range(4):
            same(net, picture())
        assert state(net).replayed > 2


def test_moving_gives_everything_back_at_once(net, recorder):
    captures = warm(net)
    net.to(torch.float16)
    # What was made of weights goes at each `.to`.
    assert not recorder.tapes and captures.nbytes == 0
    warm(net, calls=3)
    assert len(recorder.tapes) == 1
    assert release(net) > NBYTES and not recorder.tapes and release(net) == 0
    warm(net, calls=3)
    assert len(recorder.tapes) == 1


def test_unfuse_takes_it_out(net, recorder):
    warm(net)
    kind, x = type(net), picture()
    want = net(x)
    assert isinstance(net, Net) and kind.__name__ == "Net" and kind is not Net
    assert unfuse(net) == 4 and type(net) is Net and STATE not in net.__dict__ and not recorder.tapes
    torch.testing.assert_close(net(x), want, atol=2e-2, rtol=2e-2)
    assert not captures_of(net)


def test_fuse_again_and_without_a_word_of_graphs(net, recorder):
    warm(net)
    net.more = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()).half().eval()
    table = fuse(net)
    assert len(table.replaced) == 1 and type(net) is not Net and not recorder.tapes
    attach(net)
    assert len(captures_of(net)) == 1


def test_copies_and_files_begin_empty(net, recorder):
    warm(net)
    x = picture()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other) is type(net) and state(other) is not state(net) and state(other).count == 0
        assert torch.equal(wanted(other, x), net(x))
        assert list(other.state_dict()) == list(net.state_dict())
        assert type(other).forward.__wrapped__ is Net.forward
    assert state(net).count == 1


def test_a_network_that_nobody_holds_goes_at_once(net, recorder):
    net = taped(drawn(Net()), recorder)
    warm(net)
    recorder.tapes[0]._steps = []  # a tape's tensors are none of a graph's
    gone = weakref.ref(net), weakref.ref(state(net)), weakref.ref(state(net)._network._standing)
    gc.collect()  # what torch.fx has left of its own
    gc.disable()
    try:
        del net
        assert [ref() for ref in gone] == [None, None, None] and not recorder.tapes
    finally:
        gc.enable()


def test_weights_are_not_kept_alive(net, recorder):
    warm(net)
    recorder.tapes[0]._steps = []
    gone = weakref.ref(net.last.weight)
    net.last.weight = nn.Parameter(net.last.weight.clone(), requires_grad=False)
    assert gone() is None


# ------------------------------------------------------------------------------------------------------ what is not captured


class Keeping(Net):
    def forward(self, x):
        self.before = x
        return super().forward(x)


def test_a_network_that_keeps_something_at_each_call_is_told_of_and_left_alone(recorder):
    net = taped(drawn(Keeping()), recorder)
    for _ in range(9):
        x = picture()
        assert torch.equal(net(x), wanted(net, x))
    assert state(net).captured == 0 and reasons() == ["it, or something that it keeps, is another one at each call"]


def wants_gradients(net):
    net.requires_grad_(True)


def trains(net):
    net.last.train()


def is_on_the_cpu(net):
    fallback.DEVICES = ("cuda",)


@pytest.mark.parametrize("change", [wants_gradients, trains, is_on_the_cpu], ids=lambda change: change.__name__)
def test_calls_that_no_graph_could_stand_for(net, recorder, change):
    captures = warm(net)
    change(net)
    before = captures.replayed
    for _ in range(5):
        net(picture())
    assert captures.replayed == before and captures.captured == 1


def test_torchs_modes_hooks_of_all_modules_and_tracing_are_gone_around(net):
    captures = warm(net)
    RAN.clear()
    with FlopCounterMode(display=False) as counter:
        net(picture())
    assert counter.get_total_flops() > 0 and len(RAN) == 1
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, _given, _out: seen.append(module))
    net(picture())
    handle.remove()
    assert net in seen and len(RAN) == 2
    assert torch.func.vmap(net)(picture()[None]).shape == (1, 1, 3, 8, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda: True)
        net(picture())
    assert captures.replayed == 1
    plain = Net().eval()
    attach(plain)
    assert fx.symbolic_trace(plain).graph.find_nodes(op="placeholder", target="x")


def test_what_torch_compiles_is_torchs(net):
    captures, x = warm(net), picture()
    want = copy.deepcopy(net)
    unfuse(want)
    compiled = torch.compile(net, backend="eager")
    for _ in range(6):
        torch.testing.assert_close(compiled(x), want(x), atol=2e-2, rtol=2e-2)
    assert captures.replayed == 1


def test_own_hooks_are_called_around_it(net):
    seen = []
    net.register_forward_hook(lambda _module, _given, _out: seen.append(1))
    warm(net)
    assert state(net).replayed == 1 and len(seen) == 8  # with those that are wanted


def test_large_pictures_are_left_alone(net, monkeypatch):
    monkeypatch.setattr(graphs, "LARGE", 300)
    warm(net, 1, 3, 8, 6, calls=5)
    assert state(net).replayed == 2
    warm(net, 1, 3, 8, 8, calls=5)
    assert state(net).replayed == 2 and not reasons(), "on the CPU nobody expects any"


def test_moving_may_make_room(net, recorder):
    recorder.fails = torch.OutOfMemoryError("none")
    captures = warm(net, calls=6)
    assert captures.captured == 0 and reasons() == ["too little VRAM is left for what was captured"]
    net.to(torch.float16)
    assert warm(net, calls=3).captured == 1


def test_what_is_no_tensor_or_lies_elsewhere_is_none_of_ours(net, recorder):
    class Other(nn.Module):
        def forward(self, x):
            return x

    other = taped(Other().eval(), recorder)
    for given in (3, None, [], object(), torch.ones(2), torch.ones(2, dtype=torch.float16).to_sparse()):
        for _ in range(4):
            assert other(given) is given
    assert state(other).captured == 0
    attach(torch.jit.script(Other()))
    assert "torch.jit" in reasons()[-1]
