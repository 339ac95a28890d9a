"""Small tensors that go along with layers, on a device of plain memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from plain_device import PlainDevice

from fusestream.memory import CudaError, Ledger, Parcels, RamBudget
from fusestream.memory import side_copies as module
from fusestream.memory.backends.backend import Along

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
    assert parcels.held_bytes == 0
    parcels.done(0)
    parcels.close()
    assert not parcels.pack(0, []) and ram.taken == 0

    def refuse(_nbytes: int) -> None:
        raise CudaError("pinned RAM: cuMemHostAlloc failed")

    monkeypatch.setattr(device, "pin", refuse)
    assert not parcels.pack(0, tensors(0)) and ram.taken == 0


class Idle:
    """Another model's RAM, of which it needs nothing now."""

    def __init__(self, ram: RamBudget, nbytes: int) -> None:
        self.ram, self.nbytes = ram, nbytes
        ram.take(nbytes, "it")
        ram.join(self)

    def lendable(self) -> int:
        return self.nbytes

    def relent(self, nbytes: int) -> None:
        self.ram.give_back(self.nbytes)
        self.nbytes = 0


def test_other_models_make_room_for_them(device: PlainDevice) -> None:
    ram = RamBudget(KIB)
    other = Idle(ram, KIB)
    parcels = Parcels(device, ram, Ledger())
    assert parcels.pack(0, tensors(0)) and other.nbytes == 0 and ram.taken == 3 * 256
    parcels.close()


def copies_of(device: PlainDevice, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each copy brings, from now on."""
    made: list[int] = []
    plain = device.copy_in

    def counted(target: int, source: int, nbytes: int) -> None:
        made.append(nbytes)
        plain(target, source, nbytes)

    monkeypatch.setattr(device, "copy_in", counted)
    return made


def test_what_was_taken_lies_in_a_room_and_not_in_ram(device: PlainDevice) -> None:
    parcels = Parcels(device, RamBudget(64 * KIB), Ledger())
    parcels.pack(0, tensors(0))
    (room,) = {t.untyped_storage().data_ptr() for t in parcels.take(0)}
    assert room not in device.pinned and parcels.held_bytes == 3 * 256
    parcels.pack(1, tensors(1))
    parcels.drop([1])
    assert parcels.held_bytes == 3 * 256, "the other's room stays"
    parcels.drop([0])
    assert parcels.held_bytes == 0
    parcels.close()


def test_the_room_used_longest_ago_is_used_again(device: PlainDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was just there may be wanted again; and what is there is not copied again."""
    monkeypatch.setattr(module, "ROOMS_BYTES", 0)
    copied = copies_of(device, monkeypatch)
    parcels = Parcels(device, RamBudget(64 * KIB), Ledger())
    for i in range(6):
        parcels.pack(i, tensors(i))
    for i in range(4):
        parcels.take(i)
    for i in range(4):
        parcels.done(i)
    for i in (4, 5, 2, 3, 4, 5):
        assert equal(parcels.take(i), tensors(i))
        parcels.done(i)
    assert copied == [3 * 256] * 6
    assert equal(parcels.take(0), tensors(0)) and len(copied) == 7
    parcels.close()


def test_small_ones_get_more_rooms_and_large_ones_do_not(device: PlainDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is all resident has all its small parcels on the device at once."""
    for limit, rooms in ((6 * 3 * 256, 6), (6 * 3 * 256 - 1, 5), (0, module.LEAST_ROOMS)):
        monkeypatch.setattr(module, "ROOMS_BYTES", limit)
        parcels = Parcels(device, RamBudget(64 * KIB), Ledger())
        for i in range(8):
            parcels.pack(i, tensors(i))
        asked = [parcels.along(i) for i in range(8)]
        assert sum(along is not None for along in asked) == rooms
        for along in asked:
            if along is not None:
                carried_out(device, along)
        parcels.close()


def test_tensors_lie_at_whole_steps(device: PlainDevice) -> None:
    """As matrix products like best, whatever their sizes."""
    ram = RamBudget(64 * KIB)
    parcels = Parcels(device, ram, Ledger())
    sizes = (1, 255, 256, 257)
    parcels.pack(0, [torch.full((size,), size % 256, dtype=torch.uint8) for size in sizes])
    assert ram.taken == 256 + 256 + 256 + 512
    found = parcels.take(0)
    assert [t.data_ptr() - found[0].data_ptr() for t in found] == [0, 256, 512, 768]
    assert all(bool((t == size % 256).all()) and t.numel() == size for t, size in zip(found, sizes, strict=True))
    parcels.close()


def test_one_in_use_keeps_its_room(device: PlainDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is done, however many others want one: those that find none stay in RAM."""
    monkeypatch.setattr(module, "ROOMS_BYTES", 0)
    parcels = Parcels(device, RamBudget(64 * KIB), Ledger())
    for i in range(6):
        parcels.pack(i, tensors(i))
    held = [parcels.take(i) for i in range(4)]
    late = parcels.take(4)
    assert late[0].untyped_storage().data_ptr() in device.pinned, "no room"
    assert all(equal(got, tensors(i)) for i, got in enumerate(held)) and equal(late, tensors(4))
    parcels.done(2)
    assert equal(parcels.take(5), tensors(5)) and parcels.take(5)[0].untyped_storage().data_ptr() not in device.pinned
    assert all(equal(held[i], tensors(i)) for i in (0, 1, 3))
    parcels.close()


def test_what_is_under_way_is_waited_for_before_its_memory_goes(device: PlainDevice) -> None:
    parcels = Parcels(device, RamBudget(64 * KIB), Ledger())
    parcels.pack(0, tensors(0))
    along = parcels.along(0)
    assert along is not None
    threading.Timer(0.05, lambda: carried_out(device, along)).start()
    parcels.drop([0])
    assert along.done.is_set()
    parcels.close()


def test_what_is_there_and_will_be_wanted_keeps_its_room(device: PlainDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layer comes anew, and finds it: nobody else gets its room in between."""
    monkeypatch.setattr(module, "ROOMS_BYTES", 0)
    parcels = Parcels(device, RamBudget(64 * KIB), Ledger())
    for i in range(5):
        parcels.pack(i, tensors(i))
    for i in range(4):
        parcels.take(i)
    for i in range(4):
        parcels.done(i)
    assert parcels.along(0) is None, "it is there"
    along = parcels.along(4)
    assert along is not None
    carried_out(device, along)
    copied = copies_of(device, monkeypatch)
    assert equal(parcels.take(0), tensors(0)) and not copied
    parcels.close()


def test_who_is_needed_now_gets_the_room_of_one_that_only_waits(
    device: PlainDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOMS_BYTES", 0)
    parcels = Parcels(device, RamBudget(64 * KIB), Ledger())
    for i in range(5):
        parcels.pack(i, tensors(i))
    for i in range(4):
        along = parcels.along(i)
        assert along is not None
        carried_out(device, along)
    (room,) = {t.untyped_storage().data_ptr() for t in parcels.take(4)}
    assert room not in device.pinned
    parcels.close()


def test_after_a_drop_the_new_tensors_come_and_not_the_old_ones(device: PlainDevice) -> None:
    """Of other shapes even, in the room in which the old ones lay."""
    ram, ledger = RamBudget(64 * KIB), Ledger()
    parcels = Parcels(device, ram, ledger)
    parcels.pack(0, tensors(0))
    parcels.pack(1, tensors(1))
    assert equal(parcels.take(0), tensors(0))
    parcels.done(0)
    parcels.drop([0])
    assert ledger.held("pinned RAM") == ram.taken == 3 * 256
    others = [torch.full((2, 3), 7.0), torch.arange(5)]
    parcels.pack(0, others)
    assert equal(parcels.take(0), others)
    parcels.done(0)
    parcels.close()
    assert ledger.held("pinned RAM") == ram.taken == 0
