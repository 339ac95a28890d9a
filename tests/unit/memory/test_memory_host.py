"""What host memory does beside the backends: budgets, the ring, reads past the page cache, choices."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_device import PlainDevice, PlainEvent
from safetensors.torch import save_file

from fusestream.memory import (
    BusRates,
    Checkpoint,
    CudaError,
    DeviceBudget,
    Extent,
    HostBackend,
    Layer,
    Ledger,
    OverBudget,
    Pager,
    Weight,
    bounds,
    open_pager,
    staging_bytes,
)
from fusestream.memory import opening as opening_module
from fusestream.memory.host import ram as ram_module
from fusestream.memory.host.direct import BLOCK, DirectReads
from fusestream.memory.host.ram import (
    GIB,
    Ram,
    RamBudget,
    measure_ram,
    within_container,
)
from fusestream.memory.host.registered import choose_layers
from fusestream.memory.host.ring import (
    LEAST_BUFFER_BYTES,
    PinnedRing,
    PlainReads,
    RingSize,
)
from fusestream.memory.host.unbuffered import SUPPORTED
from fusestream.memory.opening import choose_backend, why_not_managed
from fusestream.memory.runs import MERGED_GAP, Run, runs_of, spans_of
from fusestream.memory.timeline import Timeline

MIB = 1 << 20

past_the_cache = pytest.mark.skipif(not SUPPORTED, reason="no reads past the page cache on this system")


@pytest.fixture
def source(tmp_path):
    """Two tensors of odd sizes, a large one, one more file."""
    tensors = {
        "a": torch.arange(1001, dtype=torch.int16).view(torch.float16),
        "b": torch.arange(2003, dtype=torch.float32),
        "big": torch.arange(3 * MIB // 4, dtype=torch.int32).view(torch.float32),
    }
    save_file(tensors, tmp_path / "one.safetensors")
    save_file({"c": torch.arange(5000, dtype=torch.int16).view(torch.float16)}, tmp_path / "two.safetensors")
    with Checkpoint.open([tmp_path / "one.safetensors", tmp_path / "two.safetensors"]) as checkpoint:
        yield checkpoint


def layer_of(source, *names, dtype=None):
    return Layer("layer", tuple(Weight(name, source.extents[name], dtype) for name in names))


# ----------------------------------------------------------------------------------------------------------- budget


class Borrower:
    def __init__(self, budget, holds) -> None:
        self.budget, self.holds = budget, holds
        budget.take(holds, "a test")
        budget.join(self)

    def lendable(self) -> int:
        return self.holds

    def relent(self, nbytes) -> None:
        given, self.holds = self.holds, 0
        self.budget.give_back(given)


def test_the_budget_is_given_or_found():
    assert RamBudget.auto(3).total == 3 * GIB
    assert RamBudget.auto(ram=Ram(32 * GIB, 30 * GIB)).total == 22 * GIB, "a quarter of all RAM is left"
    assert RamBudget.auto(ram=Ram(4 * GIB, 3 * GIB)).total == 1 * GIB, "and never less than 2 GiB of it"
    assert RamBudget.auto(ram=Ram(4 * GIB, 1 * GIB)).total == GIB // 8
    here = measure_ram()
    assert 0 < here.available <= here.total


def test_taking_asks_the_others_first():
    budget = RamBudget(100)
    first, second = Borrower(budget, 30), Borrower(budget, 40)
    assert budget.try_take(30) and not budget.try_take(1)
    assert budget.within_reach(first) == 40 and budget.within_reach(second) == 30
    budget.beg(20, asker=first)
    assert first.holds == 30 and second.holds == 0
    budget.take(40, "more")
    budget.beg(25)
    assert first.holds == 0
    budget.leave(first)
    with pytest.raises(OverBudget, match=r"more still needs .* Raise the RAM budget"):
        budget.take(50, "more still")
    assert budget.taken == 70


class Collects(Borrower):
    """Has the collector run where the budget looks at it."""

    def __eq__(self, other) -> bool:
        gc.collect()
        return self is other

    __hash__ = Borrower.__hash__


class CollectsToo(str):
    __slots__ = ()

    def __format__(self, _how) -> str:
        gc.collect()
        return str(self)


def test_what_is_collected_by_a_thread_that_asks_a_budget_gives_back():
    """The collector runs in whichever thread makes something, also while it asks a budget."""
    budget, device = RamBudget(100), DeviceBudget(100, CollectsToo("the GPU"))

    class Model:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, end, Borrower(budget, 10))
            device.take(10)

    def end(borrower):
        borrower.relent(10)
        budget.leave(borrower)
        device.give_back(10)

    def ask():
        held = [Collects(budget, 10), Borrower(budget, 10)]
        budget.join(held[0], keeps=True)
        Model()
        budget.leave(held[1])
        Model()
        with pytest.raises(OverBudget):
            device.take(1000)
        done.set()

    done = threading.Event()
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(20)
    assert done.is_set() and budget.taken == 20 and device.taken == 0


def test_a_container_has_its_own_limit(tmp_path):
    ram = Ram(64 * GIB, 60 * GIB)
    assert within_container(ram, tmp_path) == ram
    for name, text in (("memory.max", "max"), ("memory.current", "5"), ("memory.stat", "anon 5")):
        (tmp_path / name).write_text(text)
    assert within_container(ram, tmp_path) == ram, "no limit"
    (tmp_path / "memory.max").write_text(str(16 * GIB))
    (tmp_path / "memory.current").write_text(str(10 * GIB))
    (tmp_path / "memory.stat").write_text(f"anon 1\nactive_file {GIB}\ninactive_file {2 * GIB}\nslab 5\n")
    assert within_container(ram, tmp_path) == Ram(16 * GIB, 9 * GIB)


def test_windows_tells_its_ram(monkeypatch):
    class Kernel:
        @staticmethod
        def GlobalMemoryStatusEx(pointer):
            pointer._obj.total_physical, pointer._obj.available_physical = 32 * GIB, 20 * GIB
            return Kernel.answer

    Kernel.answer = 1
    monkeypatch.setattr(ram_module.ctypes, "windll", type("Dll", (), {"kernel32": Kernel}), raising=False)
    monkeypatch.setattr(ram_module.sys, "platform", "win32")
    assert measure_ram() == Ram(32 * GIB, 20 * GIB)
    Kernel.answer = 0
    with pytest.raises(OSError, match="how much RAM"):
        measure_ram()


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="of systems that tell it so")
def test_systems_without_meminfo(monkeypatch, tmp_path):
    monkeypatch.setattr(ram_module.sys, "platform", "freebsd")
    monkeypatch.setattr(ram_module, "Path", lambda path: tmp_path / "no-such-file")
    monkeypatch.setattr(ram_module, "within_container", lambda ram: ram)
    assert measure_ram().available == measure_ram().total // 2


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(0, 600), st.data())
@settings(deadline=None)
def test_layers_are_chosen_within_the_budget(sizes, budget, data):
    streamed = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    chosen = choose_layers(sizes, streamed, budget)
    assert sum(sizes[i] for i in chosen) <= budget
    if sum(sizes) <= budget:
        assert chosen == set(range(len(sizes)))
    else:
        assert chosen <= streamed
        left = budget - sum(sizes[i] for i in chosen)
        assert all(sizes[i] > left for i in streamed - chosen), "no more would have fitted"


@given(st.integers(0, 2 << 30), st.none() | st.integers(0, 1 << 30))
def test_a_ring_is_no_larger_than_it_may_be(budget, wanted):
    size = RingSize.within(budget, wanted)
    assert size.buffers >= 2 and size.buffer_bytes % LEAST_BUFFER_BYTES == 0
    assert size.nbytes <= max(budget, 2 * LEAST_BUFFER_BYTES)


# ------------------------------------------------------------------------------------------------------------- runs


def test_neighbours_come_in_one_run(source):
    layer = layer_of(source, "big", "b", "a", "c")
    runs = runs_of(layer, source.home)
    assert sum(run.nbytes for run in runs) == layer.stored_bytes
    order = sorted((n for n in ("a", "b", "big")), key=lambda n: source.extents[n].begin)
    together = layer_of(source, *order)
    merged = runs_of(together, source.home)
    assert len(merged) < 3 or any(e.nbytes % 16 for e in source.extents.values())
    converted = runs_of(layer_of(source, "b", "big", dtype=torch.float16), source.home)
    assert [run.weight.name for run in converted] == ["b", "big"]
    empty = Layer("x", ())
    assert runs_of(empty, source.home) == () and spans_of(()) == ()


def test_spans_are_whole_pages_and_hold_their_runs(source):
    runs = runs_of(layer_of(source, "a", "b", "big", "c"), source.home)
    spans = spans_of(runs)
    assert len(spans) == 2
    for run in runs:
        assert any(s.file is run.file and s.begin <= run.begin and run.begin + run.nbytes <= s.end for s in spans)
    assert all(span.begin % mmap.ALLOCATIONGRANULARITY == 0 and span.end % mmap.PAGESIZE == 0 for span in spans)
    file = runs[0].file
    far = spans_of([Run(file, 0, 10, 0), Run(file, 2 * MERGED_GAP, 10, 0)])
    assert [span.begin for span in far] == [0, 2 * MERGED_GAP]


# ------------------------------------------------------------------------------------------------------------- ring


@pytest.fixture
def device():
    plain = PlainDevice()
    yield plain
    plain.stop()


def bytes_of(ring, reading):
    return b"".join(
        bytes((torch.frombuffer(piece.buffer.view, dtype=torch.uint8)).numpy().data)[at : at + piece.nbytes]
        for piece in ring.take(reading)
        for at in [piece.address - piece.buffer.pinned.address]
    )


@pytest.mark.parametrize("direct", [False, pytest.param(True, marks=past_the_cache)])
def test_the_ring_gives_the_files_bytes_in_order(source, device, direct):
    runs = [run for name in ("big", "a", "c", "b") for run in runs_of(layer_of(source, name), source.home)]
    reads = DirectReads([run.file for run in runs]) if direct else PlainReads()
    ring = PinnedRing(device, RingSize(3, LEAST_BUFFER_BYTES), reads, 4)
    readings = [ring.ask([run]) for run in runs for _ in range(2)]
    for reading, run in zip(readings, [run for run in runs for _ in range(2)], strict=True):
        path = run.file.path
        with path.open("rb") as file:
            file.seek(run.begin)
            assert bytes_of(ring, reading) == file.read(run.nbytes)
    ring.close()
    ring.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(ring.take(ring.ask(runs)))


class FailingReads(PlainReads):
    failing = False

    def read(self, run, offset, nbytes, buffer):
        if self.failing and offset > 0:
            raise OSError("a bad disk")
        return super().read(run, offset, nbytes, buffer)


def test_a_failed_or_forgotten_reading_does_not_block_the_next(source, device):
    runs = runs_of(layer_of(source, "big"), source.home)
    reads = FailingReads()
    ring = PinnedRing(device, RingSize(2, LEAST_BUFFER_BYTES), reads, 3)
    for _ in range(3):
        reads.failing = True
        with pytest.raises(OSError, match="bad disk"):
            bytes_of(ring, ring.ask(runs))
        reads.failing = False
        left = ring.take(ring.ask(runs))
        next(left)
        left.close()  # in the middle of a copy
        forgotten = ring.ask(runs)
        following = ring.ask(runs)
        ring.cancel(forgotten)
        assert len(bytes_of(ring, following)) == runs[0].nbytes
    ring.close()


def test_what_is_needed_first_comes_before_what_has_all_buffers(source, device):
    """A layer that was to be registered and has to be read, while those behind it were read ahead."""
    runs = runs_of(layer_of(source, "big"), source.home)
    ring = PinnedRing(device, RingSize(2, LEAST_BUFFER_BYTES), PlainReads(), 2)
    behind = [ring.ask(runs), ring.ask(runs_of(layer_of(source, "c"), source.home))]
    deadline = time.monotonic() + 20
    while not all(piece.ready for piece in list(behind[0].pieces)[:2]):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    found = []
    order = [(ring.ask(runs, first=True), "big"), (behind[0], "big"), (behind[1], "c")]
    taking = threading.Thread(target=lambda: found.extend(bytes_of(ring, reading) for reading, _ in order), daemon=True)
    taking.start()
    taking.join(20)
    ring.close()
    assert found == [bytes(source.read(source.extents[name]).numpy().data) for _, name in order]


def test_a_ring_ends_while_somebody_waits_for_it(source, device):
    runs = runs_of(layer_of(source, "big"), source.home)
    gate = threading.Event()

    class Slow(PlainReads):
        def read(self, run, offset, nbytes, buffer):
            gate.wait()
            return super().read(run, offset, nbytes, buffer)

    ring = PinnedRing(device, RingSize(2, LEAST_BUFFER_BYTES), Slow(), 1)
    reading = ring.ask(runs)
    threading.Timer(0.05, gate.set).start()
    closing = threading.Timer(0.02, ring.close)
    closing.start()
    with pytest.raises(RuntimeError, match="was closed"):
        for _ in ring.take(reading):
            pass
    closing.join()


# ---------------------------------------------------------------------------------------------------------- choices


def test_the_choice_of_a_backend_has_a_reason():
    fast, slow = BusRates(50e9, 55e9, 40e9, 6e9), BusRates(50e9, 0, 60e9, 6e9)
    assert choose_backend("managed", "no", fast) == ("managed", "asked for")
    assert choose_backend("auto", "this system does not", fast) == ("slots", "this system does not")
    assert choose_backend("auto", None, fast)[0] == "slots"
    name, why = choose_backend("auto", None, slow)
    assert name == "managed" and why == "measured 50.0 GB/s into slots, 60.0 GB/s managed"
    assert str(slow) == "pinned 50.0 GB/s, managed 60.0 GB/s, read 6.0 GB/s"


def test_what_speaks_against_managed_memory(source, monkeypatch):
    gpu = type("Gpu", (), {"is_managed_capable": True})()
    layers = [layer_of(source, name) for name in ("a", "b", "c")]
    ram = RamBudget(1 << 30)
    little, most = bounds(layers, "cuda")
    assert why_not_managed(gpu, layers, ram, False, little) is None
    assert why_not_managed(gpu, layers, ram, False, most - 1) is None
    assert "stays on the card" in why_not_managed(gpu, layers, ram, False, most)
    monkeypatch.setattr(
        opening_module, "CudaManagedMemory", lambda device: type("M", (), {"free_bytes": lambda self: 5})()
    )
    assert "the guard is on" in why_not_managed(gpu, layers, ram, True, little)
    assert "RAM budget" in why_not_managed(gpu, layers, RamBudget(MIB), False, little)
    assert "smaller type" in why_not_managed(gpu, [layer_of(source, "a", dtype=torch.float32)], ram, False, 0)
    gpu.is_managed_capable = False
    assert "not WSL" in why_not_managed(gpu, layers, ram, False, most)


def test_on_the_cpu_there_is_the_host(source):
    ledger = Ledger()
    layers = [layer_of(source, "a", "b"), layer_of(source, "c")]
    pager = open_pager(source, layers, DeviceBudget(MIB), MIB, "cpu", ledger=ledger)
    with pager.use(0) as weights:
        assert torch.equal(weights["b"], torch.arange(2003, dtype=torch.float32))
    pager.check()
    pager.close()
    assert ledger.summary()["notes"]["backend"] == "host: the device is the CPU"
    with pytest.raises(OverBudget):
        open_pager(source, layers, DeviceBudget(10), 10, "cpu")
    with pytest.raises(ValueError, match="serves the CPU, not cuda"):
        open_pager(source, layers, DeviceBudget(10), 10, "cuda", backend="host")


def test_device_times_become_the_hosts(device):
    ledger = Ledger()
    timeline = Timeline(device, ledger)
    pending = PlainEvent()
    timeline.add("copy", "late", PlainEvent(reached=True), pending, 5, "registered")
    timeline.add("use", "early", PlainEvent(reached=True), PlainEvent(reached=True))
    timeline.harvest()
    assert [entry.layer for entry in ledger.entries] == ["early"]
    pending.reach()
    timeline._anchor_time -= 100  # as if hours had passed: another event becomes the anchor
    timeline._anchor.time -= 100
    timeline.finish()
    assert timeline._anchor is pending and ledger.summary()["bytes by route"] == {"registered": 5}


def test_who_has_left_is_asked_for_nothing():
    budget = RamBudget(100)
    gone, there = Borrower(budget, 30), Borrower(budget, 40)
    budget.leave(gone)
    assert budget.within_reach(there) == 30, "what nobody has taken"
    budget.beg(100)
    assert (gone.holds, there.holds) == (30, 0)


def test_nobody_is_asked_for_more_than_is_missing():
    class Exact(Borrower):
        def relent(self, nbytes) -> None:
            self.asked = nbytes
            super().relent(nbytes)

    budget = RamBudget(100)
    first, second = Exact(budget, 50), Exact(budget, 50)
    budget.beg(50)
    assert first.asked == 50 and second.holds == 50, "the second is not even asked: that is enough"
    assert budget.try_take(50)
    with pytest.raises(OverBudget, match=r"It needs 3\.00 GiB of pinned RAM, .* of 0\.00 GiB"):
        budget.take(3 * GIB, "It")
    assert budget.taken == 50
    budget.give_back(50)
    assert budget.taken == 0


def test_the_system_says_how_much_ram_there_is(monkeypatch, tmp_path):
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       32000000 kB\nMemFree:  1 kB\nMemAvailable:   20000000 kB\n")
    monkeypatch.setattr(ram_module.sys, "platform", "linux")
    monkeypatch.setattr(ram_module, "Path", lambda path: told)
    monkeypatch.setattr(ram_module, "within_container", lambda ram: ram)
    assert measure_ram() == Ram(32_000_000 * 1024, 20_000_000 * 1024)
    monkeypatch.setattr(ram_module, "Path", lambda path: tmp_path / "none")
    monkeypatch.setattr(ram_module.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.get, raising=False)
    assert measure_ram() == Ram(4096 * 1000, 4096 * 500), "half of it, where nobody says what is free"


def test_a_container_that_holds_more_than_its_limit_has_nothing_left(tmp_path):
    for name, text in (("memory.max", "1000"), ("memory.current", "5000"), ("memory.stat", "active_file 1\n")):
        (tmp_path / name).write_text(text)
    assert within_container(Ram(64 * GIB, 60 * GIB), tmp_path) == Ram(1000, 0)


def test_a_device_has_so_many_bytes_for_all_models():
    budget = DeviceBudget(8 * GIB, "cuda:0")
    budget.take(6 * GIB)
    words = r"want 4\.00 GiB on cuda:0, and of its budget of 8\.00 GiB other models hold 6\.00\. Unload"
    with pytest.raises(OverBudget, match=words):
        budget.take(4 * GIB)
    budget.take(2 * GIB)
    assert (budget.taken, budget.left) == (8 * GIB, 0)
    budget.give_back(8 * GIB)
    assert (budget.taken, budget.left) == (0, 8 * GIB)
    with pytest.raises(AssertionError, match="more given back"):
        budget.give_back(1)


@pytest.mark.parametrize(
    ("budget", "wanted", "buffers", "buffer_bytes"),
    [
        (1 << 40, None, 16, 16 << 20),  # the largest there is
        (64 << 20, None, 8, 8 << 20),  # eight at least, before they grow
        (64 << 20, 4 << 20, 8, 1 << 19),  # no more than could ever be under way
        (0, None, 2, 1 << 16),  # the least there is
        (10 << 16, None, 10, 1 << 16),
        (200 << 20, None, 12, 16 << 20),
    ],
)
def test_how_large_a_ring_is(budget, wanted, buffers, buffer_bytes):
    size = RingSize.within(budget, wanted)
    assert size.buffer_bytes == buffer_bytes
    assert size.buffers >= buffers and size.nbytes == size.buffers * size.buffer_bytes
    assert size.buffers == 16 or size.nbytes + size.buffer_bytes > min(budget, wanted or budget), "all of it is used"


def test_a_rings_memory_is_pinned_when_it_is_needed_and_nobodys_after(source, device):
    """What is still looking at a buffer is told so, and does not write into memory that is no longer there."""
    runs = runs_of(layer_of(source, "a"), source.home)
    ring = PinnedRing(device, RingSize(8, LEAST_BUFFER_BYTES), PlainReads(), 2)
    assert not device.pinned, "no layer was asked for"
    for _ in range(3):
        piece = next(taken := ring.take(ring.ask(runs)))
        view = piece.buffer.view
        taken.close()
    assert 1 <= len(device.pinned) <= 2, "one after another they share one or two"
    ring.close()
    assert not device.pinned
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_a_layer_is_cut_into_pieces_as_large_as_a_buffer(source, device):
    run = runs_of(layer_of(source, "big"), source.home)[0]
    direct = [(DirectReads([run.file]), 2 * BLOCK)] if SUPPORTED else []
    for reads, room in ((PlainReads(), 0), *direct):
        ring = PinnedRing(device, RingSize(2, LEAST_BUFFER_BYTES), reads, 1)
        assert ring.piece_bytes == LEAST_BUFFER_BYTES - room
        reading = ring.ask([run])
        pieces = [(piece.offset, piece.nbytes) for piece in reading.pieces]
        assert [offset for offset, _ in pieces] == list(range(0, run.nbytes, ring.piece_bytes))
        assert {nbytes for _, nbytes in pieces[:-1]} == {ring.piece_bytes} and sum(n for _, n in pieces) == run.nbytes
        ring.cancel(reading)
        ring.close()


def test_a_buffer_is_filled_again_only_after_its_copy(source, device):
    """The file's next bytes must not overtake what the device has not read yet."""
    runs = runs_of(layer_of(source, "big"), source.home)
    ring = PinnedRing(device, RingSize(2, LEAST_BUFFER_BYTES), PlainReads(), 2)
    device.gate.clear()
    room, at = torch.zeros(runs[0].nbytes, dtype=torch.uint8), 0
    opening = threading.Timer(0.05, device.gate.set)
    opening.start()
    for piece in ring.take(ring.ask(runs)):
        device.copy_in(room.data_ptr() + at, piece.address, piece.nbytes)
        at += piece.nbytes
    device.synchronize()
    opening.join()
    assert torch.equal(room, source.read(source.extents["big"]))
    ring.close()


def test_runs_are_joined_where_both_ends_meet(source):
    """In the file and in the room; never across files or around a conversion."""
    file = source.home(source.extents["a"])

    def weight(name, begin, nbytes, dtype=None):
        return Weight(name, Extent(name, "U8", (nbytes,), begin, begin + nbytes), dtype)

    def runs(*weights):
        found = runs_of(Layer("x", weights), lambda extent: file)
        return [(run.begin, run.nbytes, run.at, run.weight is not None) for run in found]

    assert runs(weight("q", 100, 32), weight("k", 132, 32)) == [(100, 64, 0, False)]
    assert runs(weight("q", 100, 32), weight("k", 133, 32)) == [(100, 32, 0, False), (133, 32, 32, False)], "a gap"
    assert runs(weight("q", 100, 30), weight("k", 130, 32)) == [(100, 30, 0, False), (130, 32, 32, False)], (
        "in the room"
    )
    assert runs(weight("q", 100, 32), weight("no", 132, 0), weight("k", 132, 16), weight("v", 148, 16)) == [
        (100, 64, 0, False)
    ]
    assert runs(weight("q", 100, 32, torch.float16), weight("k", 132, 32), weight("v", 164, 32)) == [
        (100, 32, 0, True),
        (132, 64, 64, False),
    ]


def test_pages_of_neighbours_are_mapped_once(source):
    file, step, page = source.home(source.extents["a"]), mmap.ALLOCATIONGRANULARITY, mmap.PAGESIZE
    assert step == page or os.name == "nt"

    def spans(*runs):
        return [(span.begin, span.end, span.nbytes) for span in spans_of([Run(file, b, n, 0) for b, n in runs])]

    assert spans((0, 1)) == [(0, page, page)] and spans((step, page)) == [(step, step + page, page)]
    assert spans((step - 1, 2)) == [(0, step + page, step + page)]
    far = (page + MERGED_GAP) // step * step
    assert spans((far, 1), (0, 1))[0][1] >= far, "a gap this small is mapped too"
    assert len(spans((0, 1), (page + far + step, 1))) == 2
    assert spans((0, 3 * page), (page, 1)) == [(0, 3 * page, 3 * page)], "one within the other"


def test_a_use_carries_no_bytes_and_waits_are_told_before_it(device):
    ledger = Ledger()
    timeline = Timeline(device, ledger)
    asked, there, over = PlainEvent(reached=True), PlainEvent(), PlainEvent()
    timeline.add_use("early", asked, there, over)
    timeline.harvest()
    assert not ledger.entries, "it is not over"
    there.reach()
    over.reach()
    timeline.harvest()
    stall, use = ledger.entries
    assert (stall.kind, use.kind, stall.nbytes, use.nbytes) == ("stall", "use", 0, 0)
    assert stall.start < stall.end == use.start <= use.end
    timeline.add_use("late", over, asked, PlainEvent(reached=True))  # what it waits for was there long ago
    timeline.harvest()
    assert [entry.kind for entry in ledger.entries] == ["stall", "use", "use"]


def test_the_account_looks_at_a_few_and_loses_none(device):
    """Those whose end is not reached wait behind the others, however many are looked at."""
    ledger = Ledger()
    timeline = Timeline(device, ledger)
    never = PlainEvent()
    timeline.add("copy", "waits", never, never)
    for i in range(5):
        timeline.add("copy", str(i), PlainEvent(reached=True), PlainEvent(reached=True), 3, "route")
    timeline.harvest(3)
    assert [entry.layer for entry in ledger.entries] == ["0", "1"]
    timeline.finish()
    assert [entry.layer for entry in ledger.entries] == ["0", "1", "2", "3", "4"]
    never.reach()
    timeline.finish()
    assert ledger.entries[-1].layer == "waits" and ledger.summary()["bytes by route"] == {"route": 15}


def test_device_times_are_the_hosts(device, monkeypatch):
    """In seconds of the host's clock, from an anchor that is never long ago."""
    ledger = Ledger()
    timeline = Timeline(device, ledger)
    monkeypatch.setattr(PlainEvent, "reach", lambda self: self._reached.set())
    begin, end, later = PlainEvent(reached=True), PlainEvent(reached=True), PlainEvent(reached=True)
    begin.time, end.time, later.time = (timeline._anchor.time + seconds for seconds in (1.0, 2.5, 7.0))
    anchor, start = timeline._anchor, timeline._anchor_time
    timeline.add("copy", "a", begin, end)
    timeline.finish()
    assert (ledger.entries[0].start - start, ledger.entries[0].end - start) == pytest.approx((1.0, 2.5))
    assert timeline._anchor is anchor
    timeline.add("copy", "b", end, later)
    timeline.finish()
    assert timeline._anchor is later and timeline._anchor_time - start == pytest.approx(7.0)


def test_a_buffer_that_could_not_be_pinned_is_tried_again(source, device, monkeypatch):
    """However often: a ring whose buffers are lost one by one would stand still at last."""
    runs = runs_of(layer_of(source, "a"), source.home)
    ring = PinnedRing(device, RingSize(2, LEAST_BUFFER_BYTES), PlainReads(), 1)
    pin = device.pin

    def refuses(nbytes):
        raise CudaError("no pinned RAM today")

    monkeypatch.setattr(device, "pin", refuses)
    for _ in range(5):
        with pytest.raises(CudaError, match="today"):
            bytes_of(ring, ring.ask(runs))
    monkeypatch.setattr(device, "pin", pin)
    assert len(bytes_of(ring, ring.ask(runs))) == runs[0].nbytes
    ring.close()


def test_readers_outlive_locked_memory_that_cannot_be_given_back(source, device, monkeypatch):
    runs = runs_of(layer_of(source, "a"), source.home)
    said, pin = [], device.pin

    def refuses(nbytes):
        raise CudaError(f"none of {nbytes} bytes")

    def try_often():
        for _ in range(4):
            try:
                bytes_of(ring, ring.ask(runs))
            except CudaError as error:  # noqa: PERF203
                said.append(str(error))

    ring = PinnedRing(device, RingSize(2, LEAST_BUFFER_BYTES), PlainReads(), 2, refuses)
    monkeypatch.setattr(device, "pin", refuses)
    trying = threading.Thread(target=try_often, daemon=True)
    trying.start()
    trying.join(20)
    assert said == [f"none of {LEAST_BUFFER_BYTES} bytes"] * 4
    monkeypatch.setattr(device, "pin", pin)
    assert len(bytes_of(ring, ring.ask(runs))) == runs[0].nbytes
    ring.close()


def test_what_needs_no_conversion_needs_no_room_for_it(source):
    assert staging_bytes([]) == staging_bytes([layer_of(source, "a", "b")]) == 0
    halves = layer_of(source, "b", "big", dtype=torch.float16)
    assert staging_bytes([halves]) == source.extents["big"].nbytes, "one at a time"


def test_what_lies_in_another_order_comes_by_way_of_the_room_for_conversion(tmp_path):
    """Where kernels are: on the CPU every weight lies as in the file. The backend itself does what it is told."""
    want = {"conv": torch.randn(4, 6, 3, 2), "bias": torch.randn(4)}
    save_file(want, tmp_path / "w.safetensors")
    with Checkpoint.open(tmp_path / "w.safetensors") as source:
        weights = [Weight(name, source.extents[name], channels_last=name == "conv") for name in ("conv", "bias")]
        layer = Layer("conv", tuple(weights))
        plain = layer.as_in_file()
        assert plain.weights == tuple(Weight(w.name, w.extent) for w in weights) and plain.as_in_file() is plain
        assert [run.weight for run in runs_of(layer, source.home)] == [weights[0], None]
        assert (staging_bytes([layer]), staging_bytes([plain])) == (4 * 6 * 3 * 2 * 4, 0)
        assert [sum(bounds([each], "cpu")) for each in (layer, plain)] == [sum(bounds([plain], "cpu"))] * 2
        assert bounds([layer], "cuda")[0] > bounds([plain], "cuda")[0]
        for layers in ([layer], [plain]):
            pager = open_pager(source, layers, DeviceBudget(MIB), MIB, "cpu")
            with pager.use(0) as found:
                assert all(torch.equal(found[name], t) and found[name].is_contiguous() for name, t in want.items())
            pager.close()
        ledger = Ledger()
        backend = HostBackend(source, ledger, None, staging_bytes([layer]))
        pager = Pager([layer], MIB, DeviceBudget(MIB), backend, ledger)
        with pager.use(0) as found:
            assert all(torch.equal(found[name], t) for name, t in want.items())
            assert found["conv"].is_contiguous(memory_format=torch.channels_last)
        pager.close()
        with pytest.raises(ValueError, match=r"bias is \[4\] on the device, and has no channels"):
            Weight("bias", source.extents["bias"], channels_last=True)


def test_what_has_no_bytes_is_told_with_none(device):
    ledger = Ledger()
    timeline = Timeline(device, ledger)
    timeline.add("evict", "x", PlainEvent(reached=True), PlainEvent(reached=True))
    timeline.finish()
    assert ledger.entries[0].nbytes == 0 and not ledger.summary()["bytes by route"]
