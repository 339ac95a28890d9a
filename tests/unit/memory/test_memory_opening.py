"""`open_pager` for a GPU, with a device of plain memory in its place: choices, reasons, and nothing left where it fails."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from plain_device import PlainDevice, PlainManagedMemory
from safetensors.torch import save_file

from fusestream.memory import (
    BusRates,
    Checkpoint,
    DeviceBudget,
    Layer,
    Ledger,
    OverBudget,
    RamBudget,
    Weight,
    driver_priority,
    open_pager,
    opening,
    rates,
)
from fusestream.memory.driver_priority import Precedence

MIB = 1 << 20
COUNT, ELEMENTS = 6, 300_000
ROOM = 600_064


@pytest.fixture
def model(tmp_path, monkeypatch):
    """(open, device): `open_pager` over a file of six layers, on a plain device."""
    want = {f"{i}": torch.full((ELEMENTS,), i, dtype=torch.float16) for i in range(COUNT)}
    save_file(want, tmp_path / "w.safetensors")
    source = Checkpoint.open(tmp_path / "w.safetensors")
    layers = [Layer(name, (Weight(name, extent),)) for name, extent in sorted(source.extents.items())]
    device = PlainDevice()
    device.index, device.is_managed_capable = 0, True
    bus = {"rates": BusRates(50e9, 55e9, 40e9, 6e9)}
    monkeypatch.setattr(opening, "CudaDevice", lambda index: device)
    monkeypatch.setattr(opening, "CudaManagedMemory", PlainManagedMemory)
    monkeypatch.setattr(opening, "measure_rates", lambda *arguments: bus["rates"])
    pagers = []

    def open_(budget=3 * ROOM, **options):
        pager = open_pager(source, layers, DeviceBudget(budget), budget, "cuda:0", **options)
        pagers.append(pager)
        return pager

    open_.bus = bus
    yield open_, device
    for pager in pagers:
        for i in range(COUNT):
            with pager.use(i) as weights:
                assert torch.equal(weights[str(i)], want[str(i)])
        pager.close()
    source.close()
    device.stop()


@pytest.mark.parametrize("asked", ["auto", "slots", "managed"])
def test_each_backend_opens_and_says_why(model, asked):
    open_, _ = model
    ledger = Ledger()
    open_(8 * MIB, backend=asked, ledger=ledger, ram=RamBudget(64 * MIB), guard=True)
    notes = ledger.summary()["notes"]
    name, why = notes["backend"].split(": ", 1)
    assert name == ("managed" if asked == "managed" else "slots")
    assert why == ("measured 55.0 GB/s into slots, 40.0 GB/s managed" if asked == "auto" else "asked for")
    assert notes["rates"] == "pinned 50.0 GB/s, registered 55.0 GB/s, managed 40.0 GB/s, read 6.0 GB/s"


def test_auto_takes_managed_memory_where_it_is_faster(model):
    open_, _ = model
    open_.bus["rates"] = BusRates(20e9, 0, 40e9, 6e9)
    ledger = Ledger()
    open_(8 * MIB, ledger=ledger, ram=RamBudget(64 * MIB), compute=[0.001] * COUNT)
    assert ledger.summary()["notes"]["backend"].startswith("managed: measured")


@pytest.mark.parametrize("host", ["registered", "pinned"])
def test_the_plan_knows_the_rates_where_compute_is_known(model, host):
    open_, _ = model
    pager = open_(compute=[0.001] * COUNT, host=host)
    assert pager._rates.bus == (55e9 if host == "registered" else 24e9)
    assert open_()._rates is None


@pytest.mark.parametrize("backend", ["slots", "managed"])
def test_what_does_not_open_leaves_nothing(model, backend):
    open_, device = model
    ram = RamBudget(64 * MIB)
    with pytest.raises(OverBudget):
        open_(1000, backend=backend, ram=ram)
    device.memory = 10
    if backend == "slots":
        with pytest.raises(OverBudget):
            open_(backend=backend, ram=ram)
    device.memory = 1 << 40
    with pytest.raises(OverBudget, match="RAM budget"):
        open_(backend=backend, ram=RamBudget(1000))
    assert ram.taken == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("fusestream")]


def test_rates_are_measured_once(monkeypatch):
    calls = []

    def measure(device, runs, managed, nbytes):
        calls.append(managed)
        return BusRates(pinned=1.0 if runs else 0.0)

    monkeypatch.setattr(rates, "_measure", measure)
    monkeypatch.setattr(rates, "_known", {})
    gpu = type("Gpu", (), {"index": 0})()
    assert rates.measure_rates(gpu, [], False).pinned == 0.0, "there was nothing to measure with"
    for _ in range(2):
        assert rates.measure_rates(gpu, ["a run"], False).pinned == 1.0
    rates.measure_rates(gpu, ["a run"], True)
    assert calls == [False, False, True]


def test_who_is_in_a_hurry_goes_first():
    driver_priority, passed = Precedence(), []
    with driver_priority, driver_priority:
        start = time.perf_counter()
        driver_priority.give_way()
        assert time.perf_counter() - start > 0.002, "waits"
        thread = threading.Thread(target=lambda: (driver_priority.give_way(), passed.append(1)))
        thread.start()
    thread.join()
    start = time.perf_counter()
    driver_priority.give_way()
    assert passed == [1] and time.perf_counter() - start < 0.5


def test_who_is_in_a_hurry_is_waited_for_and_nobody_else(monkeypatch):
    """Not for ever; and not when the last of those in a hurry is done, however many there were."""
    order = Precedence()

    def waited(longest):
        monkeypatch.setattr(driver_priority, "LONGEST_SECONDS", longest)
        start = time.perf_counter()
        order.give_way()
        return time.perf_counter() - start

    assert waited(5.0) < 4.0
    with order:
        with order:
            assert waited(0.05) >= 0.045
        assert waited(0.05) >= 0.045, "one of two is still in a hurry"
    assert waited(5.0) < 4.0
    with order:
        assert waited(0.05) >= 0.045
    assert waited(5.0) < 4.0


def test_the_guard_is_off_unless_it_is_asked_for(model, monkeypatch):
    """On a card of one's own a pool may be larger than what is free."""
    open_, _ = model
    monkeypatch.setattr(opening, "CudaManagedMemory", lambda device: PlainManagedMemory(device, free=MIB))
    open_(8 * MIB, backend="managed", ram=RamBudget(64 * MIB))
    with pytest.raises(OverBudget, match="guard"):
        open_(8 * MIB, backend="managed", ram=RamBudget(64 * MIB), guard=True)


def test_the_bounds_of_a_budget_hold_what_conversion_needs(tmp_path):
    """On the CPU exactly: one byte less does not do, and in the upper one all of it stays."""
    save_file({f"{i}": torch.zeros(1000) for i in range(5)}, tmp_path / "w.safetensors")
    with Checkpoint.open(tmp_path / "w.safetensors") as source:
        layers = [Layer(name, (Weight(name, extent, torch.float16),)) for name, extent in source.extents.items()]
        least, most = opening.bounds(layers, "cpu")
        assert (least, most) == (2 * 2048 + 4096, 5 * 2048 + 4096)
        for budget, streamed in ((least, 5), (most, 0)):
            pager = open_pager(source, layers, DeviceBudget(budget), budget, "cpu")
            assert len(pager.plan.streamed) == streamed
            pager.close()
        with pytest.raises(OverBudget):
            open_pager(source, layers, DeviceBudget(least - 1), least - 1, "cpu")
        least, most = opening.bounds(layers, "cuda")
        assert (least, most) == (3 * (2 << 20), 6 * (2 << 20)), "whole pages, whichever backend it will be"
