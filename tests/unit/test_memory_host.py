"""What host memory does beside the backends: budgets, the ring, reads past the page cache, choices."""

from __future__ import annotations

import mmap
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_device import PlainDevice, PlainEvent
from safetensors.torch import save_file

from fusestream.memory import BusRates, Checkpoint, DeviceBudget, Layer, Ledger, OverBudget, Weight, open_pager
from fusestream.memory import opening as opening_module
from fusestream.memory import ram as ram_module
from fusestream.memory.direct import BLOCK, DirectReads
from fusestream.memory.opening import choose_backend, why_not_managed
from fusestream.memory.page_cache import read_in
from fusestream.memory.ram import GIB, Ram, RamBudget, measure_ram, within_container
from fusestream.memory.registered import choose_layers
from fusestream.memory.ring import LEAST_BUFFER_BYTES, PinnedRing, PlainReads, RingSize
from fusestream.memory.runs import MERGED_GAP, Run, address_of, runs_of, spans_of
from fusestream.memory.timeline import Timeline

MIB = 1 << 20


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


def test_windows_and_systems_without_meminfo(monkeypatch, tmp_path):
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


def test_pages_are_read_in_without_being_touched(source):
    span = spans_of(runs_of(layer_of(source, "big"), source.home))[0]
    mapped = span.file.map_pages(span.begin, span.end)
    assert read_in(address_of(mapped), span.nbytes) or not hasattr(os, "posix_fadvise")
    path = source.files[0].path
    beyond = mmap.mmap(-1, mmap.PAGESIZE)
    del beyond
    with path.open("r+b") as file:
        file.truncate(100)
    assert not read_in(address_of(mapped), span.nbytes), "no signal, no crash"
    with pytest.raises(Exception, match=r"had .* bytes and now has 100"):
        span.file.map_pages(span.begin, span.end)


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


@pytest.mark.parametrize("direct", [False, True])
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


def test_direct_reads_see_a_changed_file(source):
    run = runs_of(layer_of(source, "big"), source.home)[0]
    reads = DirectReads([run.file])
    room = mmap.mmap(-1, run.nbytes // BLOCK * BLOCK + 3 * BLOCK)
    begin = reads.read(run, 5, run.nbytes - 5, memoryview(room))
    with run.file.path.open("rb") as file:
        file.seek(run.begin + 5)
        assert room[begin : begin + run.nbytes - 5] == file.read(run.nbytes - 5)
    run.file.path.write_bytes(bytes(run.file.path.stat().st_size - 1))
    with pytest.raises(Exception, match=r"in use\. Load the model again"):
        reads.read(run, 0, 4096, memoryview(room))
    reads.close()
    with pytest.raises((OSError, AttributeError)):
        DirectReads([type("Gone", (), {"path": run.file.path.with_name("gone")})()])


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
    layers = [layer_of(source, "a", "b")]
    ram = RamBudget(1 << 30)
    assert why_not_managed(gpu, layers, ram, False) is None
    monkeypatch.setattr(
        opening_module, "CudaManagedMemory", lambda device: type("M", (), {"free_bytes": lambda self: 5})()
    )
    assert "the guard is on" in why_not_managed(gpu, layers, ram, True)
    assert "RAM budget" in why_not_managed(gpu, layers, RamBudget(MIB), False)
    assert "smaller type" in why_not_managed(gpu, [layer_of(source, "a", dtype=torch.float32)], ram, False)
    gpu.is_managed_capable = False
    assert "not WSL" in why_not_managed(gpu, layers, ram, False)


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
