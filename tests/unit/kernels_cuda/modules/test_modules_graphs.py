"""Networks whose calls are captured: when they are replayed, what ends that, what is never captured. Over a recorder that tapes
torch's operations; the CPU counts as a device of ours, and the ops run their references.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from taped import NBYTES, TapingRecorder
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fusestream.gpu.graphs import NotRecorded
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


def test_shapes_strides_types_of_torchs_modes_and_values_have_graphs_of_their_own(net, recorder):
    captures = warm(net)
    for given in ((picture(2, 3, 8, 6),), (picture().contiguous(),), (picture(), picture(1, 3, 8, 6))):
        for _ in range(5):
            same(net, *given)
            assert captures.captured == len(recorder.tapes)
    assert captures.captured == captures.count == 4
    with torch.inference_mode():
        for _ in range(4):
            same(net, picture())
    assert captures.captured == 5 and captures.count == len(recorder.tapes) == graphs.MOST_GRAPHS, "the oldest went"
    before = captures.replayed
    same(net, picture(), more=picture())  # by name it is another call
    assert captures.replayed == before


def test_two_shapes_in_turns(net):
    for _ in range(6):
        same(net, picture())
        same(net, picture(1, 3, 4, 4))
    assert state(net).captured == 2 and state(net).replayed == 6


def test_what_is_within_is_captured_with_the_whole(recorder):
    whole = nn.ModuleDict({"net": drawn(Net())})
    whole.forward = None
    outer = nn.Sequential(nn.Identity(), whole.pop("net"))
    attach(outer[1])
    taped(outer.half().eval(), recorder)
    for _ in range(5):
        same(outer, picture())
    assert state(outer).replayed == 2 and state(outer[1]).captured == 0


def test_two_threads_get_their_own_results(net):
    warm(net)
    xs = [picture() for _ in range(40)]
    found = {}

    def work(numbers):
        for i in numbers:
            found[i] = net(xs[i])

    threads = [threading.Thread(target=work, args=(range(k, 40, 4),)) for k in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for i, x in enumerate(xs):
        assert torch.equal(found[i], wanted(net, x))


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


def test_weights_that_change_at_each_call_are_captured_ever_more_seldom(net):
    captures = warm(net)
    for _ in range(40):
        same(net, picture())
        write(net)
    assert captures.captured == 1, "no call finds the network as it was"
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
    gone = weakref.ref(net), weakref.ref(state(net)), weakref.ref(state(net)._standing)
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


class Writing(Net):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Asking(Net):
    def forward(self, x):
        return super().forward(x) if float(x.float().mean()) > -100 else x


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Keeping, "it, or something that it keeps, is another one at each call"),
        (Writing, "it changes what it is given"),
        (Asking, "it waits for the card (_local_scalar_dense)"),
    ],
)
def test_networks_that_no_graph_could_stand_for(recorder, kind, why):
    net = taped(drawn(kind()), recorder)
    for _ in range(9):
        x = picture()
        out = net(x.clone())
        with launch_after_launch():
            assert torch.equal(out, net(x.clone()))
    assert state(net).captured == 0 and reasons() == [why]


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


def test_where_the_card_is_the_bound_nothing_is_gained(recorder):
    recorder.bound = "card"
    net = taped(drawn(Net()), recorder)
    warm(net, calls=6)
    assert state(net).captured == 0 and not reasons()


def test_nothing_is_captured_while_kernels_are_chosen(net):
    captures, left = state(net), [5]

    def undecided():
        return -left[0]

    captures._undecided = undecided
    real = net.last.forward

    class Chooses(nn.Conv2d):
        def forward(self, x):
            left[0] -= left[0] > 0
            return super().forward(x)

    assert real is not None
    own = Chooses(4, 3, 1).half().eval().requires_grad_(False)
    net.last = own
    for i in range(9):
        net(picture())
        assert (captures.captured == 1) is (i >= 6), i


def test_large_pictures_are_left_alone(net, monkeypatch):
    monkeypatch.setattr(graphs, "LARGE", 300)
    warm(net, 1, 3, 8, 6, calls=5)
    assert state(net).replayed == 2
    warm(net, 1, 3, 8, 8, calls=5)
    assert state(net).replayed == 2 and not reasons(), "on the CPU nobody expects any"


def test_a_graph_that_takes_much_is_given_back(net, recorder, monkeypatch):
    captures = warm(net)
    warm(net, 1, 3, 4, 4)
    monkeypatch.setattr(graphs, "MOST_BYTES", NBYTES * 3 // 2)
    warm(net, 1, 3, 5, 4)
    assert captures.count == len(recorder.tapes) == 1, "of three the latest"
    monkeypatch.setattr(graphs, "MOST_BYTES", NBYTES // 2)
    warm(net, 1, 3, 6, 4, calls=6)
    assert captures.captured == 4 and "GiB of VRAM" in reasons()[0]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none"), NotRecorded("CUDA says no")])
def test_what_cannot_be_recorded_runs_as_ever_and_is_told_once(net, recorder, error):
    recorder.fails = error
    captures = warm(net, calls=6)
    assert captures.captured == 0 and len(reasons()) == 1
    is_for_now = isinstance(error, torch.OutOfMemoryError)
    net.to(torch.float16)  # there may be room now
    warm(net, calls=3)
    assert (captures.captured == 1) is is_for_now


def test_a_replay_that_finds_no_room(net, recorder):
    captures = warm(net)
    recorder.tapes[0].fails = torch.OutOfMemoryError("none")
    warm(net, calls=2)
    assert not recorder.tapes and captures.replayed == 1 and "too little VRAM" in reasons()[0]


def test_an_interrupt_leaves_nothing_half(net, recorder):
    warm(net)
    recorder.tapes[0].fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        net(picture())
    assert not recorder.tapes
    warm(net, calls=4)
    assert len(recorder.tapes) == 1


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


def test_switched_off(net, recorder):
    recorder.nothing = "they are switched off"
    warm(net, calls=6)
    assert state(net).captured == 0


def test_what_a_recording_does_not_see_is_found_at_the_first_replay(net, recorder):
    def past_torch(part, x):
        made = torch.zeros_like(x)
        made.numpy()[:] = x.numpy() + 1
        return made

    class Sly(nn.Module):
        forward = past_torch

    net.last = Sly().eval()
    for _ in range(6):
        same(net, picture())
    assert state(net).captured == 1 and state(net).replayed == 0 and not recorder.tapes
    assert reasons() == [graphs.STRAYS]
