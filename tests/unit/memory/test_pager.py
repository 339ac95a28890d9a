"""The pager on plain memory: right bytes, never over budget, whatever is asked, in whatever order, whatever fails."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import load_file

from bed.depth import examples
from fusestream import checkpoints
from fusestream.memory import (
    Checkpoint,
    DeviceBudget,
    Extent,
    FileChanged,
    HostBackend,
    Layer,
    Ledger,
    OverBudget,
    Pager,
    PagerError,
    Plan,
    Rates,
    Weight,
    make_plan,
    staging_bytes,
)
from fusestream.memory import pager as pager_module
from fusestream.memory.layer import WEIGHT_ALIGNMENT


class BadDisk(OSError):
    """What the tests' source raises."""


class Numbers:
    """A source whose bytes follow from where they lie, and that fails or waits when told to."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.reads = 0

    @staticmethod
    def content(extent: Extent) -> torch.Tensor:
        return (torch.arange(extent.begin, extent.end) * 37 + extent.begin // 251).to(torch.uint8)

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        self.gate.wait()
        self.reads += 1
        if extent.name in self.failing:
            raise BadDisk(extent.name)
        assert len(buffer) == extent.nbytes
        buffer[:] = self.content(extent).numpy().data


def make_layers(shapes: list[list[int]], dtype: str = "F16") -> list[Layer]:
    """Layers of weights with these numbers of elements."""
    at, layers = 0, []
    for number, counts in enumerate(shapes):
        weights = []
        for count in counts:
            size = count * (2 if dtype == "F16" else 4)
            name = f"{number}.{len(weights)}"
            weights.append(Weight(name, Extent(name, dtype, (count,), at, at + size)))
            at += size
        layers.append(Layer(f"layer {number}", tuple(weights)))
    return layers


def right(layer: Layer, weights) -> bool:
    return all(
        torch.equal(weights[w.name].view(torch.uint8), Numbers.content(w.extent))
        and weights[w.name].dtype is torch.float16
        for w in layer.weights
    )


class Streaming(RuleBasedStateMachine):
    """Any calls in any order, beside a model of what must be true."""

    @initialize(
        shapes=st.lists(st.lists(st.integers(0, 400), min_size=1, max_size=3), min_size=1, max_size=9),
        room=st.integers(0, 20_000),
    )
    def begin(self, shapes, room):
        self.source, self.ledger = Numbers(), Ledger()
        self.layers = make_layers(shapes)
        self.device = DeviceBudget(room)
        self.budget = room
        self.backend = HostBackend(self.source, self.ledger)
        self.using: list[tuple[int, object]] = []
        try:
            self.pager = Pager(self.layers, room, self.device, self.backend, self.ledger)
        except OverBudget:
            self.pager = None
            self.backend.close()
            assert self.device.taken == 0

    def streams(self):
        return self.pager is not None

    @precondition(streams)
    @rule(data=st.data())
    def acquire(self, data):
        i = data.draw(st.integers(0, len(self.layers) - 1))
        broken = any(w.name in self.source.failing for w in self.layers[i].weights)
        try:
            weights = self.pager.acquire(i)
        except BadDisk:
            assert broken
        except PagerError as error:
            assert "slots of the window in use" in str(error)
            held = {j for j, _ in self.using} - self.pager.plan.resident - {i}
            assert len(held) >= self.pager.plan.slots
        else:
            assert right(self.layers[i], weights)
            self.using.append((i, weights))

    @precondition(lambda self: self.pager is not None and self.using)
    @rule(data=st.data())
    def release(self, data):
        i, weights = self.using.pop(data.draw(st.integers(0, len(self.using) - 1)))
        assert right(self.layers[i], weights), "what is in use was overwritten"
        self.pager.release(i)

    @precondition(streams)
    @rule(data=st.data())
    def prefetch(self, data):
        self.pager.prefetch(data.draw(st.integers(0, len(self.layers) - 1)))

    @precondition(streams)
    @rule(number=st.integers(0, 8))
    def disk_breaks(self, number):
        self.source.failing = {f"{number}.0"}

    @rule()
    def disk_heals(self):
        self.source.failing = set()

    @precondition(streams)
    @rule()
    def interrupted(self):
        self.pager.abandon()
        self.using = []

    @precondition(streams)
    @rule(room=st.integers(0, 20_000))
    def another_budget(self, room):
        self.device.total = max(room, self.budget)
        try:
            self.pager.resize(room)
            self.budget = self.device.total = room
        except PagerError:
            assert self.using
        except OverBudget:
            pass
        self.device.total = self.budget

    @precondition(streams)
    @rule()
    def a_pass(self):
        self.source.failing = set()
        if self.using:
            return
        for i, layer in enumerate(self.layers):
            with self.pager.use(i) as weights:
                assert right(layer, weights)

    @invariant()
    def within_the_budget(self):
        if getattr(self, "pager", None) is not None:
            assert self.pager.held_bytes <= self.budget
            assert self.device.taken == self.pager.held_bytes == self.ledger.held("VRAM")

    def teardown(self):
        if getattr(self, "pager", None) is not None:
            self.pager.close()
            self.pager.close()
            assert self.device.taken == 0 and self.ledger.held("VRAM") == 0


TestStreaming = Streaming.TestCase
TestStreaming.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)


@pytest.fixture
def streaming():
    """Ten layers of 1024 bytes through a window of two slots, three of them resident."""
    source, ledger, device = Numbers(), Ledger(), DeviceBudget(5 * 1024)
    layers = make_layers([[256, 256]] * 10)
    pager = Pager(layers, device.total, device, HostBackend(source, ledger), ledger)
    yield pager, layers, source, ledger, device
    source.gate.set()
    pager.close()


def test_a_pass_reads_each_streamed_layer_once(streaming):
    pager, layers, source, ledger, _ = streaming
    assert (len(pager.plan.resident), pager.plan.slots) == (3, 2)
    for number in range(4):
        for i, layer in enumerate(layers):
            with pager.use(i) as weights:
                assert right(layer, weights)
        expected = 10 * 2 + number * 7 * 2  # two weights a layer
        assert expected <= source.reads <= expected + 4, "at most as many as there are slots are on their way already"
    copied = ledger.summary()["bytes by route"]["file"]
    assert 10 * 1024 + 3 * 7 * 1024 - 1 < copied <= 10 * 1024 + 3 * 7 * 1024 + 2 * 1024


def test_the_next_layer_comes_while_one_is_in_use(streaming):
    pager, layers, source, _, _ = streaming
    streamed = pager.plan.streamed
    with pager.use(streamed[0]):
        pager._backend.drain()
        reads = source.reads
        source.gate.clear()  # nothing more can be read
        assert right(layers[streamed[1]], pager.acquire(streamed[1]))
        assert source.reads == reads
        source.gate.set()


def test_packed_weights_lie_side_by_side(streaming):
    """q and k of one layer, in order and without a gap: one packed weight is a view of both."""
    pager, _, _, _, _ = streaming
    with pager.use(0) as weights:
        q, k = weights["0.0"], weights["0.1"]
        assert k.data_ptr() == q.data_ptr() + q.numel() * 2 and q.numel() * 2 % WEIGHT_ALIGNMENT == 0
        packed = torch.as_strided(q, (512,), (1,))
        assert torch.equal(packed[256:].view(torch.int16), k.view(torch.int16))


def test_a_layer_may_be_used_twice_at_once(streaming):
    pager, layers, _, _, _ = streaming
    i = pager.plan.streamed[0]
    with pager.use(i) as outer:
        with pager.use(i) as inner:
            assert outer["0.0" if i == 0 else f"{i}.0"].data_ptr() == inner[f"{i}.0"].data_ptr()
        for j in pager.plan.streamed[1:]:
            pager.prefetch(j)
        pager._backend.drain()
        assert right(layers[i], outer), "the first use goes on"
    with pytest.raises(PagerError, match="released more often"):
        pager.release(i)


def test_too_many_at_once_is_said(streaming):
    pager, _, _, _, _ = streaming
    first, second, third, *_ = pager.plan.streamed
    words = r"finds all 2 slots of the window in use.*Raise the VRAM budget"
    with pager.use(first), pager.use(second), pytest.raises(PagerError, match=words):
        pager.acquire(third)
    with pager.use(third):
        pass


def test_an_interrupt_leaves_nothing_behind(streaming):
    """In the middle of a layer's work, and while waiting for one."""
    pager, layers, source, _, _ = streaming
    first, second, third, *_ = pager.plan.streamed
    with pytest.raises(KeyboardInterrupt), pager.use(first):
        raise KeyboardInterrupt
    pager.acquire(second)
    pager.acquire(first)
    pager.abandon()  # the caller has lost count
    source.gate.clear()
    wait = pager._backend.wait

    def interrupted(copy):
        raise KeyboardInterrupt

    pager._backend.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        pager.acquire(third)
    pager._backend.wait = wait
    source.gate.set()
    for i, layer in enumerate(layers):
        with pager.use(i) as weights:
            assert right(layer, weights)


def test_a_read_error_names_itself_and_passes(streaming):
    pager, layers, source, _, device = streaming
    i = pager.plan.streamed[3]
    source.failing = {f"{i}.1"}
    taken = device.taken
    for _ in range(3):
        with pytest.raises(BadDisk, match=rf"{i}\.1"):
            pager.acquire(i)
    source.failing = set()
    with pager.use(i) as weights:
        assert right(layers[i], weights)
    assert device.taken == taken


def test_what_failed_ahead_of_its_use_is_tried_again(streaming):
    pager, layers, source, _, _ = streaming
    first, second, *_ = pager.plan.streamed
    source.failing = {f"{second}.0"}
    with pager.use(first):
        pager._backend.drain()
    source.failing = set()
    with pager.use(second) as weights:
        assert right(layers[second], weights)


def test_two_models_share_a_device():
    ledger, device = Ledger(), DeviceBudget(8 * 1024, "cuda:0")
    layers = make_layers([[512]] * 10)
    pagers = [Pager(layers, 4 * 1024, device, HostBackend(Numbers(), ledger), ledger) for _ in range(2)]
    assert device.left == 0
    backend = HostBackend(Numbers(), ledger)
    with pytest.raises(OverBudget, match=r"on cuda:0, and of its budget .* other models hold"):
        Pager(layers, 4 * 1024, device, backend, ledger)
    backend.close()
    assert device.left == 0, "what failed took nothing"
    for i, layer in enumerate(layers):
        with pagers[0].use(i) as one, pagers[1].use(i) as other:
            assert right(layer, one) and right(layer, other)
    pagers[0].close()
    assert device.left == 4 * 1024
    with pytest.raises(PagerError, match="weights were unloaded"):
        pagers[0].acquire(0)
    pagers[1].close()
    assert device.taken == 0


def test_less_and_more_without_starting_anew(streaming):
    pager, layers, _, ledger, device = streaming
    for i in range(10):
        with pager.use(i):
            pass
    kept = {i: pager._places[i].room.data_ptr() for i in pager.plan.resident}
    device.total = 7 * 1024
    pager.resize(7 * 1024)
    assert len(pager.plan.resident) == 5
    assert all(pager._places[i].room.data_ptr() == kept[i] for i in kept.keys() & pager.plan.resident)
    pager.resize(3 * 1024)
    assert device.taken <= 3 * 1024 and ledger.peak("VRAM") <= 7 * 1024
    for i, layer in enumerate(layers):
        with pager.use(i) as weights:
            assert right(layer, weights)
    with pager.use(0), pytest.raises(PagerError, match="cannot change while"):
        pager.resize(5 * 1024)
    with pytest.raises(OverBudget):
        pager.resize(100)
    with pager.use(4) as weights:  # what was there goes on
        assert right(layers[4], weights)


def test_what_is_made_of_a_layer_lasts_until_it_comes_anew(streaming):
    pager, layers, _, _, _ = streaming
    resident, streamed = min(pager.plan.resident), pager.plan.streamed
    with pager.use(resident) as weights:
        first = pager.arrival(resident)
        weights[layers[resident].weights[0].name].zero_()
        with pytest.raises(PagerError, match=f"{layers[resident].name} cannot come anew while it is in use"):
            pager.renew([resident])
    with pytest.raises(PagerError, match="is not in use"):
        pager.arrival(resident)
    with pager.use(resident) as weights:
        assert pager.arrival(resident) is first and not right(layers[resident], weights)
    with pager.use(streamed[0]) as weights:
        weights[layers[streamed[0]].weights[0].name].zero_()
    pager.renew(range(len(layers)))  # those that are not there too
    for i in (resident, *streamed):
        with pager.use(i) as weights:
            assert right(layers[i], weights) and pager.arrival(i) is not first


def test_the_same_budget_again_throws_nothing_out(streaming):
    pager, layers, source, _, device = streaming
    with pager.use(0):
        pass
    pager._backend.drain()
    reads = source.reads
    pager.resize(device.total)
    with pager.use(0) as weights:
        assert right(layers[0], weights)
        pager._backend.drain()
    assert source.reads == reads


def test_stored_types_become_the_models():
    """fp32 in the file, fp16 on the device, by the function that is handed in."""
    layers = [
        Layer(layer.name, tuple(Weight(w.name, w.extent, torch.float16) for w in layer.weights))
        for layer in make_layers([[100], [60, 30]], "F32")
    ]
    ledger, device, calls = Ledger(), DeviceBudget(10_000), []

    def convert(stored, out, _encoding):
        calls.append(stored.shape)
        out.copy_(stored.nan_to_num(posinf=0, neginf=0))

    backend = HostBackend(Numbers(), ledger, convert, staging_bytes(layers))
    assert staging_bytes(layers) == 400
    pager = Pager(layers, 10_000, device, backend, ledger)
    with pager.use(1) as weights:
        stored = Numbers.content(layers[1].weights[0].extent).view(torch.float32)
        assert torch.equal(weights["1.0"], stored.nan_to_num(posinf=0, neginf=0).half())
        assert weights["1.1"].shape == (30,) and weights["1.1"].dtype is torch.float16
    assert calls[:2] == [(60,), (30,)]
    pager.close()


def test_without_a_conversion_handed_in_torch_casts():
    stored = make_layers([[60, 30]], "F32")[0]
    layer = Layer(stored.name, tuple(Weight(w.name, w.extent, torch.float16) for w in stored.weights))
    ledger, device = Ledger(), DeviceBudget(10_000)
    pager = Pager([layer], 10_000, device, HostBackend(Numbers(), ledger, None, staging_bytes([layer])), ledger)
    with pager.use(0) as weights:
        for w in layer.weights:
            want = Numbers.content(w.extent).view(torch.float32).half()
            assert torch.equal(weights[w.name].view(torch.int16), want.view(torch.int16))
    pager.close()


def test_closing_in_the_middle_of_a_copy_ends_and_leaks_nothing():
    before = set(threading.enumerate())
    source, ledger, device = Numbers(), Ledger(), DeviceBudget(5 * 1024)
    pager = Pager(make_layers([[512]] * 10), device.total, device, HostBackend(source, ledger), ledger)
    source.gate.clear()
    pager.prefetch(pager.plan.streamed[0])
    threading.Timer(0.05, source.gate.set).start()
    pager.close()
    assert device.taken == 0
    room = weakref.ref(pager)
    del pager
    gc.collect()
    assert room() is None
    assert not [t for t in set(threading.enumerate()) - before if t.name == "fusestream-copies" and t.is_alive()]


def test_the_ledger_tells_it_all(streaming):
    pager, _, _, ledger, _ = streaming
    ledger.note("backend", "plain memory: there is no GPU")
    for i in range(10):
        with pager.use(i):
            pass
    pager._backend.drain()
    told = json.loads(ledger.to_json())
    assert told["summary"]["counts"]["stall"] == 10 and told["summary"]["notes"]["backend"].startswith("plain")
    assert told["summary"]["peak bytes"]["VRAM"] == pager.held_bytes
    assert {row[0] for row in told["timeline"]} == {"copy", "stall", "use"}
    events = json.loads(ledger.chrome_trace())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"} and all(e.get("dur", 0) >= 0 for e in events)
    assert sum(e["args"].get("bytes", 0) for e in events if e.get("cat") == "copy") >= 10 * 1024


def test_the_ledger_does_not_grow():
    ledger = Ledger(most=10)
    for number in range(1000):
        ledger.add("copy", "x", number, number + 0.5, 3, "file")
    assert len(ledger.entries) == 10
    assert ledger.summary()["bytes by route"]["file"] == 3000 and ledger.summary()["seconds"]["copy"] == 500


def test_a_plan_for_the_same_sizes_is_the_pagers(streaming):
    pager, layers, _, _, device = streaming
    assert pager.plan == make_plan([layer.nbytes for layer in layers], device.total)


@pytest.fixture
def tiny_wan(tmp_path):
    """A real file, its path, and its blocks as layers."""
    path = checkpoints.write("wan_t2v", tmp_path, "fp16")
    source = Checkpoint.open(path)
    blocks: dict[str, list[Weight]] = {}
    for name, extent in source.extents.items():
        parts = name.removeprefix("model.diffusion_model.").split(".")
        block = ".".join(parts[:2]) if parts[0] == "blocks" else "the rest"
        blocks.setdefault(block, []).append(Weight(name, extent))
    layers = [Layer(name, tuple(weights)) for name, weights in blocks.items()]
    yield path, source, layers
    source.close()


def test_a_real_checkpoint_comes_whole(tiny_wan):
    """A Wan file, block by block through a window of two: the weights that the safetensors library reads."""
    path, source, layers = tiny_wan
    room = sum(layer.nbytes for layer in layers) * 2 // 3
    ledger, device = Ledger(), DeviceBudget(room)
    want = load_file(path)
    pager = Pager(layers, room, device, HostBackend(source, ledger), ledger)
    assert pager.plan.streamed
    seen = set()
    for _ in range(2):
        for i in range(len(layers)):
            with pager.use(i) as weights:
                for name, weight in weights.items():
                    assert weight.dtype is want[name].dtype and torch.equal(weight, want[name]), name
                    seen.add(name)
    assert seen == want.keys()
    pager.close()


def test_a_file_that_changes_underneath_is_an_error_and_no_weights(tiny_wan):
    path, source, layers = tiny_wan
    room = sum(layer.nbytes for layer in layers) * 2 // 3
    ledger, device = Ledger(), DeviceBudget(room)
    pager = Pager(layers, room, device, HostBackend(source, ledger), ledger)
    with pager.use(0):
        pass
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileChanged, match=path.name):
        for i in range(len(layers)):
            with pager.use(i):
                pass
    pager.close()
    assert device.taken == 0


class Recording(HostBackend):
    """Plain memory that notes which layers were asked for, and refuses room when told to."""

    def __init__(self, source, ledger) -> None:
        super().__init__(source, ledger)
        self.asked: list[str] = []
        self.rooms = 1 << 40
        self.trims = 0

    def submit(self, copy) -> None:
        if copy.layer is not None:
            self.asked.append(copy.layer.name)
        super().submit(copy)

    def take(self, nbytes):
        if not self.rooms:
            raise OverBudget("the device is full")
        self.rooms -= 1
        return super().take(nbytes)

    def trim(self) -> None:
        self.trims += 1

    def said(self) -> list[int]:
        """The numbers of the layers asked for since the last time."""
        numbers, self.asked = [int(name.removeprefix("layer ")) for name in self.asked], []
        return numbers


@pytest.fixture
def recorded(monkeypatch):
    """Ten layers, of which 0 and 5 stay, and a window of three slots."""
    plan = Plan((1024,) * 10, frozenset({0, 5}), 3, 1024)
    monkeypatch.setattr(pager_module, "make_plan", lambda *_: plan)
    ledger, device = Ledger(), DeviceBudget(5 * 1024)
    backend = Recording(Numbers(), ledger)
    pager = Pager(make_layers([[256, 256]] * 10), device.total, device, backend, ledger)
    yield pager, backend
    pager.close()


def test_as_many_layers_are_asked_for_ahead_as_the_window_holds(recorded):
    """One slot is the layer's that is in use, unless it has a place of its own; residents on the way come once."""
    pager, backend = recorded
    with pager.use(1):
        assert backend.said() == [1, 2, 3]
    with pager.use(2):
        assert backend.said() == [4, 5], "the slot of 1, and a resident that was never there"
    with pager.use(3):
        assert backend.said() == [6]
    with pager.use(4):
        assert backend.said() == [7]
    with pager.use(5):
        assert backend.said() == [8], "6, 7 and 8 are behind it, and nobody else wants a slot"
    with pager.use(6):
        assert backend.said() == []
    with pager.use(7):
        assert backend.said() == [9, 0], "the resident behind the last slot too"
    with pager.use(8):
        assert backend.said() == [1], "around the end"
    for i in (9, 0, 1, 2):
        with pager.use(i):
            pass
    assert backend.said() == [2, 3, 4], "0 and 5 stay"


def test_what_is_needed_sooner_is_not_thrown_out_for_what_is_needed_later(recorded):
    pager, backend = recorded
    with pager.use(1):
        pass
    assert backend.said() == [1, 2, 3]
    assert pager.prefetch(3) and pager.prefetch(2) and not backend.said(), "on their way already"
    assert pager.prefetch(9) and backend.said() == [9], (
        "into the slot of 1, which was just used and is a whole pass away"
    )
    assert not pager.prefetch(1) and not backend.said(), "all that is there is used before it"
    assert pager.prefetch(8) and backend.said() == [8], "at the cost of 9"
    assert not pager.prefetch(9) and pager.prefetch(5) and backend.said() == [5], "a resident needs no slot"
    with pager.use(9):
        assert backend.said()[:2] == [9, 0], "who is used now gets the slot of the one that is needed latest"
        assert pager._find(2) is None or pager._find(8) is None


def test_of_layers_in_use_none_makes_way(recorded):
    """Whatever comes ahead has to do with the other slots."""
    pager, backend = recorded
    with pager.use(6) as held:
        backend.said()
        with pager.use(7):
            pass
        with pager.use(8):
            assert backend.said() == [9, 0]
        assert right(pager.layers[6], held)
    with pager.use(6):
        assert not {6} & set(backend.said()), "it is there still"


def test_no_layer_is_asked_for_twice_in_one_step(monkeypatch):
    """In a window that holds all of a small model's streamed layers and more."""
    plan = Plan((1024,) * 3, frozenset({1}), 4, 1024)
    monkeypatch.setattr(pager_module, "make_plan", lambda *_: plan)
    ledger, device = Ledger(), DeviceBudget(5 * 1024)
    backend = Recording(Numbers(), ledger)
    pager = Pager(make_layers([[512]] * 3), device.total, device, backend, ledger)
    with pager.use(0):
        assert backend.said() == [0, 1, 2]
    for i in (1, 2, 0, 1):
        with pager.use(i):
            assert not backend.said()
    pager.close()


def test_rates_that_were_measured_count_for_every_plan_after():
    """Compute that is uneven is worth a deeper window, which nobody knows without rates."""
    layers = make_layers([[51_200]] * 24)
    rates = Rates(50e6, tuple(0.012 if i % 4 == 0 else 0.0001 for i in range(24)))
    sizes, room = [layer.nbytes for layer in layers], 7 * layers[0].nbytes
    known, unknown = make_plan(sizes, room, rates), make_plan(sizes, room)
    assert known.slots > unknown.slots
    ledger, device = Ledger(), DeviceBudget(10 * layers[0].nbytes)
    pager = Pager(layers, room, device, HostBackend(Numbers(), ledger), ledger)
    assert pager.plan == unknown
    pager.resize(room, rates)
    assert pager.plan == known
    pager.resize(10 * layers[0].nbytes)
    assert pager.plan == make_plan(sizes, 10 * layers[0].nbytes, rates)
    pager.resize(room)
    assert pager.plan == known
    pager.close()


def test_a_larger_budget_that_cannot_be_had_leaves_everything_as_it_was():
    ledger, device = Ledger(), DeviceBudget(9 * 1024)
    backend = Recording(Numbers(), ledger)
    layers = make_layers([[512]] * 10)
    pager = Pager(layers, 5 * 1024, device, backend, ledger)
    before = pager.plan
    trims = backend.trims
    backend.take, take = take_after(backend, 3), backend.take
    with pytest.raises(OverBudget, match="the device is full"):
        pager.resize(9 * 1024)
    backend.take = take
    assert pager.plan == before and device.taken == pager.held_bytes == before.footprint
    assert backend.trims > trims, "what is given back must not lie beside what is taken"
    for i, layer in enumerate(layers):
        with pager.use(i) as weights:
            assert right(layer, weights)
    pager.close()
    assert pager.held_bytes == 0 and device.taken == 0


def take_after(backend, good):
    """A `take` that fails once, after so many."""
    left = [good]
    plain = HostBackend.take

    def take(nbytes):
        left[0] -= 1
        if left[0] == -1:
            raise OverBudget("the device is full")
        return plain(backend, nbytes)

    return take


def test_where_not_even_the_plan_before_can_be_had_the_pager_is_closed():
    ledger, device = Ledger(), DeviceBudget(9 * 1024)
    backend = Recording(Numbers(), ledger)
    pager = Pager(make_layers([[512]] * 10), 5 * 1024, device, backend, ledger)
    backend.rooms = 0
    with pytest.raises(OverBudget):
        pager.resize(9 * 1024)
    assert device.taken == pager.held_bytes == ledger.held("VRAM") == 0
    with pytest.raises(PagerError, match="weights were unloaded"):
        pager.acquire(0)


def test_what_a_backend_holds_for_itself_is_part_of_the_budget():
    layers = make_layers([[512]] * 10)
    ledger, device = Ledger(), DeviceBudget(5 * 1024)
    backend = HostBackend(Numbers(), ledger, None, 1000)
    pager = Pager(layers, device.total, device, backend, ledger)
    assert backend.overhead_bytes == 1024 and pager.plan == make_plan([1024] * 10, 4 * 1024)
    assert pager.held_bytes == device.taken == ledger.held("VRAM") == 5 * 1024
    pager.close()
    assert pager.held_bytes == device.taken == ledger.held("VRAM") == 0


def test_a_use_is_told_from_the_first_to_the_last_of_those_at_once(streaming):
    pager, _, _, ledger, _ = streaming
    with pager.use(0):
        with pager.use(0):
            pass
        assert "use" not in ledger.summary()["counts"], "it goes on"
    assert ledger.summary()["counts"]["use"] == 1
    with pager.use(1):
        pass
    assert ledger.summary()["counts"]["use"] == 2


def test_what_was_made_goes_with_the_copy(streaming):
    pager, _, _, _, _ = streaming
    i, j, *_ = pager.plan.streamed
    assert pager.made(i) is None, "it is not there"
    with pager.use(i):
        assert pager.made(i) is None
        pager.arrival(i).made = "something"
        assert pager.made(i) == "something" and pager.made(j) is None
    assert pager.made(i) == "something"
    pager.renew([i])
    assert pager.made(i) is None


def test_where_all_are_there_to_stay_nobody_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one is to come anew: then the next use of any brings it."""
    source, ledger, layers = Numbers(), Ledger(), make_layers([[100]] * 6)
    backend = HostBackend(source, ledger)
    pager = Pager(layers, 20_000, DeviceBudget(20_000), backend, ledger)
    assert not pager.plan.streamed
    looked: list[int] = []
    find = pager._find
    monkeypatch.setattr(pager, "_find", lambda i: looked.append(i) or find(i))

    def looks(i: int) -> int:
        """How many layers were asked for beside this one."""
        looked.clear()
        with pager.use(i) as weights:
            assert right(layers[i], weights)
        return sum(j != i for j in looked)

    submitted: list[int] = []
    submit = backend.submit
    monkeypatch.setattr(backend, "submit", lambda copy: (submitted.append(layers.index(copy.layer)), submit(copy)))
    for i in range(6):
        looks(i)
    assert sorted(submitted) == list(range(6))
    assert pager._all_came == pager._moves
    submitted.clear()
    pager.renew([3])
    looks(0)
    assert submitted == [3] and pager._all_came == pager._moves
    for i in range(6):
        assert looks(i) == 0
    assert submitted == [3]
    pager.close()


@pytest.fixture
def with_rare(monkeypatch):
    """Eight layers, of which every other one is rare, and a window of two slots."""
    ledger, device = Ledger(), DeviceBudget(2 * 1024)
    backend = Recording(Numbers(), ledger)
    layers = [replace(layer, rare=bool(i % 2)) for i, layer in enumerate(make_layers([[256, 256]] * 8))]
    pager = Pager(layers, device.total, device, backend, ledger)
    yield pager, backend
    pager.close()


def test_rare_layers_are_not_expected(with_rare):
    pager, backend = with_rare
    for i in (0, 2, 4, 6, 0):
        with pager.use(i):
            pass
    assert backend.said() == [0, 2, 4, 6, 0, 2] and pager.plan.bytes_per_pass == 4 * 1024
    assert pager.standing() is None


def test_where_they_are_needed_each_comes_beside_the_layer_that_it_belongs_to(with_rare):
    """It is used within the use of that, and the one behind it comes before that is over."""
    pager, backend = with_rare
    pager.acquire(0)
    assert backend.said() == [0, 2]
    pager.needs_rare = True
    with pager.use(1) as weights:
        assert right(pager.layers[1], weights)
    assert backend.said() == [1], "at the cost of 2, which is needed later"
    pager.go_on(1)
    assert backend.said() == [2]
    pager.release(0)
    pager.acquire(2)
    assert backend.said() == [3]
    with pager.use(3) as weights:
        assert right(pager.layers[3], weights)
    pager.release(2)
    pager.needs_rare = False
    with pager.use(4):
        assert backend.said() == [4, 6], "whose slot was the first to be free, and that of 3, which nobody expects"


def test_where_all_others_stay_they_pass_alone():
    ledger, device = Ledger(), DeviceBudget(6 * 1024)
    backend = Recording(Numbers(), ledger)
    layers = [replace(layer, rare=bool(i % 2)) for i, layer in enumerate(make_layers([[256, 256]] * 8))]
    pager = Pager(layers, device.total, device, backend, ledger)
    for _ in range(2):
        for i in (0, 2, 4, 6):
            with pager.use(i):
                pass
    assert sorted(backend.said()) == [0, 2, 4, 6] and not pager.plan.streamed and pager.plan.slots == 2
    pager.needs_rare = True
    for i in range(8):
        with pager.use(i) as weights:
            assert right(pager.layers[i], weights)
    assert set(backend.said()) == {1, 3, 5, 7}
    assert pager.standing() is None, "what is captured asks the pager for nothing"
    pager.close()
