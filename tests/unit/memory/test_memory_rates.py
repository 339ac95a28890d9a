"""How fast weights move, measured on a device of plain memory with a clock of its own: the best of some tries, and nothing left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from plain_device import PlainDevice, PlainManagedMemory
from safetensors.torch import save_file

from fusestream.memory import BusRates, Checkpoint, CudaError, Layer, Weight, rates
from fusestream.memory.runs import runs_of


class Timed:
    """A point on a clock that only copies move."""

    def __init__(self, device) -> None:
        self.device, self.at, self.waited = device, device.seconds, False

    def synchronize(self) -> None:
        self.device.drain()
        self.waited = True

    def elapsed_time(self, end) -> float:
        assert end.waited, "a time that is not over"
        return (end.at - self.at) * 1e3


class ClockedDevice(PlainDevice):
    """Its copies take as long as the test says."""

    index = 0

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.copied, self.takes = 0.0, [], iter(())

    def copy_event(self):
        return Timed(self)

    def drain(self) -> None:
        super().copy_event().synchronize()

    def copy_in(self, target, source, nbytes) -> None:
        self.seconds += next(self.takes)
        self.copied.append(nbytes)
        super().copy_in(target, source, nbytes)


@pytest.fixture
def device():
    clocked = ClockedDevice()
    yield clocked
    clocked.stop()


@pytest.fixture
def runs(tmp_path):
    """A small one and a large one."""
    save_file({"small": torch.zeros(100), "large": torch.arange(300_000.0)}, tmp_path / "w.safetensors")
    with Checkpoint.open(tmp_path / "w.safetensors") as source:
        yield [run for name in ("small", "large") for run in runs_of(layer(source, name), source.home)]


def layer(source, name):
    return Layer(name, (Weight(name, source.extents[name]),))


@pytest.fixture(autouse=True)
def forgotten():
    with rates.unremembered():
        yield


def test_the_best_of_some_tries_counts(device, runs):
    """What disturbs a copy only ever slows it down. The bytes are those of the largest stretch."""
    device.takes = iter([0.5, 0.25, 0.4, 0.5, 0.125, 0.4])
    found = rates.measure_rates(device, runs, False)
    assert (found.pinned, found.registered, found.managed) == (1_200_000 / 0.25, 1_200_000 / 0.125, 0.0)
    assert device.copied == [1_200_000] * 2 * rates.ROUNDS
    assert found.read > 0


def test_no_more_is_tried_than_a_probe(device, runs, monkeypatch):
    monkeypatch.setattr(rates, "PROBE_BYTES", 40_000)
    device.takes = iter([1.0] * 6)
    assert rates.measure_rates(device, runs, False).pinned == 40_000
    assert set(device.copied) == {40_000}


def test_it_is_measured_once_per_device_and_for_managed_memory_once_more(device, runs, monkeypatch):
    brought = []

    class Managed(PlainManagedMemory):
        def filled(self, address, nbytes):
            super().filled(address, nbytes)
            self.bring(address, nbytes)

        def bring(self, address, nbytes):
            super().bring(address, nbytes)
            brought.append(nbytes)
            device.seconds += 0.5

    monkeypatch.setattr(rates, "CudaManagedMemory", Managed)
    device.takes = iter([1.0] * 6)
    first = rates.measure_rates(device, runs, False)
    assert rates.measure_rates(device, runs, False) is first
    device.takes = iter([1.0] * 6)
    second = rates.measure_rates(device, runs, True)
    assert (first.managed, second.managed) == (0.0, 1_200_000 / 0.5)
    assert len(brought) == 1 + rates.ROUNDS, "each time it had to leave before"
    device.index = 1
    device.takes = iter([2.0] * 6)
    assert rates.measure_rates(device, runs, False).pinned == 1_200_000 / 2.0
    with rates.unremembered():
        device.takes = iter([4.0] * 6)
        assert rates.measure_rates(device, runs, False).pinned == 1_200_000 / 4.0
    assert rates.measure_rates(device, runs, False).pinned == 1_200_000 / 2.0, "as before"


def test_what_cannot_be_done_has_no_rate(device, runs, monkeypatch):
    monkeypatch.setattr(rates, "CudaManagedMemory", lambda device: SimpleNamespace(free_bytes=lambda: 1_199_999))
    device.refuses_to_register = lambda count: True
    device.takes = iter([1.0] * 3)
    found = rates.measure_rates(device, runs, True)
    assert (found.registered, found.managed) == (0.0, 0.0) and found.pinned
    assert str(BusRates(pinned=5e9)) == "pinned 5.0 GB/s"


def test_without_bytes_nothing_is_measured_and_nothing_remembered(device, runs):
    assert rates.measure_rates(device, [], False) == BusRates()
    device.takes = iter([1.0] * 6)
    assert rates.measure_rates(device, runs, False).pinned


def test_where_a_measurement_fails_nothing_stays_pinned_or_registered(device, runs):
    def fails(good):
        yield from [1.0] * good
        raise CudaError("the bus is gone")

    for good in (0, 4):
        device.takes = fails(good)
        with pytest.raises(CudaError):
            rates.measure_rates(device, runs, False)
        assert not device.pinned and not device.registered
