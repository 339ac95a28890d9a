"""The interface between the pager and a device, and the backend whose device is plain memory.

Two things happen at a time: compute, in the order of the caller, and copies, in the order they were
submitted. Neither waits for the host. A ticket is a point that one must wait for in the other:

    submit(copy)   copies' order: starts when the tickets in `copy.after` are reached
    mark()         compute's order: reached when all compute asked for so far is done
    wait(copy)     makes compute wait for a copy; raises what went wrong in it
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
    """A point in compute's order. Of two tickets with the same `order` the later one is reached
    later."""

    @property
    def order(self) -> int: ...


# A conversion takes the stored weight, the weight to write (of another type, or channels last), and
# the stored weight's encoding. Both tensors are on the device; the work is in the copies' order. A
# packed weight is handed in as uint8 [bytes].
Convert = Callable[[torch.Tensor, torch.Tensor, Encoding], None]


def cast(stored: torch.Tensor, out: torch.Tensor, encoding: Encoding) -> None:
    """Torch's own conversion, the default."""
    if encoding.is_packed:
        raise ValueError(f"torch does not dequantise {encoding.name}: hand in a conversion that does")
    out.copy_(stored)


class Source(Protocol):
    """A reader of extents."""

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        """Fill a buffer of exactly the extent's size. Raises an exception that names the file."""


class Weights(dict[str, torch.Tensor]):
    """A layer's weights by name: views of its room. The same object is returned whenever the layer
    comes to that room.

    kept: what the user made of the views; made once.
    """

    kept: Any = None


@dataclass(eq=False)
class Along:
    """Pinned bytes that a copy brings behind its layer's, once the points `after` in compute's
    order are reached."""

    target: int
    source: int
    nbytes: int
    after: tuple[Any, ...] = ()
    done: threading.Event = field(
        default_factory=threading.Event
    )  # for the host: set once the device was asked for the bytes, or never will be
    there: Any = None  # on the device: reached when the bytes are there; None if the copy failed


@dataclass(eq=False)
class Copy:
    """A layer's bytes on their way into a room. done: for the host, set once the device was asked
    for everything, or the copy failed."""

    layer: Layer | None
    room: Any
    after: tuple[Any, ...] = ()
    done: threading.Event = field(default_factory=threading.Event)
    reached: Any = None  # on the device: reached when the bytes are there
    error: BaseException | None = None
    weights: Weights | None = None  # made on first request
    along: Along | None = None
    # user data made of these weights; dropped with this copy, and made again of the next
    made: Any = None


class Backend(Protocol):
    """One device's memory and its two orders."""

    overhead_bytes: int  # device bytes that the backend holds for itself
    # whether a room belongs to one layer alone, so that what is written there stays until the next
    # copy
    is_writable: bool

    def room_bytes(self, nbytes: int) -> int:
        """Device bytes that a room for `nbytes` takes."""

    def expect(self, plan: Plan) -> None:
        """Announce which layers will be copied, and how often."""

    def take(self, nbytes: int) -> Any:
        """Take a room on the device for layers of that size."""

    def give_back(self, room: Any) -> None:
        """Give a room back. No copy into it is under way, and it is not in use."""

    def trim(self) -> None:
        """Return given-back memory to the system."""

    def submit(self, copy: Copy) -> None: ...

    def weights(self, copy: Copy) -> Weights:
        """The weights of a copied layer."""

    def mark(self) -> Ticket: ...

    def wait(self, copy: Copy) -> Ticket:
        """Make compute wait for a copy; return the point from which compute has the bytes. Raises
        what went wrong in the copy."""

    def used(self, copy: Copy, begun: Any, over: Any) -> None:
        """Tell the ledger that compute used these weights between two points."""

    def check_arrived(self) -> None:
        """Raise FileChanged if a file changed while the device read it, for copies that are
        over."""

    def drain(self) -> None:
        """Make the host wait until nothing is under way."""

    def close(self) -> None:
        """End whatever is under way, and take nothing more. May be called twice."""


class Reached(threading.Event):
    """A point in the host's own order: reached as soon as it is asked for."""

    order = 0

    def __init__(self) -> None:
        super().__init__()
        self.time = now()
        self.set()


class HostBackend:
    """Backend whose device is plain memory and whose compute is the caller's own. A thread makes
    the copies."""

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
        return Reached()  # compute is the caller's own, and done by now

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
        """Does nothing, because every byte was checked as it was read."""

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
