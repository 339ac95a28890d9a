"""A device of plain memory: a thread is its copy stream, and it checks what a GPU would silently get wrong.

A copy may only read bytes that are pinned or registered, when it is asked for and when it is made; nothing is registered
twice or freed while a copy reads it; managed pages are filled before they are brought, and used only while they are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from fusestream.memory import CudaError
from fusestream.memory.device import Pinned
from fusestream.memory.driver_priority import Precedence
from fusestream.memory.plan import OverBudget


class PlainEvent:
    def __init__(self, *, reached: bool = False) -> None:
        self._reached = threading.Event()
        self.time = 0.0
        if reached:
            self.reach()

    def reach(self) -> None:
        self.time = time.perf_counter()
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    def elapsed_time(self, end: PlainEvent) -> float:
        assert self.query() and end.query()
        return (end.time - self.time) * 1e3


class PlainDevice:
    name = "plain:0"

    def __init__(self, memory: int = 1 << 40) -> None:
        self.memory = memory
        self.precedence = Precedence()
        self.gate = threading.Event()  # copies wait for it
        self.gate.set()
        self.refuses_to_register: Callable[[int], bool] = lambda count: False  # given how many were registered
        self.registered: dict[int, int] = {}
        self.registrations = 0
        self.pinned: dict[int, tuple[int, object]] = {}
        self.most_locked = 0
        self.errors: list[BaseException] = []
        self.is_capturing = False
        self._lock = threading.Lock()
        self._copies_busy: list[tuple[int, int]] = []
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_copies = threading.local()
        self._thread = threading.Thread(target=self._stream, name="plain-stream", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.gate.set()
        self._work.put(None)
        self._thread.join()
        assert not self.errors, self.errors
        assert not self.registered and not self.pinned

    def _stream(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: PERF203
                self.errors.append(error)

    def enter_thread(self) -> None: ...

    def room(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.memory:
            raise OverBudget("the plain device is full")
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def trim(self) -> None: ...

    def compute_event(self) -> PlainEvent:
        return PlainEvent(reached=True)

    def copy_event(self) -> PlainEvent:
        event = PlainEvent()
        self._work.put(event.reach)
        return event

    def compute_waits(self, event: PlainEvent) -> None:
        event.synchronize()

    def copies_wait(self, event: PlainEvent) -> None:
        self._work.put(event.synchronize)

    def compute_order(self) -> int:
        return threading.get_ident()

    def locked(self, source: int, nbytes: int) -> bool:
        """Whether a GPU could read all these bytes. Parts registered one behind the other count as one."""
        with self._lock:
            ranges = sorted([*self.registered.items(), *((a, n) for a, (n, _) in self.pinned.items())])
        at = source
        for address, size in ranges:
            if address <= at < address + size:
                at = address + size
        return at >= source + nbytes

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        assert self.locked(source, nbytes), "a copy of what is neither pinned nor registered"
        with self._lock:
            self._copies_busy.append((source, nbytes))

        def copy() -> None:
            self.gate.wait()
            assert self.locked(source, nbytes), "unregistered or freed under a copy"
            ctypes.memmove(target, source, nbytes)
            with self._lock:
                self._copies_busy.remove((source, nbytes))

        self._work.put(copy)

    def copy_all(self, room: int, pieces: Iterable[tuple[int, int, int]]) -> None:
        for at, source, nbytes in pieces:
            self.copy_in(room + at, source, nbytes)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        done = self.copy_event()
        done.synchronize()  # what torch does then is done at once, behind all copies so far
        yield

    def synchronize(self) -> None:
        self.copy_event().synchronize()

    def capturing(self) -> bool:
        return self.is_capturing

    def pin(self, nbytes: int) -> Pinned:
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with self._lock:
            self.pinned[address] = nbytes, memory
            self._count()
        return Pinned(address, nbytes)

    def unpin(self, pinned: Pinned) -> None:
        with self._lock:
            assert not self._busy(pinned.address, pinned.nbytes), "freed under a copy"
            del self.pinned[pinned.address]

    def register(self, address: int, nbytes: int) -> None:
        with self._lock:
            assert address % mmap.PAGESIZE == 0 and nbytes % mmap.PAGESIZE == 0 and nbytes
            overlaps = [a for a, n in self.registered.items() if a < address + nbytes and address < a + n]
            assert not overlaps, "registered twice"
            self.registrations += 1
            if self.refuses_to_register(self.registrations):
                raise CudaError("a file's pages: cuMemHostRegister failed with NOT_SUPPORTED (801)", 801)
            self.registered[address] = nbytes
            self._count()

    def unregister(self, address: int) -> None:
        with self._lock:
            assert not self._busy(address, self.registered[address]), "unregistered under a copy"
            del self.registered[address]

    def _busy(self, address: int, nbytes: int) -> bool:
        return any(a < address + nbytes and address < a + n for a, n in self._copies_busy)

    def _count(self) -> None:
        locked = sum(self.registered.values()) + sum(n for n, _ in self.pinned.values())
        self.most_locked = max(self.most_locked, locked)


class PlainManagedMemory:
    """Which pages are on the device is only noted: the bytes are in one place."""

    def __init__(self, device: PlainDevice, free: int = 1 << 40) -> None:
        self.device = device
        self.free_memory = free
        self.resident: dict[int, int] = {}
        self.most_resident = 0
        self.evictions = 0
        self.filled_pages: dict[int, int] = {}
        self._memory: dict[int, mmap.mmap] = {}

    def allocate(self, nbytes: int) -> int:
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        del self._memory[address]

    def free_bytes(self) -> int:
        return self.free_memory

    def filled(self, address: int, nbytes: int) -> None:
        assert address not in self.filled_pages, "filled twice"
        self.filled_pages[address] = nbytes

    def bring(self, address: int, nbytes: int) -> None:
        assert self.filled_pages[address] == nbytes, "brought before it was filled"
        assert address not in self.resident, "brought twice"
        self.resident[address] = nbytes
        self.most_resident = max(self.most_resident, sum(self.resident.values()))
        self.device._work.put(self.device.gate.wait)

    def evict(self, address: int, nbytes: int) -> None:
        assert self.resident.pop(address) == nbytes
        self.evictions += 1

    def on_host(self, address: int, nbytes: int) -> memoryview:
        return Pinned(address, nbytes).view

    def on_device(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(Pinned(address, nbytes).view, dtype=torch.uint8) if nbytes else torch.empty(0)

    def has(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(a <= at and at + tensor.nbytes <= a + n for a, n in self.resident.items())
