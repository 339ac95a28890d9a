"""The interface between the copying backends and one device: two orders of work, and memory of
three kinds.

Compute is the caller's current stream. Copies have a stream of their own. Neither waits for the
host; an event is a point that one waits for in the other. `CudaDevice` is the real device. The
tests have one of plain memory with a thread for a stream, so that everything around it runs without
a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..gpu.capture import capturing
from ..gpu.cuda import CONCURRENT_MANAGED_ACCESS, READ_ONLY_REGISTER
from ..gpu.streams import Streams, raw_stream
from .driver_calls import MemoryCalls, memory_calls
from .driver_priority import Precedence
from .plan import OverBudget


class Event(Protocol):
    """A point in one of the orders."""

    def query(self) -> bool:
        """Whether it is reached."""

    def synchronize(self) -> None:
        """Make the host's thread wait for it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to another event; both are reached."""


@dataclass(frozen=True)
class Pinned:
    """Host memory that the device reads by itself."""

    address: int
    nbytes: int

    @property
    def view(self) -> memoryview:
        """Its bytes, writable. Not to be used after the memory was freed."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")


class Device(Protocol):
    """All methods may be called from any thread that has called `enter_thread` or used torch on
    this device."""

    name: str
    precedence: Precedence

    def enter_thread(self) -> None: ...

    def room(self, nbytes: int) -> torch.Tensor:
        """Device memory: uint8 [nbytes]. Raises OverBudget if the device has no more."""

    def trim(self) -> None:
        """Return the memory of dropped rooms to the system."""

    def compute_event(self) -> Event:
        """An event recorded behind all compute asked for so far."""

    def copy_event(self) -> Event:
        """An event recorded behind all copies asked for so far."""

    def compute_waits(self, event: Event) -> None: ...

    def copies_wait(self, event: Event) -> None: ...

    def compute_order(self) -> int:
        """The number of the stream that compute is in. Events of one stream are reached in their
        order."""

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """Copy pinned or registered bytes to the device, in the copies' order."""

    def copy_all(self, room: int, pieces: Iterable[tuple[int, int, int]]) -> None:
        """`copy_in` of each (place in the room, source, bytes), one directly behind the other."""

    def copying(self) -> AbstractContextManager[Any]:
        """Put what torch does in this block into the copies' order."""

    def synchronize(self) -> None:
        """Make the host wait until both orders are done."""

    def capturing(self) -> bool:
        """Whether compute is being recorded into a CUDA graph."""

    def pin(self, nbytes: int) -> Pinned: ...

    def unpin(self, pinned: Pinned) -> None: ...

    def register(self, address: int, nbytes: int) -> None:
        """Let the device read these whole pages of a mapped file. Raises the driver's objection."""

    def unregister(self, address: int) -> None:
        """Undo `register`, from any thread at all: whoever wants RAM makes others give theirs
        back."""


class CudaDevice:
    """One NVIDIA GPU, through torch and, for calls that torch does not offer, the driver."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.name = f"cuda:{index}"
        self.precedence = Precedence()
        self.torch_device = torch.device("cuda", index)
        self.calls: MemoryCalls = memory_calls()
        self.driver = self.calls.driver
        torch.empty(1, device=self.torch_device)  # makes torch's context
        self.stream: Any = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._streams = Streams(index)
        self._registers = bool(self.driver.attribute(index, READ_ONLY_REGISTER))
        self.is_managed_capable = bool(self.driver.attribute(index, CONCURRENT_MANAGED_ACCESS))

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)
        self.driver.enter(self.index)

    def room(self, nbytes: int) -> torch.Tensor:
        try:
            # Never an inference tensor: it could not be written to outside inference mode, where
            # the copies are.
            with torch.inference_mode(False):
                return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            gib, free = 2**30, torch.cuda.mem_get_info(self.torch_device)[0]
            raise OverBudget(
                f"Weights need {nbytes / gib:.2f} GiB of VRAM more on {self.name}, and {free / gib:.2f} GiB are free. Lower "
                "the VRAM budget, or close what else uses the card."
            ) from error

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def compute_event(self) -> Any:
        return self._recorded(self._streams.current)

    def copy_event(self) -> Any:
        return self._recorded(self.stream)

    @staticmethod
    def _recorded(stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def compute_waits(self, event: Any) -> None:
        self._streams.current.wait_event(event)

    def copies_wait(self, event: Any) -> None:
        self.stream.wait_event(event)

    def compute_order(self) -> int:
        return raw_stream(self.index)

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        self.calls.copy_in(target, source, nbytes, self.stream.cuda_stream)

    def copy_all(self, room: int, pieces: Iterable[tuple[int, int, int]]) -> None:
        self.calls.copy_all(room, pieces, self.stream.cuda_stream)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream):
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def capturing(self) -> bool:
        return capturing()

    def pin(self, nbytes: int) -> Pinned:
        return Pinned(self.calls.alloc_host(nbytes), nbytes)

    def unpin(self, pinned: Pinned) -> None:
        self.calls.free_host(pinned.address)

    def register(self, address: int, nbytes: int) -> None:
        self.calls.register(address, nbytes, read_only=self._registers)

    def unregister(self, address: int) -> None:
        with self.driver.lent(self.index):
            self.calls.unregister(address)
