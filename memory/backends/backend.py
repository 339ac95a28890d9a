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
from typing import Any, Protocol

import torch

from ..encoding import Encoding
from ..file import Extent
from ..layer import Layer, as_stored, view
from ..ledger import Ledger, now
from ..plan import Plan, aligned


class Ticket(Protocol):
    """A point in compute's order. Of two with the same `order` the later one is reached later."""

    @property
    def order(self) -> int: ...


# Stored weight, weight of another type or with its channels last, how the first is stored. Both on the device, on the copies'
# order. What is packed is handed in as uint8 [bytes].
Convert = Callable[[torch.Tensor, torch.Tensor, Encoding], None]


def cast(stored: torch.Tensor, out: torch.Tensor, encoding: Encoding) -> None:
    """The conversion where none is handed in: torch's own."""
    if encoding.is_packed:
        raise ValueError(f"torch does not dequantise {encoding.name}: hand in a conversion that does")
    out.copy_(stored)


class Source(Protocol):
    """Where bytes come from."""

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        """All bytes of an extent into a buffer of exactly that size, or an exception that names the file."""


class Weights(dict[str, torch.Tensor]):
    """A layer's weights by name: views of the room that it is in, the same ones whenever it comes there. kept: what the user makes
    of the views, once."""

    kept: Any = None


@dataclass(eq=False)
class Along:
    """Pinned bytes that a copy brings too, behind its layer's, once the points in compute's order are reached."""

    target: int
    source: int
    nbytes: int
    after: tuple[Any, ...] = ()
    done: threading.Event = field(
        default_factory=threading.Event
    )  # for the host: asked of the device, or not and never
    there: Any = None  # on the device, that the bytes are there; None where the copy failed


@dataclass(eq=False)
class Copy:
    """A layer's bytes on their way into a room. done: for the host, that everything was asked of the device or failed."""

    layer: Layer | None
    room: Any
    after: tuple[Any, ...] = ()
    done: threading.Event = field(default_factory=threading.Event)
    reached: Any = None  # on the device, that the bytes are there
    error: BaseException | None = None
    weights: Weights | None = None  # once somebody asked
    along: Along | None = None
    made: Any = None  # what the user made of these weights and would make again of the next copy; goes with them


class Backend(Protocol):
    """One device's memory and its two orders."""

    overhead_bytes: int  # that the backend holds for itself
    is_writable: bool  # whether a room is its layer's alone, so that what is written there stays until the next copy

    def room_bytes(self, nbytes: int) -> int:
        """What a room of that size takes of the device."""

    def expect(self, plan: Plan) -> None:
        """What will be copied, how often."""

    def take(self, nbytes: int) -> Any:
        """Room on the device for layers of that size."""

    def give_back(self, room: Any) -> None:
        """Nothing is under way in this room, nobody uses it."""

    def trim(self) -> None:
        """What was given back goes back to the system."""

    def submit(self, copy: Copy) -> None: ...

    def weights(self, copy: Copy) -> Weights:
        """A copied layer's."""

    def mark(self) -> Ticket: ...

    def wait(self, copy: Copy) -> Ticket:
        """Compute waits for it; the point from which it has the bytes. What went wrong in a copy is raised here."""

    def used(self, copy: Copy, begun: Any, over: Any) -> None:
        """For the ledger: compute had these weights from one point to the other."""

    def check_arrived(self) -> None:
        """Raises FileChanged where a file changed while the device read it; of copies that are over."""

    def drain(self) -> None:
        """The host waits until nothing is under way."""

    def close(self) -> None:
        """Whatever is under way ends, nothing more is taken. May be called twice."""


class Reached(threading.Event):
    """A point in the host's own order: reached when it was asked for."""

    order = 0

    def __init__(self) -> None:
        super().__init__()
        self.time = now()
        self.set()


class HostBackend:
    """The device is plain memory, compute is whatever the caller does, and a thread makes the copies."""

    is_writable = True

    def __init__(self, source: Source, ledger: Ledger, convert: Convert | None = None, staging_bytes: int = 0) -> None:
        self._source = source
        self._ledger = ledger
        self._convert = convert or cast
        self.overhead_bytes = aligned(staging_bytes)
        self._staging = torch.empty(staging_bytes, dtype=torch.uint8)
        self._copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fusestream-copies", daemon=True)
        self._thread.start()

    def room_bytes(self, nbytes: int) -> int:
        return aligned(nbytes)

    def expect(self, plan: Plan) -> None: ...

    def take(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def give_back(self, room: torch.Tensor) -> None: ...

    def trim(self) -> None: ...

    def weights(self, copy: Copy) -> Weights:
        assert copy.layer is not None
        if copy.weights is None:
            copy.weights = Weights(copy.layer.views(copy.room))
        return copy.weights

    def submit(self, copy: Copy) -> None:
        self._copies.put(copy)

    def mark(self) -> Reached:
        return Reached()  # compute is the caller's own: what was asked for is done

    def wait(self, copy: Copy) -> Reached:
        assert copy.layer is not None
        start = now()
        copy.done.wait()
        self._ledger.add("stall", copy.layer.name, start, now())
        if copy.error is not None:
            raise copy.error
        return Reached()

    def used(self, copy: Copy, begun: Reached, over: Reached) -> None:
        assert copy.layer is not None
        self._ledger.add("use", copy.layer.name, begun.time, over.time)

    def check_arrived(self) -> None:
        """Every byte was checked as it was read."""

    def drain(self) -> None:
        last = Copy(None, None)
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
        if copy.layer is None:
            return
        start = now()
        for weight, at in zip(copy.layer.weights, copy.layer.offsets, strict=True):
            stored = copy.room[at : at + weight.nbytes]
            if weight.is_staged:
                stored = self._staging[: weight.extent.nbytes]
            self._source.read_into(weight.extent, stored.numpy().data)
            if weight.is_staged:
                self._convert(as_stored(stored, weight), view(copy.room, at, weight), weight.extent.encoding)
        if copy.layer.weights:
            self._ledger.add("copy", copy.layer.name, start, now(), copy.layer.stored_bytes, "file")
