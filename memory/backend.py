"""What the pager asks of a device, and the device that is plain memory.

Two things happen at a time: compute, in the order of the caller, and copies, in the order they were submitted. Neither
waits for the host. What one must wait for in the other is a ticket:

    submit(copy)   the copies' order: starts when the tickets in `copy.after` are reached
    mark()         compute's order: reached when all compute asked for so far is done
    wait(ticket)   compute waits for it; what went wrong in a copy is raised here
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .file import Extent
from .layer import Layer, view
from .ledger import Ledger, now

Ticket = threading.Event

# Stored weight -> weight of another type, both on the device, on the copies' order.
Convert = Callable[[torch.Tensor, torch.Tensor], None]


def cast(stored: torch.Tensor, out: torch.Tensor) -> None:
    """The conversion where none is handed in: torch's own."""
    out.copy_(stored)


class Source(Protocol):
    """Where bytes come from."""

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        """All bytes of an extent into a buffer of exactly that size, or an exception that names the file."""


@dataclass
class Copy:
    """A layer's bytes on their way into a room, uint8 [at least layer.nbytes]."""

    layer: Layer
    room: torch.Tensor
    after: tuple[Ticket, ...] = ()
    done: Ticket = field(default_factory=Ticket)
    error: BaseException | None = None


class Backend(Protocol):
    """One device's memory and its two orders."""

    def take(self, nbytes: int) -> torch.Tensor:
        """Room on the device: uint8 [nbytes]."""

    def submit(self, copy: Copy) -> None: ...

    def mark(self) -> Ticket: ...

    def wait(self, copy: Copy) -> None: ...

    def drain(self) -> None:
        """The host waits until nothing is under way."""

    def close(self) -> None:
        """Whatever is under way ends, nothing more is taken. May be called twice."""


class HostBackend:
    """The device is plain memory, compute is whatever the caller does, and a thread makes the copies."""

    def __init__(self, source: Source, ledger: Ledger, convert: Convert | None = None, staging_bytes: int = 0) -> None:
        self._source = source
        self._ledger = ledger
        self._convert = convert or cast
        self._staging = torch.empty(staging_bytes, dtype=torch.uint8)
        self._copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fusestream-copies", daemon=True)
        self._thread.start()

    def take(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def submit(self, copy: Copy) -> None:
        self._copies.put(copy)

    def mark(self) -> Ticket:
        reached = Ticket()
        reached.set()  # compute is the caller's own: what was asked for is done
        return reached

    def wait(self, copy: Copy) -> None:
        copy.done.wait()
        if copy.error is not None:
            raise copy.error

    def drain(self) -> None:
        last = Copy(Layer("", ()), torch.empty(0, dtype=torch.uint8))
        self.submit(last)
        last.done.wait()

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._copies.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            copy = self._copies.get()
            if copy is None:
                return
            try:
                for ticket in copy.after:
                    ticket.wait()
                if not self._closing.is_set():
                    self._copy(copy)
                else:
                    copy.error = RuntimeError("the pager was closed while weights were on their way")
            except BaseException as error:
                copy.error = error
            finally:
                copy.done.set()

    def _copy(self, copy: Copy) -> None:
        start = now()
        for weight, at in zip(copy.layer.weights, copy.layer.offsets, strict=True):
            stored = copy.room[at : at + weight.nbytes]
            if weight.is_converted:
                stored = self._staging[: weight.extent.nbytes]
            self._source.read_into(weight.extent, stored.numpy().data)
            if weight.is_converted:
                self._convert(stored.view(weight.stored_dtype).view(weight.extent.shape), view(copy.room, at, weight))
        if copy.layer.weights:
            self._ledger.add("copy", copy.layer.name, start, now(), copy.layer.stored_bytes, "file")
