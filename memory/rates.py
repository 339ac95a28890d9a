"""Speed at which this machine moves weights: measured once per device and process, in about a tenth
of a second."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from .backends.cuda_managed import CudaManagedMemory
from .device import CudaDevice
from .ledger import now
from .runs import Run, address_of, spans_of

ROUNDS = 3
PROBE_BYTES = 32 << 20


@dataclass(frozen=True)
class BusRates:
    """Bytes per second; 0 if not possible or not tried. read: from the file, by page cache or
    disk."""

    pinned: float = 0.0
    registered: float = 0.0
    managed: float = 0.0
    read: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in asdict(self).items() if rate)


_known: dict[tuple[int, bool], BusRates] = {}


def measure_rates(device: CudaDevice, runs: Sequence[Run], managed: bool) -> BusRates:
    """Rates measured with the first bytes of the longest of these runs, or earlier with another
    model's. managed: measure managed memory too."""
    key = device.index, managed
    if key not in _known:
        found = _measure(device, runs, managed, PROBE_BYTES)
        if not found.pinned:
            return found
        _known[key] = found
    return _known[key]


@contextlib.contextmanager
def unremembered() -> Iterator[None]:
    """Measure anew within the block, and forget it after, because a try with another file says
    nothing about a model's."""
    before = dict(_known)
    _known.clear()
    try:
        yield
    finally:
        _known.clear()
        _known.update(before)


def _measure(device: CudaDevice, runs: Sequence[Run], managed: bool, nbytes: int) -> BusRates:
    """Measure. Pages that cannot be registered are no error here: their rate is 0."""
    run = max(runs, key=lambda run: run.nbytes, default=None)
    if run is None:
        return BusRates()
    nbytes = min(nbytes, run.nbytes)
    room = device.room(nbytes)
    target = room.data_ptr()
    pinned = device.pin(nbytes)
    try:
        start = now()
        with pinned.view as view:
            run.file.read_into(view, run.begin)
        read = nbytes / (now() - start)
        pinned_rate = _best(device, nbytes, lambda: device.copy_in(target, pinned.address, nbytes))
    finally:
        device.unpin(pinned)
    return BusRates(
        pinned_rate,
        _registered(device, run, target, nbytes),
        _managed(device, nbytes) if managed else 0.0,
        read,
    )


def _best(
    device: CudaDevice, nbytes: int, copy: Callable[[], None], before: Callable[[], None] = lambda: None
) -> float:
    seconds: list[float] = []
    for _ in range(ROUNDS):
        before()
        start = device.copy_event()
        copy()
        end = device.copy_event()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return nbytes / min(seconds)


def _registered(device: CudaDevice, run: Run, target: int, nbytes: int) -> float:
    span = spans_of([Run(run.file, run.begin, nbytes, 0)])[0]
    mapped = span.file.map_pages(span.begin, span.end)
    address = address_of(mapped)
    try:
        device.register(address, span.nbytes)
    except Exception:  # the host's choice says why
        return 0.0
    try:
        return _best(device, nbytes, lambda: device.copy_in(target, address + run.begin - span.begin, nbytes))
    finally:
        device.unregister(address)


def _managed(device: CudaDevice, nbytes: int) -> float:
    memory = CudaManagedMemory(device)
    if nbytes > memory.free_bytes():
        return 0.0
    address = memory.allocate(nbytes)
    try:
        ctypes.memset(address, 0, nbytes)
        memory.filled(address, nbytes)
        return _best(
            device, nbytes, lambda: memory.bring(address, nbytes), before=lambda: memory.evict(address, nbytes)
        )
    finally:
        memory.free(address)
