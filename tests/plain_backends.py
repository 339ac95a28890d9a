"""Streamed models over the backends for GPUs, on devices of plain memory (`plain_device.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import comfy.model_management as mm
import pytest
from plain_device import PlainDevice, PlainManagedMemory

from fusestream.fusion.stream import residency, segments
from fusestream.memory import Pager, Parcels, RamBudget, bounds
from fusestream.memory.backends.managed import ManagedBackend
from fusestream.memory.backends.slots import SlotsBackend
from fusestream.memory.host.host import Host

MIB = 2**20
BACKENDS = ("registered", "pinned", "managed")


class Backends:
    """Of which kind each model's is. Those of which nothing is said stream as on any machine without a card."""

    def __init__(self) -> None:
        # By a stream's ledger. A model's pagers share what a machine has once.
        self._kinds: dict[Any, str] = {}
        self._devices: dict[Any, PlainDevice] = {}
        self._rams: dict[Any, RamBudget] = {}
        self._kept: list[Any] = []

    def become(self, model: Any, kind: str) -> None:
        """From now on this model streams over one of BACKENDS, through the smallest window."""
        self._kinds[model.stream.residency.ledger] = kind
        model.stream.residency._measure()
        model.stream.residency.ceiling = model.stream.residency.least

    def _open(self, source: Any, layers: Any, vram: Any, budget: int, *others: Any, **options: Any) -> Pager:
        ledger, convert = options["ledger"], options["convert"]
        if ledger not in self._kinds:
            return _open_pager(source, layers, vram, budget, *others, **options)
        kind, kept = self._kinds[ledger], options["kept"]
        device = self._devices.setdefault(ledger, PlainDevice())
        ram = self._rams.setdefault(ledger, RamBudget(64 * MIB))
        self._kept.append(kept)
        if kind == "managed":
            memory = PlainManagedMemory(device)
            backend: Any = ManagedBackend(device, memory, source, layers, ram, ledger, convert)
        else:
            backend = SlotsBackend(
                device, layers, Host(device, source, layers, ram, ledger, kind, kept), ledger, convert
            )  # type: ignore[arg-type]
        try:
            return Pager(layers, budget, vram, backend, ledger)
        except BaseException:
            backend.close()
            raise

    def _parcels(self, ledger: Any) -> Parcels | None:
        device = self._devices.get(ledger)
        return None if device is None else Parcels(device, RamBudget(4 * MIB), ledger)

    def device_of(self, model: Any) -> PlainDevice:
        """Where this one streams, once it has."""
        return self._devices[model.stream.residency.ledger]

    def _check(self) -> None:
        for kept in self._kept:
            kept.give_back()
        for device in self._devices.values():
            assert not device.errors and not device.registered and not device.pinned, "all was given back"
            device.stop()


_open_pager = residency.open_pager


@contextlib.contextmanager
def plain_backends() -> Iterator[Backends]:
    """For models that are used meanwhile."""
    found = Backends()

    def open_parcels(one: residency.Residency, _ram: Any) -> Parcels | None:
        return found._parcels(one.ledger)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "open_pager", found._open)
        patch.setattr(residency.Residency, "_open_parcels", open_parcels)
        patch.setattr(segments, "bounds", lambda layers, _device: bounds(layers, "cuda"))
        yield found
        mm.unload_all_models()
    found._check()
