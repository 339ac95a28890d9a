"""A device over the stand-in for NVIDIA's driver: `CudaDevice`, with the driver's streams and events where that has torch's, and
rooms in RAM."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fusestream.gpu import Driver
from fusestream.gpu.cuda import CONCURRENT_MANAGED_ACCESS, READ_ONLY_REGISTER
from fusestream.memory.backends.cuda_managed import CudaManagedMemory
from fusestream.memory.device import CudaDevice, Pinned
from fusestream.memory.driver_calls import MemoryCalls
from fusestream.memory.driver_priority import Precedence

NOT_READY = 600


class StandInEvent:
    """Never destroyed, because work that is asked for may still look at it."""

    def __init__(self, driver: Driver, stream: int | None) -> None:
        self._driver, self._handle = driver, ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(self._handle), 0)
        self._call("cuEventRecord", self._handle, ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        self._driver.check(getattr(self._driver.library, name)(*arguments), name, "an event")

    @property
    def handle(self) -> ctypes.c_void_p:
        return self._handle

    def query(self) -> bool:
        status = self._driver.library.cuEventQuery(self._handle)
        if status not in (0, NOT_READY):
            self._driver.check(status, "cuEventQuery", "an event")
        return bool(status == 0)

    def synchronize(self) -> None:
        self._call("cuEventSynchronize", self._handle)

    def elapsed_time(self, end: StandInEvent) -> float:
        found = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(found), self._handle, end._handle)
        return found.value


class StandInDevice(CudaDevice):
    """Compute is done by the thread that asks for it, at once: it is the driver's null stream."""

    def __init__(self, driver: Driver) -> None:
        self.index, self.name = 0, "stand-in:0"
        self.precedence = Precedence()
        self.driver, self.calls = driver, MemoryCalls(driver)
        self.torch_device = torch.device("cpu")
        self._registers = bool(driver.attribute(0, READ_ONLY_REGISTER))
        self.is_managed_capable = bool(driver.attribute(0, CONCURRENT_MANAGED_ACCESS))
        self.enter_thread()
        handle = ctypes.c_void_p()
        driver.check(driver.library.cuStreamCreate(ctypes.byref(handle), 0), "cuStreamCreate", "copies")
        self.stream = SimpleNamespace(cuda_stream=handle.value)

    def stop(self) -> None:
        """No copy is left, and no memory that a device could read."""
        self.synchronize()
        self.driver.library.cuStreamDestroy_v2(ctypes.c_void_p(self.stream.cuda_stream))

    def enter_thread(self) -> None:
        self.driver.enter(0)

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def trim(self) -> None: ...

    def compute_event(self) -> StandInEvent:
        return StandInEvent(self.driver, None)

    def copy_event(self) -> StandInEvent:
        return StandInEvent(self.driver, self.stream.cuda_stream)

    def compute_waits(self, event: StandInEvent) -> None:
        event.synchronize()

    def copies_wait(self, event: StandInEvent) -> None:
        stream = ctypes.c_void_p(self.stream.cuda_stream)
        status = self.driver.library.cuStreamWaitEvent(stream, event.handle, 0)
        self.driver.check(status, "cuStreamWaitEvent", "copies")

    def compute_order(self) -> int:
        return threading.get_ident()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self.synchronize()  # what torch does then is done at once, behind all copies so far
        yield

    def synchronize(self) -> None:
        stream = ctypes.c_void_p(self.stream.cuda_stream)
        self.driver.check(self.driver.library.cuStreamSynchronize(stream), "cuStreamSynchronize", "copies")

    def capturing(self) -> bool:
        return False


class StandInManagedMemory(CudaManagedMemory):
    def on_device(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(Pinned(address, nbytes).view, dtype=torch.uint8) if nbytes else torch.empty(0)
