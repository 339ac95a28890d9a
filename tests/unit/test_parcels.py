"""Small tensors that go along with layers, on a device of plain memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from plain_device import PlainDevice

from fusestream.memory import CudaError, Ledger, Parcels, RamBudget
from fusestream.memory import parcels as module
from fusestream.memory.backend import Along

KIB = 1024


@pytest.fixture
def device() -> Iterator[PlainDevice]:
    device = PlainDevice()
    yield device
    device.stop()


def tensors(i: int) -> list[torch.Tensor]:
    """Of three types, one of them not aligned, one transposed."""
    return [
        torch.full((3, 5), i, dtype=torch.float16),
        torch.arange(7, dtype=torch.bfloat16) + i,
        torch.arange(6, dtype=torch.float32).view(2, 3).t() * i,
    ]


def carried_out(device: PlainDevice, along: Along, *, fails: bool = False) -> None:
    """What the pager's copying thread does with it."""
    if not fails:
        device.copy_in(along.target, along.source, along.nbytes)
        along.there = device.copy_event()
    along.done.set()


def equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(got, wanted, strict=True))


def test_they_come_with_the_copy_of_their_layer_or_by_themselves(device: PlainDevice) -> None:
    ram, ledger = RamBudget(64 * KIB), Ledger()
    parcels = Parcels(device, ram, ledger)
    for i in range(3):
        assert i not in parcels and parcels.pack(i, tensors(i)) and i in parcels
    assert parcels.along(9) is None, "a layer without a parcel"
    first = parcels.along(0)
    assert first is not None and parcels.along(0) is None, "one is under way"
    carried_out(device, first)
    assert equal(parcels.take(0), tensors(0))
    parcels.ask(1)
    parcels.ask(1)
    assert parcels.along(1) is None
    assert (
        equal(parcels.take(1), tensors(1)) and equal(parcels.take(2), tensors(2)) and equal(parcels.take(0), tensors(0))
    )
    for i in range(3):
        parcels.done(i)
        parcels.done(i)
    assert ram.taken == ledger.peak("pinned RAM") == 3 * 3 * 256
    parcels.drop([0, 2, 7])
    assert 0 not in parcels and ram.taken == 3 * 256
    parcels.close()
    assert ram.taken == 0 and parcels.held_bytes == 0


def test_a_copy_that_failed_has_brought_nothing(device: PlainDevice) -> None:
    parcels = Parcels(device, RamBudget(64 * KIB), Ledger())
    parcels.pack(0, tensors(0))
    for _ in range(3):
        along = parcels.along(0)
        assert along is not None
        carried_out(device, along, fails=True)
    assert equal(parcels.take(0), tensors(0))
    parcels.close()


def test_rooms_are_few_and_what_waits_in_one_is_not_overwritten(
    device: PlainDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOMS_BYTES", 0)
    parcels = Parcels(device, RamBudget(64 * KIB), Ledger())
    for i in range(8):
        parcels.pack(i, tensors(i))
    device.gate.clear()
    asked = [parcels.along(i) for i in range(6)]
    assert [along is not None for along in asked] == [True] * 4 + [False] * 2
    for along in asked[:4]:
        assert along is not None
        carried_out(device, along)
    device.gate.set()
    assert equal(parcels.take(5), tensors(5)), "at the cost of one that waits"
    parcels.done(5)
    for i in (*range(8), *range(8)):
        assert equal(parcels.take(i), tensors(i))
        parcels.done(i)
    assert parcels.held_bytes == 4 * 3 * 256
    parcels.close()


def test_a_larger_parcel_gets_a_larger_room(device: PlainDevice) -> None:
    parcels = Parcels(device, RamBudget(64 * KIB), Ledger())
    for i in range(8):
        parcels.pack(i, [torch.full((64 * (i + 1),), i)])
    for i in (*range(8), *reversed(range(8))):
        assert equal(parcels.take(i), [torch.full((64 * (i + 1),), i)])
        parcels.done(i)
    parcels.close()


def test_without_memory_they_stay_where_they_are(device: PlainDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    ram = RamBudget(KIB)
    parcels = Parcels(device, ram, Ledger())
    assert parcels.pack(0, tensors(0)) and not parcels.pack(1, tensors(1)) and 1 not in parcels
    device.memory = 0
    assert parcels.along(0) is None
    parcels.ask(0)
    assert equal(parcels.take(0), tensors(0)), "in pinned RAM"
    parcels.done(0)
    parcels.close()
    assert not parcels.pack(0, []) and ram.taken == 0

    def refuse(_nbytes: int) -> None:
        raise CudaError("pinned RAM: cuMemHostAlloc failed")

    monkeypatch.setattr(device, "pin", refuse)
    assert not parcels.pack(0, tensors(0)) and ram.taken == 0
