"""Paging over a driver's real calling convention: `CudaDevice` and the driver's calls, with a stand-in for the driver behind."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_driver
import torch
from safetensors.torch import save_file
from stand_in_driver.device import StandInDevice, StandInManagedMemory

from fusestream.memory import (
    BusRates,
    Checkpoint,
    CudaError,
    DeviceBudget,
    KeptPages,
    Layer,
    Ledger,
    Pager,
    PagerError,
    RamBudget,
    Weight,
    open_pager,
    opening,
)
from fusestream.memory.backends.cuda_managed import Holder
from fusestream.memory.driver_calls import HOST, SET_READ_MOSTLY, MemoryCalls

MIB = 1 << 20
COUNT, ELEMENTS = 6, 300_000
ROOM = 600_064
KINDS = ("slots", "managed")


class Streamed:
    """A file of six layers, streamed through a window of two over the stand-in as it is set."""

    def __init__(self, source: Checkpoint, want: dict[str, torch.Tensor], settings: str, *, older: bool) -> None:
        self.source, self.want = source, want
        self.device = StandInDevice(stand_in_driver.loaded(settings, older=older))
        self.ledger, self.ram = Ledger(), RamBudget(64 * MIB)
        self.pager: Pager | None = None
        self.before = {what: self.count(what) for what in ("pageable", "violations")}

    def count(self, what: str) -> int:
        return stand_in_driver.count(self.device.driver, what)

    def open(self, backend: str = "slots", slots: int = 2, kept: KeptPages | None = None) -> Pager:
        layers = [Layer(name, (Weight(name, extent),)) for name, extent in sorted(self.source.extents.items())]
        budget = slots * (ROOM if backend == "slots" else 2 * MIB)
        self.pager = open_pager(
            self.source,
            layers,
            DeviceBudget(budget),
            budget,
            "cuda:0",
            backend=backend,
            ram=self.ram,
            ledger=self.ledger,
            kept=kept,
        )
        return self.pager

    def passes(self, count: int = 2) -> None:
        assert self.pager is not None
        for _ in range(count):
            for i in range(COUNT):
                with self.pager.use(i) as weights:
                    assert torch.equal(weights[str(i)], self.want[str(i)]), i

    def close(self) -> None:
        if self.pager is not None:
            self.pager.close()
        self.source.close()
        self.device.stop()
        assert {what: self.count(what) for what in self.before} == self.before, "what a card would get wrong in silence"
        assert self.count("locked") == self.count("ranges") == 0 == self.ram.taken


@pytest.fixture
def streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Streamed]]:
    """Makes one with these settings of the stand-in, and closes it."""
    made: list[Streamed] = []

    def make(settings: str = "", *, older: bool = False) -> Streamed:
        want = {f"{i}": torch.full((ELEMENTS,), i, dtype=torch.float16) for i in range(COUNT)}
        save_file(want, tmp_path / "w.safetensors")
        one = Streamed(Checkpoint.open(tmp_path / "w.safetensors"), want, settings, older=older)
        monkeypatch.setattr(opening, "CudaDevice", lambda _index: one.device)
        monkeypatch.setattr(opening, "CudaManagedMemory", StandInManagedMemory)
        monkeypatch.setattr(opening, "measure_rates", lambda *_: BusRates(50e9, 55e9, 40e9, 6e9))
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("older", [False, True], ids=["newer driver", "older driver"])
@pytest.mark.parametrize("backend", KINDS)
def test_the_files_bytes_come_by_the_drivers_calls(streamed: Any, backend: str, older: bool) -> None:
    one = streamed(older=older)
    one.open(backend)
    one.passes(3)
    one.pager.check()
    assert one.device.calls.newer_signatures != older
    if backend == "slots":
        assert one.ledger.summary()["notes"]["host"].startswith("registered: the driver reads")
        assert one.count("locked") >= COUNT * ROOM // 2


def test_slow_copies_are_waited_for(streamed: Any) -> None:
    one = streamed("slow=3000")
    one.open()
    one.passes()
    assert one.ledger.summary()["counts"]["copy"] >= COUNT


@pytest.mark.parametrize("status", [801, 2, 1], ids=["not supported", "out of memory", "invalid value"])
def test_pages_that_the_driver_does_not_register_are_read(streamed: Any, status: int) -> None:
    one = streamed(f"cuMemHostRegister_v2={status}")
    one.open()
    one.passes()
    assert "the driver does not read the file's pages" in one.ledger.summary()["notes"]["host"]
    assert f"({status})" in one.ledger.summary()["notes"]["host"]


@pytest.mark.parametrize("lockable", [2 * ROOM, MIB])
def test_what_may_not_be_locked_is_read(streamed: Any, lockable: int) -> None:
    """As on Windows, where half of RAM may be: registered pages leave it nothing to read the others into, and give way."""
    one = streamed(f"lockable={lockable}")
    one.open()
    one.passes(3)
    assert one.count("locked") <= lockable
    assert one.ledger.summary()["bytes by route"].get("page cache or disk", 0) > 0


def test_a_copy_that_fails_ahead_is_made_again(streamed: Any) -> None:
    one = streamed("cuMemcpyHtoDAsync_v2@5=2")
    one.open()
    one.passes(3)


@pytest.mark.parametrize("status", [700, 999])
def test_a_copy_that_fails_is_told_and_leaves_nothing(streamed: Any, status: int) -> None:
    one = streamed(f"cuMemcpyHtoDAsync_v2={status}")
    one.open()
    with pytest.raises((PagerError, CudaError), match=rf"cuMemcpyHtoDAsync failed with \w+ \({status}\)"):
        one.passes(3)


def test_without_pinned_memory_it_is_told(streamed: Any) -> None:
    one = streamed("cuMemHostRegister_v2=801 cuMemHostAlloc=2")
    with pytest.raises(
        (PagerError, CudaError), match=r"pinned RAM: cuMemHostAlloc failed with CUDA_ERROR_OUT_OF_MEMORY"
    ):
        one.open()
        one.passes()


def test_a_card_that_does_not_page_has_slots(streamed: Any) -> None:
    """As on Windows."""
    one = streamed("managed=0")
    one.open("auto")
    one.passes()
    assert one.ledger.summary()["notes"]["backend"].startswith("slots")


def test_a_thread_without_a_context_is_refused(streamed: Any) -> None:
    one = streamed()
    said: list[str] = []

    def pin() -> None:
        try:
            one.device.pin(4096)
        except CudaError as error:
            said.append(str(error))
        one.device.enter_thread()
        one.device.unpin(one.device.pin(4096))

    thread = threading.Thread(target=pin)
    thread.start()
    thread.join()
    assert said and "CUDA_ERROR_INVALID_CONTEXT (201)" in said[0]


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "kept"])
def test_a_thread_without_a_context_gets_ram_back(streamed: Any, is_loaded: bool) -> None:
    """As the server's do, when somebody lowers the RAM that may be pinned, or a collected model ends
    in one of them."""
    one, kept = streamed(), KeptPages()
    one.ram.total *= 8
    one.open(kept=kept)
    one.passes(1)
    if not is_loaded:
        one.pager.close()
    contexts = list[bool]()
    assert one.count("registered")

    def beg() -> None:
        one.ram.total = 0
        one.ram.beg(0)
        current = ctypes.c_void_p()
        one.device.driver.library.cuCtxGetCurrent(ctypes.byref(current))
        contexts.append(bool(current.value))

    thread = threading.Thread(target=beg)
    thread.start()
    thread.join()
    # What still streams is read through pinned memory instead, and a reader may have taken some by now.
    assert one.count("registered") == 0 and kept.lendable() == 0
    assert contexts == [False], "and the thread is as it was"
    assert one.device.driver.library.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) == 0


def test_a_managed_pool_goes_with_its_last_tensor_in_a_thread_without_a_context(streamed: Any) -> None:
    one = streamed()
    memory = StandInManagedMemory(one.device)
    address = memory.allocate(4 * MIB)
    tensors = [Holder(address, 4 * MIB)]  # what torch keeps alive
    memory._holder = weakref.ref(tensors[0])
    memory.free(address)
    assert one.count("ranges") == 1, "a tensor is over it"
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert one.count("ranges") == 0


@pytest.mark.parametrize("older", [False, True], ids=["newer driver", "older driver"])
def test_managed_pages_are_where_they_were_asked_to_be(older: bool) -> None:
    """A place is a structure, handed over by value, for newer drivers."""
    driver = stand_in_driver.loaded(older=older)
    driver.enter(0)
    calls = MemoryCalls(driver)
    address = calls.alloc_managed(4 * MIB)
    for place in (0, HOST):
        calls.prefetch(address, 4 * MIB, place, 0)
        assert calls.last_prefetch(address, 4 * MIB) == place
    calls.prefetch(address, MIB, 0, 0)
    assert calls.last_prefetch(address, 4 * MIB) not in (0, HOST), "a part is elsewhere"
    calls.advise(address, 4 * MIB, SET_READ_MOSTLY, 0)
    with pytest.raises(CudaError, match=r"cuMemAdvise failed with CUDA_ERROR_INVALID_VALUE \(1\)"):
        calls.advise(address + 8 * MIB, MIB, SET_READ_MOSTLY, 0)
    calls.free(address)
    with pytest.raises(CudaError, match="cuMemFree failed"):
        calls.free(address)
