"""The backends for GPUs over a device of plain memory: right bytes by every route, within every budget, nothing left."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from interrupting import Interrupt
from plain_device import PlainDevice, PlainEvent, PlainManagedMemory
from prediction import compare
from safetensors.torch import load_file, save_file

from bed.depth import examples
from fusestream.memory import (
    Checkpoint,
    CudaError,
    DeviceBudget,
    FileChanged,
    Layer,
    Ledger,
    OverBudget,
    Pager,
    PagerError,
    Weight,
)
from fusestream.memory.backends.backend import Copy
from fusestream.memory.backends.managed import PAGE, ManagedBackend
from fusestream.memory.backends.slots import SlotsBackend
from fusestream.memory.host import host as host_module
from fusestream.memory.host import registered
from fusestream.memory.host.host import Host
from fusestream.memory.host.kept_pages import SHARE, KeptPages
from fusestream.memory.host.ram import Ram, RamBudget
from fusestream.memory.host.unbuffered import SUPPORTED
from fusestream.memory.runs import runs_of, spans_of

MIB = 1 << 20
ROOT = Path(__file__).parents[3]
WAYS = ("registered", "pinned", "direct")


class BadDisk(OSError):
    """What the tests' files raise."""


class Bed:
    """A weight file, a device, and a pager of one kind over them. channels: of each `b.weight`, which then has nine taps, and lies
    channels-last on the device."""

    def __init__(self, folder, counts, *, dtype=torch.float16, device_dtype=None, channels=0, number=0) -> None:
        self.path = folder / f"weights{number}.safetensors"
        generator = torch.Generator().manual_seed(sum(counts) + number)
        self.want = {
            f"{i:02}.{name}": torch.randn(count, generator=generator).to(dtype)
            for i, count in enumerate(counts)
            for name in ("a.bias", "b.weight")
        }
        if channels:
            self.want = {
                name: t.view(-1, channels, 3, 3) if name.endswith("b.weight") else t for name, t in self.want.items()
            }
        save_file(self.want, self.path)
        self.source = Checkpoint.open(self.path)
        self.layers = [
            Layer(
                f"layer {i}",
                # not in the file's order, so that not all of it is one run
                tuple(
                    Weight(
                        f"{i:02}.{name}",
                        self.source.extents[f"{i:02}.{name}"],
                        device_dtype,
                        bool(channels) and name == "b.weight",
                    )
                    for name in (("b.weight", "a.bias") if i % 3 else ("a.bias", "b.weight"))
                ),
            )
            for i in range(len(counts))
        ]
        self.want = {name: t.to(device_dtype or dtype) for name, t in self.want.items()}
        self.device = PlainDevice()
        self.ledger = Ledger()
        self.ram = RamBudget(64 * MIB)
        self.memory: PlainManagedMemory | None = None
        self.pager: Pager | None = None
        self.disk_fails = False
        file = self.source._open[0]
        for name in ("read_into", "map_pages"):
            setattr(file, name, self.failing(getattr(file, name)))

    def failing(self, method):
        def read(*arguments):
            if self.disk_fails:
                raise BadDisk("a bad disk")
            return method(*arguments)

        return read

    def open(self, kind, budget, vram=None, guard=True) -> Pager:
        vram = vram or DeviceBudget(budget)
        if kind == "managed":
            self.memory = PlainManagedMemory(self.device)
            backend = ManagedBackend(
                self.device, self.memory, self.source, self.layers, self.ram, self.ledger, None, guard
            )
        else:
            host = Host(self.device, self.source, self.layers, self.ram, self.ledger, kind)
            backend = SlotsBackend(self.device, self.layers, host, self.ledger)
        try:
            self.pager = Pager(self.layers, budget, vram, backend, self.ledger)
        except BaseException:
            backend.close()
            raise
        return self.pager

    def right(self, weights) -> bool:
        if self.memory is not None:
            assert all(self.memory.has(weight) for weight in weights.values() if weight.nbytes), "used, but not there"
        return all(torch.equal(weight, self.want[name]) for name, weight in weights.items())

    def a_pass(self) -> None:
        for i in range(len(self.layers)):
            with self.pager.use(i) as weights:
                assert self.right(weights), i

    def close(self) -> None:
        if self.pager is not None:
            self.pager.close()
            self.pager.close()
        self.source.close()
        self.device.stop()
        assert self.ram.taken == 0
        held = self.ledger.summary()["held bytes"]
        assert not any(held.values()), held
        if self.memory is not None:
            assert not self.memory.resident and not self.memory._memory


@pytest.fixture
def beds(tmp_path):
    """Makes beds, and closes them."""
    made = []

    def make(*arguments, **options):
        made.append(Bed(tmp_path, *arguments, **options, number=len(made)))
        return made[-1]

    yield make
    for bed in made:
        bed.close()


def window(kind, layer_bytes, resident=0):
    """A budget for two slots, and so many residents."""
    room = PAGE if kind == "managed" else SlotsBackend.room_bytes(layer_bytes)
    return (2 + resident) * room


@pytest.mark.parametrize("kind", [*WAYS, "managed"])
def test_passes_give_the_files_bytes(beds, kind):
    bed = beds([50_000] * 9)
    bed.open(kind, window(kind, 200_032, resident=2))
    assert len(bed.pager.plan.resident) == 2
    for _ in range(3):
        bed.a_pass()
    bed.pager.check()
    told = bed.ledger.summary()
    route = {"managed": "managed", "registered": "registered", "pinned": "page cache or disk"}.get(kind)
    routes = told["bytes by route"]
    if route is not None:
        copied = routes[route]
        assert 9 * 200_000 + 2 * 7 * 200_000 <= copied <= 9 * 200_096 + 3 * 8 * 200_096
    else:
        assert set(routes) <= {"disk, past the page cache", "page cache or disk"}
    assert {"copy", "use"} <= told["counts"].keys()
    found = compare(bed.pager)
    assert found.rates.bus > 0 and found.predicted.steady > 0 and 0 <= found.overlap <= 1
    assert all(seconds >= 0 for seconds in found.stalls)


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_stored_types_become_others_on_the_copies_order(beds, kind, stored):
    bed = beds([3000, 20_000, 100, 20_000, 20_000], dtype=stored, device_dtype=torch.float16)
    pager = bed.open(kind, 400_000)
    for _ in range(2):
        bed.a_pass()
    assert pager._backend.overhead_bytes >= 20_000 * stored.itemsize
    assert bed.ledger.peak("VRAM") <= 400_000 and pager.plan.streamed == ()
    bed.pager.resize(pager._backend.overhead_bytes + 2 * 80_384)
    assert bed.pager.plan.streamed
    bed.a_pass()


def test_managed_converts_once_when_it_fills(beds):
    bed = beds([3000, 20_000, 100], dtype=torch.bfloat16, device_dtype=torch.float16)
    bed.open("managed", 2 * PAGE)
    for _ in range(3):
        bed.a_pass()
    assert bed.ledger.summary()["counts"]["fill"] == 3
    assert bed.memory.most_resident <= 2 * PAGE and bed.memory.evictions > 3


@pytest.mark.parametrize("kind", [*WAYS, "managed"])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("channels", [1, 8])
def test_channels_lie_last_where_a_weight_says_so(beds, kind, stored, channels):
    """The same numbers in the same shape and place; whatever else is in the layer lies as in the file."""
    bed = beds([7200, 72, 720, 7200, 7200], dtype=stored, device_dtype=torch.float16, channels=channels)
    pager = bed.open(kind, 10 * PAGE)
    bed.a_pass()
    staging = pager._backend.overhead_bytes
    assert staging >= (kind != "managed") * 7200 * stored.itemsize
    pager.resize(staging + window(kind, bed.layers[0].nbytes))
    bed.a_pass()
    assert pager.plan.streamed
    for i, layer in enumerate(bed.layers):
        with pager.use(i) as weights:
            one = weights[f"{i:02}.b.weight"]
            assert one.is_contiguous(memory_format=torch.channels_last) and one.data_ptr() % 16 == 0
            assert one.is_contiguous() == (channels == 1) and weights[f"{i:02}.a.bias"].is_contiguous()
            assert sum(w.nbytes for w in weights.values()) <= layer.nbytes
    if kind == "managed":
        assert bed.ledger.summary()["counts"]["fill"] == len(bed.layers), "laid out once"


@pytest.mark.parametrize("ram", [1 * MIB, 1.5 * MIB, 3 * MIB])
def test_what_the_ram_budget_does_not_hold_is_read(beds, ram):
    """Twelve layers of 400 KB: some of them registered, the same in every pass; never more than the budget."""
    bed = beds([100_000] * 12)
    bed.ram = RamBudget(int(ram))
    bed.open("registered", window("registered", 400_064))
    for _ in range(4):
        bed.a_pass()
    routes = bed.ledger.summary()["bytes by route"]
    assert routes["registered"] > 0 and routes["page cache or disk"] > 0
    assert bed.device.most_locked <= ram and bed.ram.taken <= ram
    registered = bed.device.registrations
    bed.a_pass()
    assert bed.device.registrations == registered, "no turns are taken"


def test_what_lies_registered_is_copied_in_one_go(beds, monkeypatch):
    """From the second pass on; piece by piece again once its pages were given to another model, and in one go after that."""
    bed = beds([100_000] * 6)
    calls = []

    def counted(name):
        plain = getattr(bed.device, name)
        monkeypatch.setattr(bed.device, name, lambda *given: (calls.append(name), plain(*given)))

    counted("copy_all")
    bed.open("registered", window("registered", 400_064))
    bed.a_pass()
    first = len(calls)
    bed.a_pass()
    assert first <= 3 and len(calls) - first >= 4, "but for those that were asked for ahead"
    registrar = bed.pager._backend._host._registrar
    bed.device.synchronize()
    registrar.relent(1 << 40)
    calls.clear()
    bed.a_pass()
    assert len(calls) < 6, "who needs RAM got it"
    assert bed.ledger.summary()["bytes by route"].keys() == {"registered", "page cache or disk"}


def test_with_ram_enough_every_layer_is_registered_once(beds):
    bed = beds([100_000] * 12)
    bed.open("registered", window("registered", 400_064))
    for _ in range(3):
        bed.a_pass()
    assert bed.ledger.summary()["bytes by route"].keys() == {"registered"}
    assert bed.ledger.held("registered RAM") >= 12 * 400_000 and bed.device.registrations == 12


@pytest.mark.parametrize("good", [0, 3])
def test_where_the_driver_refuses_pages_they_are_read(beds, good):
    bed = beds([100_000] * 8)
    bed.device.refuses_to_register = lambda count: count > good
    bed.open("registered", window("registered", 400_064))
    for _ in range(2):
        bed.a_pass()
    assert bed.ledger.summary()["bytes by route"]["page cache or disk"] > 0
    assert "NOT_SUPPORTED" in bed.ledger.summary()["notes"]["registering"]


def test_what_is_refused_does_not_wait_for_the_layer_behind_it(beds):
    """Which is read already, fills the ring, and is copied only afterwards."""
    bed = beds([300_000] * 6)
    bed.ram = RamBudget(4 * MIB)
    bed.device.refuses_to_register = lambda count: True
    bed.open("registered", window("registered", 1_200_064))
    chosen = [entry.chosen for entry in bed.pager._backend._host._registrar._entries]
    at = next(i for i in range(5) if chosen[i] and not chosen[i + 1])
    assert bed.pager._backend._host._ring.size.nbytes < 1_200_000
    backend, gate, right = bed.pager._backend, threading.Event(), []
    backend._order_after = lambda after: gate.wait()
    backend.submit(Copy(None, None))
    using = threading.Thread(target=lambda: right.append(bed.right(bed.pager.acquire(at))), daemon=True)
    using.start()
    deadline = time.monotonic() + 20
    while backend._copies.qsize() < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    gate.set()
    using.join(20)
    assert right == [True], "it hangs"
    bed.pager.release(at)
    bed.a_pass()


def test_the_host_is_chosen_by_trying(beds):
    bed = beds([1000] * 3)
    bed.open("auto", 10_000)
    assert bed.ledger.summary()["notes"]["host"].startswith("registered: the driver reads")
    other = beds([1000] * 3)
    other.device.refuses_to_register = lambda count: True
    other.open("auto", 10_000)
    assert "pinned: the driver does not read" in other.ledger.summary()["notes"]["host"]
    other.a_pass()


@pytest.mark.skipif(not SUPPORTED, reason="no reads past the page cache on this system")
def test_a_file_larger_than_ram_is_read_past_the_page_cache(beds, monkeypatch):
    from fusestream.memory.host import host, ram

    monkeypatch.setattr(host, "measure_ram", lambda: ram.Ram(1000, 500))
    bed = beds([1000] * 3)
    bed.open("auto", 10_000)
    assert "direct: the weights" in bed.ledger.summary()["notes"]["host"]
    bed.a_pass()


def test_two_models_share_the_ram_budget(beds):
    """The second gets what the first holds and does not use."""
    one, two = beds([100_000] * 6), beds([100_000] * 6)
    two.device.stop()
    two.device = one.device
    one.ram = two.ram = RamBudget(3 * MIB)
    one.open("registered", window("registered", 400_064))
    one.a_pass()
    one.pager.check()
    before = one.ledger.held("registered RAM")
    two.open("registered", window("registered", 400_064))
    for _ in range(2):
        one.a_pass()
        two.a_pass()
    assert one.device.most_locked <= 3 * MIB
    assert one.ledger.held("registered RAM") + two.ledger.held("registered RAM") <= 3 * MIB
    assert before > 0
    one.pager.close()
    two.a_pass()
    two.pager.close()
    two.device = PlainDevice()  # the fixture stops each bed's
    assert not one.device.registered


@pytest.mark.parametrize("kind", [*WAYS, "managed"])
def test_a_file_that_changes_is_an_error_and_no_weights(beds, kind):
    bed = beds([50_000] * 8)
    bed.open(kind, window(kind, 200_032))
    if kind == "managed":
        with bed.pager.use(0):
            pass
    else:
        bed.a_pass()
    with bed.path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(bytes(1000))
    with pytest.raises(FileChanged, match=bed.path.name):
        for _ in range(2):
            for i in range(8):
                with bed.pager.use(i):
                    pass


def test_a_change_while_the_device_reads_is_told_afterwards(beds):
    bed = beds([50_000] * 8)
    bed.open("registered", window("registered", 200_032))
    bed.a_pass()
    bed.pager.check()
    i = bed.pager.plan.streamed[3]
    bed.device.gate.clear()
    bed.pager.prefetch(i)
    bed.pager._places  # noqa: B018
    copy = bed.pager._find(i).copy
    copy.done.wait()
    assert copy.error is None
    with bed.path.open("r+b") as file:  # in its place: Windows cuts no file that is mapped
        file.write(bytes(bed.path.stat().st_size))
    bed.device.gate.set()
    with pytest.raises(FileChanged):
        bed.pager.check()


def test_fetching_while_a_graph_is_captured_is_refused(beds):
    bed = beds([1000] * 8)
    bed.open("registered", window("registered", 4064))
    bed.device.is_capturing = True
    with pytest.raises(RuntimeError, match="acquire them before"):
        bed.pager.acquire(3)
    bed.device.is_capturing = False
    bed.pager.abandon()
    bed.a_pass()


@pytest.mark.parametrize("kind", [*WAYS, "managed"])
def test_closing_in_the_middle_leaves_nothing(beds, kind):
    before = set(threading.enumerate())  # of models that other tests have left
    bed = beds([300_000] * 8)
    bed.ram = RamBudget(40 * MIB)
    bed.open(kind, window(kind, 1_200_000))
    bed.device.gate.clear()
    for i in range(4):
        bed.pager.prefetch(i)
    threading.Timer(0.05, bed.device.gate.set).start()
    bed.pager.close()
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in names if name.startswith("fusestream")}, names
    with pytest.raises(PagerError, match="unloaded"):
        bed.pager.acquire(0)


def test_the_guard_refuses_a_pool_beyond_the_cards_free_memory(beds):
    bed = beds([1000] * 3)
    memory = PlainManagedMemory(bed.device, free=3 * PAGE)
    with pytest.raises(OverBudget, match="the guard against that is on"):
        ManagedBackend(bed.device, memory, bed.source, bed.layers, bed.ram, bed.ledger, guard=True)
    backend = ManagedBackend(bed.device, memory, bed.source, bed.layers, bed.ram, bed.ledger, guard=False)
    backend.close()
    assert bed.ram.taken == 0


def test_a_managed_pool_counts_as_ram(beds):
    bed = beds([1000] * 3)
    bed.ram = RamBudget(3 * PAGE)
    with pytest.raises(OverBudget, match=r"managed pool needs .* Raise the RAM budget"):
        bed.open("managed", 4 * PAGE)
    assert bed.ram.taken == 0


def test_a_plan_for_measured_rates(beds):
    bed = beds([50_000] * 9)
    bed.open("registered", window("registered", 200_032, resident=3))
    bed.a_pass()
    bed.pager.check()
    bed.pager.resize(window("registered", 200_032, resident=3), compare(bed.pager).rates)
    bed.a_pass()
    empty = beds([1000] * 3)
    empty.open("registered", 10_000)
    assert compare(empty.pager) is None, "nothing was copied yet"


def test_with_less_ram_other_layers_are_registered_after_another_plan(beds):
    """Layers that become resident are copied once more and then need no RAM."""
    bed = beds([100_000] * 12)
    bed.ram = RamBudget(2 * MIB)
    vram = DeviceBudget(100 * MIB)
    bed.open("registered", window("registered", 400_064), vram)
    for resident in (0, 6, 0, 11):
        bed.pager.resize(window("registered", 400_064, resident))
        bed.a_pass()
        bed.a_pass()
        assert bed.device.most_locked <= 2 * MIB


def test_when_the_memory_of_a_plan_cannot_be_had_the_one_before_goes_on(beds):
    bed = beds([50_000] * 9)
    vram = DeviceBudget(100 * MIB)
    bed.open("registered", window("registered", 200_032), vram)
    bed.a_pass()
    take, taken = bed.device.room, []

    def limited(nbytes):
        taken.append(nbytes)
        if len(taken) == 4:  # after some residents
            raise OverBudget("the plain device is full")
        return take(nbytes)

    bed.device.room = limited
    with pytest.raises(OverBudget, match="full"):
        bed.pager.resize(window("registered", 200_032, resident=5))
    assert vram.taken == bed.pager.held_bytes == window("registered", 200_032)
    bed.a_pass()

    def full(nbytes):
        raise OverBudget("the plain device is full")

    bed.device.room = full
    with pytest.raises(OverBudget, match="full"):
        bed.pager.resize(window("registered", 200_032, resident=5))
    assert vram.taken == 0, "nothing could be had: it is closed"
    with pytest.raises(PagerError, match="unloaded"):
        bed.pager.acquire(0)


@pytest.mark.parametrize("kind", WAYS)
def test_what_the_device_lacks_at_opening_leaves_nothing(beds, kind):
    bed = beds([50_000] * 9)
    bed.device.memory = 10_000
    vram = DeviceBudget(100 * MIB)
    with pytest.raises(OverBudget):
        bed.open(kind, window(kind, 200_032), vram)
    assert vram.taken == 0


@pytest.mark.parametrize("kind", [*WAYS, "managed"])
def test_interrupted_anywhere_it_goes_on(beds, kind):
    bed = beds([50_000] * 9)
    bed.ram = RamBudget(64 * MIB if kind == "managed" else 3 * MIB)
    bed.open(kind, window(kind, 200_032, resident=1))
    bed.a_pass()
    when, interrupts = random.Random(7), 0
    for _ in range(25):
        interrupt = Interrupt(when.uniform(0, 0.01))
        try:
            interrupt.soon()
            for _ in range(4):
                bed.a_pass()
            interrupt.join()
        except KeyboardInterrupt:
            interrupts += 1
        interrupt.join()
        bed.pager.abandon()
        bed.a_pass()
    assert interrupts >= 20


def test_what_failed_is_tried_again(beds):
    for kind in (*WAYS[:2], "managed"):
        bed = beds([50_000] * 9)
        bed.open(kind, window(kind, 200_032))
        bed.disk_fails = True
        for _ in range(2):
            with pytest.raises(BadDisk):
                bed.pager.acquire(5)
        bed.disk_fails = False
        bed.a_pass()


def told(call) -> BaseException | None:
    """What a call raises, which has to end."""
    found = []

    def run():
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert found, "it hangs"
    return found[0]


@pytest.mark.parametrize("thread", ["fusestream-copies", "fusestream-reader"])
def test_a_thread_that_cannot_call_the_device_tells_it_to_who_waits(beds, thread):
    bed = beds([1000] * 6)

    def enter_thread():
        if threading.current_thread().name.startswith(thread):
            raise CudaError("no device any more")

    bed.device.enter_thread = enter_thread
    pager = bed.open("pinned", window("pinned", 4000))
    for _ in range(2):
        assert "no device" in str(told(lambda: pager.acquire(0)))


def test_what_the_device_objects_to_behind_a_copy_is_told_by_the_next(beds, monkeypatch):
    """The thread that copies looks back at what is over; it goes on."""
    bed, query, fails = beds([1000] * 6), PlainEvent.query, threading.Event()
    bed.open("registered", window("registered", 4000))
    bed.a_pass()

    def failing(event):
        if fails.is_set() and threading.current_thread().name == "fusestream-copies":
            raise CudaError("an illegal address")
        return query(event)

    monkeypatch.setattr(PlainEvent, "query", failing)
    fails.set()
    assert "illegal address" in str(told(lambda: [bed.a_pass() for _ in range(3)]))
    fails.clear()
    bed.pager.abandon()
    with contextlib.suppress(CudaError):  # one more may have been found meanwhile
        bed.a_pass()
    bed.pager.abandon()
    assert told(bed.a_pass) is None


def test_views_are_made_once_and_go_with_their_room(beds):
    bed = beds([1000] * 6)
    pager = bed.open("pinned", window("pinned", bed.layers[0].nbytes, resident=1), DeviceBudget(MIB))
    bed.a_pass()
    bed.a_pass()
    backend = pager._backend
    kept = dict(backend._views)
    bed.a_pass()
    bed.a_pass()
    assert kept and all(backend._views[key] is views for key, views in kept.items())
    old = [weakref.ref(view) for views in kept.values() for view in views.values()]
    del kept
    pager.resize(window("pinned", bed.layers[0].nbytes, resident=3))  # the ring is made anew
    live = {place.room.data_ptr() for place in (*pager._ring, *pager._places.values())}
    assert {at for _, at in backend._views} <= live
    bed.a_pass()
    pager.close()
    gc.collect()
    assert not backend._views and all(view() is None for view in old)


def test_managed_addresses_stay(beds):
    bed = beds([1000] * 6)
    bed.open("managed", 2 * PAGE)
    where = []
    for _ in range(3):
        for i in range(6):
            with bed.pager.use(i) as weights:
                where.append({name: weight.data_ptr() for name, weight in weights.items()})
    assert where[:6] == where[6:12] == where[12:]


class Streaming(RuleBasedStateMachine):
    """Any calls in any order on a backend for GPUs."""

    folder = None

    @initialize(
        kind=st.sampled_from([*WAYS, "managed"]),
        counts=st.lists(st.integers(0, 30_000), min_size=1, max_size=8),
        room=st.integers(0, 300_000),
        ram=st.integers(1, 30),
        reads=st.integers(0, 3),
    )
    def begin(self, kind, counts, room, ram, reads):
        self.bed = Bed(self.folder, counts)
        self.budget = room * (16 if kind == "managed" else 1)
        self.bed.ram = RamBudget(ram * MIB if kind == "managed" else ram * 50_000 + 131_072)
        if reads:
            self.bed.device.refuses_to_register = lambda count: count % 4 == reads
        self.using = []
        self.vram = DeviceBudget(self.budget)
        try:
            self.bed.open(kind, self.budget, self.vram)
        except OverBudget:
            assert self.bed.ram.taken == 0

    def streams(self):
        return self.bed.pager is not None and not self.bed.pager._closed

    @rule()
    def nothing(self):
        """Where nothing could be opened."""

    @precondition(streams)
    @rule(data=st.data())
    def acquire(self, data):
        i = data.draw(st.integers(0, len(self.bed.layers) - 1))
        try:
            weights = self.bed.pager.acquire(i)
        except BadDisk:
            assert self.bed.disk_fails
        except PagerError as error:
            assert "slots of the window in use" in str(error)
        else:
            assert self.bed.right(weights)
            self.using.append((i, weights))

    @precondition(lambda self: self.streams() and self.using)
    @rule(data=st.data())
    def release(self, data):
        i, weights = self.using.pop(data.draw(st.integers(0, len(self.using) - 1)))
        assert self.bed.right(weights)
        self.bed.pager.release(i)

    @precondition(streams)
    @rule(data=st.data())
    def prefetch(self, data):
        self.bed.pager.prefetch(data.draw(st.integers(0, len(self.bed.layers) - 1)))

    @rule(fails=st.booleans())
    def disk(self, fails):
        self.bed.disk_fails = fails

    @precondition(streams)
    @rule()
    def abandon(self):
        self.bed.pager.abandon()
        self.using = []

    @precondition(streams)
    @rule(room=st.integers(0, 300_000))
    def another_budget(self, room):
        room *= 16 if self.bed.memory is not None else 1
        self.vram.total = max(room, self.budget)
        with contextlib.suppress(PagerError, OverBudget):
            self.bed.pager.resize(room)
            self.budget = room
        self.vram.total = self.budget

    @precondition(streams)
    @rule()
    def a_pass(self):
        self.bed.disk_fails = False
        if not self.using:
            self.bed.a_pass()

    @invariant()
    def within_the_budgets(self):
        if hasattr(self, "bed") and self.streams():
            assert self.bed.pager.held_bytes == self.vram.taken <= self.budget
            assert self.bed.device.most_locked <= self.bed.ram.total
            if self.bed.memory is not None:
                assert self.bed.memory.most_resident <= self.budget or self.bed.pager.held_bytes <= self.budget

    def teardown(self):
        if hasattr(self, "bed"):
            self.bed.close()


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory):
    Streaming.folder = tmp_path_factory.mktemp("streaming")


TestStreaming = Streaming.TestCase
TestStreaming.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)


def test_the_file_that_is_read_is_the_librarys(beds):
    bed = beds([5000] * 4)
    read = load_file(bed.path)
    assert all(torch.equal(read[name], bed.want[name]) for name in read)


def test_a_layer_whose_file_was_not_there_leaves_nothing_in_the_ring(beds, monkeypatch):
    """Its bytes were asked for and are not wanted: they must not keep the buffers from the next layers."""
    bed = beds([50_000] * 8)
    bed.ram = RamBudget(2 << 16)  # two buffers, and a layer needs four
    bed.open("pinned", window("pinned", 200_032))
    file = bed.source._open[0]
    check, failures = file.check, [BadDisk("the network is gone")] * 3

    def failing():
        if failures:
            raise failures.pop()
        check()

    monkeypatch.setattr(file, "check", failing)
    while failures:
        with contextlib.suppress(BadDisk):
            bed.a_pass()
    bed.a_pass()
    assert not any(bed.pager._backend._host._readings[i] for i in bed.pager.plan.resident)


def test_a_room_takes_of_the_device_what_its_allocator_gives():
    """Torch gives whole steps of 2 MiB from 1 MiB on; a budget that forgot it would be overrun."""
    room = SlotsBackend.room_bytes
    assert (room(0), room(1), room(512), room(513)) == (0, 512, 512, 1024)
    assert room(MIB - 512) == MIB - 512 and room(MIB - 1) == MIB
    assert (room(MIB), room(2 * MIB), room(2 * MIB + 1)) == (2 * MIB, 2 * MIB, 4 * MIB)
    assert (ManagedBackend.room_bytes(0), ManagedBackend.room_bytes(1), ManagedBackend.room_bytes(PAGE + 1)) == (
        0,
        PAGE,
        2 * PAGE,
    )


def test_a_layers_views_are_made_once_for_each_room(beds):
    """And forgotten with the room, whose memory they would keep."""
    bed = beds([1000] * 8)
    bed.open("registered", window("registered", 4064), DeviceBudget(MIB))
    backend = bed.pager._backend
    bed.a_pass()
    first = dict(backend._views)
    for _ in range(3):
        bed.a_pass()
    assert all(backend._views[key] is views for key, views in first.items())
    bed.pager.resize(window("registered", 4064, resident=2))
    rooms = {place.room.data_ptr() for place in (*bed.pager._ring, *bed.pager._places.values())}
    assert {at for _, at in backend._views} <= rooms
    bed.a_pass()


@pytest.mark.parametrize("kind", [*WAYS, "managed"])
def test_each_copy_is_told_with_its_bytes(beds, kind):
    bed = beds([50_000] * 6)
    bed.open(kind, window(kind, 200_032))
    bed.a_pass()
    bed.pager._backend.drain()
    copies = [entry for entry in bed.ledger.entries if entry.kind == "copy"]
    assert len(copies) >= 6 and {entry.nbytes for entry in copies} <= {layer.stored_bytes for layer in bed.layers}


def test_the_way_to_read_has_a_reason(beds, monkeypatch):
    bed = beds([1000])
    spans = [spans_of(runs_of(layer, bed.source.home)) for layer in bed.layers]
    monkeypatch.setattr(host_module, "measure_ram", lambda: Ram(16 << 30, 8 << 30))
    choose = host_module.choose
    assert choose(bed.device, spans, 1 << 40, "pinned") == ("pinned", "pinned: asked for")
    words = "direct: the weights (30.0 GiB) are larger than RAM (16.0 GiB)"
    if SUPPORTED:
        assert choose(bed.device, spans, 30 << 30, "auto") == ("direct", words)
    assert choose(bed.device, spans, 16 << 30, "auto")[0] == "registered", "it fits, just"
    assert choose(bed.device, [(), ()], 0, "auto") == ("pinned", "pinned: there are no bytes to read")
    assert bed.device.registrations == 1 and not bed.device.registered, "tried, and undone"


def test_a_host_that_is_closed_twice_gives_back_once(beds):
    bed = beds([1000] * 3)
    bed.ram = RamBudget(300 * MIB)
    bed.ram.take(5, "another model")
    host = Host(bed.device, bed.source, bed.layers, bed.ram, bed.ledger, "pinned")
    for _ in range(3):
        host.close()
        assert bed.ram.taken == 5
    bed.ram.give_back(5)


def test_only_rooms_of_a_layers_own_may_be_written_to(beds):
    """What is written to managed memory would stay in the layer for ever."""
    for kind, may in (("pinned", True), ("managed", False)):
        bed = beds([1000] * 3)
        assert bed.open(kind, window(kind, 4064)).is_writable is may


# --------------------------------------------------------------------------------------------- registering, by itself


class Registering:
    """Six layers of 400 KB, registered by the thread that does it ahead of use; nothing is copied."""

    def __init__(self, bed, monkeypatch, part_bytes=64 << 20) -> None:
        monkeypatch.setattr(registered, "PART_BYTES", part_bytes)
        self.spans = [spans_of(runs_of(layer, bed.source.home)) for layer in bed.layers]
        self.sizes = [sum(span.nbytes for span in each) for each in self.spans]
        self.bed = bed
        bed.ram = RamBudget(sum(self.sizes))
        self.registrar = registered.Registrar(bed.device, self.spans, bed.ram, bed.ledger)

    def until(self, nbytes) -> None:
        """Waits until so much is registered."""
        deadline = time.monotonic() + 20
        while self.bed.ledger.held("registered RAM") != nbytes:
            assert time.monotonic() < deadline, self.bed.ledger.held("registered RAM")
            time.sleep(0.002)


@pytest.fixture
def registering(beds, monkeypatch):
    made = []

    def make(**options):
        made.append(Registering(beds([100_000] * 6), monkeypatch, **options))
        return made[-1]

    yield make
    for each in made:
        each.registrar.close()
        each.bed.device.synchronize()


def test_pages_are_registered_ahead_of_use(registering):
    """As soon as somebody asks whether they will be, and without anybody copying."""
    some = registering()
    some.registrar.expect(range(6))
    assert not some.bed.device.registered
    assert all(some.registrar.serves(i) for i in range(6))
    some.until(sum(some.sizes))
    assert some.registrar.lendable() == sum(some.sizes), "and idle"


def test_layers_that_are_no_longer_chosen_give_their_pages_back(registering):
    some = registering()
    some.registrar.expect(range(6))
    for i in range(6):
        list(some.registrar.take(i, runs_of(some.bed.layers[i], some.bed.source.home)))
    assert some.bed.ledger.held("registered RAM") == sum(some.sizes)
    some.bed.ram.total = some.sizes[0] + some.sizes[1]
    some.registrar.expect([0, 1])
    assert some.bed.ledger.held("registered RAM") == some.bed.ram.taken == some.sizes[0] + some.sizes[1]
    assert [some.registrar.serves(i) for i in range(6)] == [True, True, False, False, False, False]


def test_a_layer_of_several_parts_comes_whole(registering, monkeypatch):
    """Each is read in to its end and no further, and its bytes follow those of the part before."""
    reads = []
    monkeypatch.setattr(registered, "READ_BYTES", 3 << 14)
    monkeypatch.setattr(registered, "read_in", lambda address, nbytes: reads.append((address, nbytes)) or True)
    some = registering(part_bytes=1 << 17)
    some.registrar.expect(range(6))
    runs = runs_of(some.bed.layers[0], some.bed.source.home)
    got = {}
    for run, offset, address, nbytes in some.registrar.take(0, runs):
        assert some.bed.device.locked(address, nbytes)
        got[run.begin + offset] = ctypes.string_at(address, nbytes)
    content = some.bed.path.read_bytes()
    assert all(content[at : at + len(part)] == part for at, part in got.items()) and len(got) > len(runs)
    assert sum(map(len, got.values())) == some.bed.layers[0].stored_bytes
    parts = some.registrar._entries[0].parts
    assert len(parts) > 3
    for part in parts:
        mine = sorted(read for read in reads if part.address <= read[0] < part.address + part.nbytes)
        assert (
            sum(nbytes for _, nbytes in mine) == part.nbytes and mine[-1][0] + mine[-1][1] == part.address + part.nbytes
        )


class Turns:
    """A model of six layers whose pagers come and go; what they leave is kept."""

    def __init__(self, registering, kept=None) -> None:
        self.some, self.kept = registering(), kept or KeptPages()
        self.some.registrar.close()
        self.bed, self.ledger, self.ram = self.some.bed, self.some.bed.ledger, self.some.bed.ram
        self.runs = [runs_of(layer, self.bed.source.home) for layer in self.bed.layers]

    def load(self, order=range(6)):
        spans = [self.some.spans[i] for i in order]
        made = registered.Registrar(self.bed.device, spans, self.ram, self.ledger, self.kept)
        made.expect(range(len(spans)))
        return made

    def use(self, registrar, order=range(6)) -> None:
        for place, i in enumerate(order):
            list(registrar.take(place, self.runs[i]))

    @property
    def registered(self) -> int:
        assert self.ledger.held("registered RAM") == self.ram.taken, "what is registered is accounted for"
        assert (self.ram.taken == 0) is (not self.bed.device.registered)
        return self.ram.taken

    def end(self) -> None:
        self.kept.give_back()
        assert self.registered == 0 and not self.ram._keepers and not self.ram._lenders


def test_a_model_that_comes_back_finds_its_pages_registered(registering):
    turns = Turns(registering)
    turns.ram.total *= 2
    for _ in range(3):
        registrar = turns.load()
        turns.use(registrar)
        count = turns.bed.device.registrations
        registrar.close()
        assert turns.ram.kept() == turns.registered == sum(turns.some.sizes)
        again = turns.load()
        content = turns.bed.path.read_bytes()
        for i in range(6):
            with again.at_once(i) as places:
                assert places is not None, "nothing has to be made ready"
                lies = [ctypes.string_at(address, nbytes) for _, address, nbytes in places.pieces]
            assert lies == [content[run.begin : run.begin + run.nbytes] for run in turns.runs[i]]
        assert turns.bed.device.registrations == count and turns.ram.kept() == 0
        again.close()
    turns.end()


def test_pages_are_kept_for_another_order_too(registering):
    """Of four layers of six; of those that the next pager does not have nothing is kept."""
    turns = Turns(registering)
    first = turns.load()
    turns.use(first)
    count, order = turns.bed.device.registrations, [3, 1, 0, 4]
    with turns.kept.returning():  # more than may be kept otherwise
        first.close()
        second = turns.load(order)
    turns.use(second, order)
    assert turns.bed.device.registrations == count
    assert turns.registered == sum(turns.some.sizes[i] for i in order)
    second.close()
    turns.end()


def test_layers_on_the_same_pages_leave_them_once(registering):
    """As small ones do: the other's are registered at another address, and given back."""
    turns, order = Turns(registering), [0, 0, 1]
    turns.ram.total *= 4
    registrar = turns.load(order)
    turns.use(registrar, order)
    registrar.close()
    assert turns.registered == turns.ram.kept() == turns.some.sizes[0] + turns.some.sizes[1]
    turns.end()


def test_no_more_is_kept_than_a_share_of_the_budget(registering):
    turns = Turns(registering)
    registrar = turns.load()
    turns.use(registrar)
    assert turns.registered == turns.ram.total
    registrar.close()
    a_layer = max(turns.some.sizes)
    assert SHARE * turns.ram.total - a_layer < turns.ram.kept() == turns.registered <= SHARE * turns.ram.total
    turns.end()


def test_what_is_kept_is_given_back_first_and_before_the_next_model_copies(registering):
    """Neither asks for what a loaded model has, nor gives back more than is wanted."""
    gone = Turns(registering)
    gone.ram.total *= 2
    registrar = gone.load()
    gone.use(registrar)
    registrar.close()
    wants = Turns(registering)
    wants.ram = gone.ram
    active = wants.load([0, 1])
    wants.use(active, [0, 1])
    before, a_layer = gone.ram.kept(), max(wants.some.sizes)
    gone.ram.total = gone.ram.taken + a_layer
    third = Turns(registering)
    third.ram = gone.ram
    came = third.load([0, 1, 2])
    assert before - 3 * a_layer <= gone.ram.kept() <= before - a_layer, (
        "when it was opened, as much as three layers lack"
    )
    third.use(came, [0, 1, 2])
    assert wants.ledger.held("registered RAM") == sum(wants.some.sizes[:2]), "the loaded model's"
    gone.ram.beg(gone.ram.total)
    assert gone.ram.kept() == 0 and gone.ledger.held("registered RAM") == 0
    for one, each in ((wants, active), (third, came)):
        each.close()
        one.kept.give_back()
    gone.end()


def test_what_another_budget_counted_is_not_taken_over(registering):
    turns = Turns(registering)
    turns.ram.total *= 2
    registrar = turns.load()
    turns.use(registrar)
    registrar.close()
    before, turns.ram = turns.ram, RamBudget(turns.ram.total)
    again = turns.load()
    assert before.taken == 0 and not turns.bed.device.registered
    turns.use(again)
    again.close()
    turns.end()


def test_what_is_kept_goes_with_the_process():
    """Pagers close at its end, and leave what they have registered: it is unregistered all the same."""
    program = """
import sys, types
pack = types.ModuleType("pack"); pack.__path__ = [sys.argv[1]]; sys.modules["pack"] = pack
from pack.memory import pager
from pack.memory.host import kept_pages, ram

class Open:
    def close(self):
        print("closed")
        kept.leave(1, "an entry", 10, budget, lambda entry: print("given back"))

kept, budget, held = kept_pages.KeptPages(), ram.RamBudget(100), Open()
pager._open.add(held)
"""
    told = subprocess.run([sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["closed", "given back"], told.stderr


def test_what_the_driver_refused_gives_its_ram_back(registering):
    """By itself, when no copy reads its first parts any more."""
    some = registering(part_bytes=1 << 17)
    some.bed.device.refuses_to_register = lambda count: count > 2
    some.registrar.expect(range(6))
    with pytest.raises(registered.NotRegistered, match="NOT_SUPPORTED"):
        list(some.registrar.take(0, runs_of(some.bed.layers[0], some.bed.source.home)))
    some.registrar.serves(1)
    deadline, entry = time.monotonic() + 20, some.registrar._entries[0]
    while entry.has_ram:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert entry.state == "refused" and some.bed.ledger.held("registered RAM") == 0


def test_what_the_driver_does_not_give_back_is_read(registering):
    """And nobody waits for it: neither a copy, nor the next plan, nor the end, which tries again."""
    some = registering()
    unregister = some.bed.device.unregister

    def refused(address):
        raise CudaError("an illegal address")

    some.registrar.expect(range(6))
    some.registrar.serves(0)
    some.until(sum(some.sizes))
    some.bed.device.unregister = refused
    with pytest.raises(CudaError, match="illegal address"):
        some.registrar.relent(1)
    runs = runs_of(some.bed.layers[5], some.bed.source.home)
    assert "illegal address" in str(told(lambda: list(some.registrar.take(5, runs))))
    assert not some.registrar.serves(5) and some.bed.ram.taken == sum(some.sizes)
    assert told(lambda: some.registrar.expect(range(6))) is None
    some.bed.device.unregister = unregister
    assert told(some.registrar.close) is None
    assert some.bed.ram.taken == 0


def test_of_two_askings_the_first_is_served_first(beds):
    """One that is registered, and one that was asked for when it was not."""
    bed = beds([1000])
    host = Host(bed.device, bed.source, bed.layers, bed.ram, bed.ledger, "pinned")
    host._registrar = SimpleNamespace(at_once=lambda i: contextlib.nullcontext("places"), close=lambda: None)
    host._readings[0] = [None, "the ring's"]
    with host.at_once(0) as places:
        assert places == "places" and host._readings[0] == ["the ring's"]
    with host.at_once(0) as places:
        assert places is None and host._readings[0] == ["the ring's"], "it has to be taken"
    host.close()
