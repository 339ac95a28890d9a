"""Streamed models over the backends for GPUs, on devices of plain memory (`plain_device.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import comfy.model_management as mm
import pytest
from plain_device import PlainDevice, PlainManagedMemory

from fusestream.fusion.stream import grain
from fusestream.fusion.stream import stream as streaming
from fusestream.memory import Pager, Parcels, RamBudget, bounds
from fusestream.memory.host import Host
from fusestream.memory.managed import ManagedBackend
from fusestream.memory.slots import SlotsBackend

MIB = 2**20
BACKENDS = ("registered", "pinned", "managed")


class Backends:
    """Of which kind each model's is. Those of which nothing is said stream as on any machine without a card."""

    def __init__(self) -> None:
        self._kinds: dict[Any, str] = {}  # by a stream's ledger
        self._devices: list[tuple[Any, PlainDevice]] = []

    def become(self, model: Any, kind: str) -> None:
        """From now on this model streams over one of BACKENDS, through the smallest window."""
        self._kinds[model.stream.ledger] = kind
        model.stream._bound()
        model.stream.ceiling = model.stream.least

    def _open(self, source: Any, layers: Any, vram: Any, budget: int, *others: Any, **options: Any) -> Pager:
        ledger, convert = options["ledger"], options["convert"]
        if ledger not in self._kinds:
            return _open_pager(source, layers, vram, budget, *others, **options)
        kind, device, ram = self._kinds[ledger], PlainDevice(), RamBudget(64 * MIB)
        self._devices.append((ledger, device))
        if kind == "managed":
            memory = PlainManagedMemory(device)
            backend: Any = ManagedBackend(device, memory, source, layers, ram, ledger, convert)
        else:
            backend = SlotsBackend(device, layers, Host(device, source, layers, ram, ledger, kind), ledger, convert)  # type: ignore[arg-type]
        try:
            return Pager(layers, budget, vram, backend, ledger)
        except BaseException:
            backend.close()
            raise

    def _parcels(self, ledger: Any) -> Parcels | None:
        devices = [device for own, device in self._devices if own is ledger]
        return Parcels(devices[-1], RamBudget(4 * MIB), ledger) if devices else None

    def _check(self) -> None:
        for _, device in self._devices:
            assert not device.errors and not device.registered and not device.pinned, "all was given back"
            device.stop()


_open_pager = streaming.open_pager


@contextlib.contextmanager
def plain_backends() -> Iterator[Backends]:
    """For models that are used meanwhile."""
    found = Backends()

    def open_parcels(stream: Any, _ram: Any) -> Parcels | None:
        return found._parcels(stream.ledger)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "open_pager", found._open)
        patch.setattr(streaming.Stream, "_open_parcels", open_parcels)
        patch.setattr(grain, "bounds", lambda layers, _device: bounds(layers, "cuda"))
        yield found
        mm.unload_all_models()
    found._check()
