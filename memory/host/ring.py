"""A ring of pinned buffers that reader threads fill: file -> pinned RAM -> bus, for bytes that
cannot be read in place.

Layers are asked for in the order in which they will be copied. Their bytes are cut into pieces.
Readers take the pieces in that order, each into a free buffer, and the copying thread takes them
out in the same order. So the piece that is needed next always has a buffer or gets the next one,
and no order of events can lock the ring. A buffer whose copy is under way has that copy's event,
and is filled again after it.

A layer that has to be read after all, when layers behind it were asked for, would wait for them and
they for it. So it goes first, and they give their buffers back and are read again.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..device import Device, Event, Pinned
from ..runs import Run

BUFFER_BYTES = 16 << 20
MOST_BUFFERS = 16
LEAST_BUFFERS = 2
LEAST_BUFFER_BYTES = 1 << 16


class Reads(Protocol):
    """A way to get a file's bytes into a buffer."""

    name: str

    @property
    def padding(self) -> int:
        """Bytes that a buffer needs in addition to those that are read into it."""

    def read(self, run: Run, offset: int, nbytes: int, buffer: memoryview) -> int:
        """Read bytes of a run from `offset` on; return where in the buffer they begin. Raises
        rather than give wrong bytes."""

    def close(self) -> None: ...


class PlainReads:
    """Reads through the page cache."""

    name = "page cache or disk"
    padding = 0

    def read(self, run: Run, offset: int, nbytes: int, buffer: memoryview) -> int:
        with buffer[:nbytes] as target:
            run.file.read_into(target, run.begin + offset)
        return 0

    def close(self) -> None:
        """Does nothing: no handle is held."""


@dataclass(eq=False)
class Buffer:
    """Pinned bytes, and the event of the last copy out of them."""

    pinned: Pinned
    view: memoryview
    busy: Event | None = None


@dataclass(eq=False)
class Piece:
    """Bytes `[offset, offset + nbytes)` of a run: read into a buffer, or failed."""

    run: Run
    offset: int
    nbytes: int
    buffer: Buffer | None = None
    address: int = 0
    error: BaseException | None = None
    ready: bool = False
    dropped: bool = False  # nobody takes it any more: whoever fills it gives the buffer back

    def again(self) -> Piece:
        """The same bytes, to be read anew."""
        return Piece(self.run, self.offset, self.nbytes)


@dataclass(eq=False)
class Reading:
    """One layer on its way through the ring."""

    pieces: deque[Piece]


@dataclass(frozen=True)
class RingSize:
    """How much pinned RAM a ring takes."""

    buffers: int
    buffer_bytes: int

    @property
    def nbytes(self) -> int:
        return self.buffers * self.buffer_bytes

    @classmethod
    def within(cls, budget: int, wanted: int | None = None) -> RingSize:
        """The largest ring of at most `budget` bytes, and of no more than the `wanted` ones that
        could be under way; but at least LEAST_BUFFERS of LEAST_BUFFER_BYTES."""
        most = min(budget, MOST_BUFFERS * BUFFER_BYTES, wanted if wanted is not None else budget)
        page = LEAST_BUFFER_BYTES
        buffer_bytes = max(page, min(BUFFER_BYTES, most // 8 // page * page))
        return cls(max(LEAST_BUFFERS, min(MOST_BUFFERS, most // buffer_bytes)), buffer_bytes)


@dataclass(eq=False)
class PinnedRing:
    """`size` bytes of pinned RAM, or as many as the driver gives. Taken when the first layer is asked for,
    and freed by `close`.

    relent  gives back other locked memory, about so many bytes, where the driver gives none
    """

    device: Device
    size: RingSize
    reads: Reads
    readers: int
    relent: Callable[[int], None] = lambda _nbytes: None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _asked: list[Reading] = field(default_factory=list)  # not taken yet, in the order of their copies
    _jobs: deque[Piece] = field(default_factory=deque)
    _free: deque[Buffer] = field(default_factory=deque)
    _buffers: list[Buffer] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _closing: bool = False
    _most: int = 0  # buffers that there shall be
    _making: int = 0  # those that are being pinned: that takes time, and other threads read meanwhile

    @property
    def piece_bytes(self) -> int:
        return self.size.buffer_bytes - self.reads.padding

    def ask(self, runs: Sequence[Run], *, first: bool = False) -> Reading:
        """Begin to read these runs, after everything that was asked for before. first: before all of
        it, because their copy is the next; nothing is being taken."""
        pieces = deque(
            Piece(run, offset, min(self.piece_bytes, run.nbytes - offset))
            for run in runs
            for offset in range(0, run.nbytes, self.piece_bytes)
        )
        reading = Reading(pieces)
        with self._changed:
            self._start()
            if first:
                for other in self._asked:
                    again = deque(piece.again() for piece in other.pieces)
                    self._drop(other)
                    other.pieces = again
                self._asked.insert(0, reading)
                self._jobs = deque(piece for each in self._asked for piece in each.pieces)
            else:
                self._asked.append(reading)
                self._jobs.extend(pieces)
            self._changed.notify_all()
        return reading

    def take(self, reading: Reading) -> Iterator[Piece]:
        """Yield the pieces in order, each when it is there. By the time the caller asks for the
        next it has asked for the copy of this one."""
        try:
            while reading.pieces:
                piece = reading.pieces[0]
                with self._changed:
                    self._changed.wait_for(lambda piece=piece: piece.ready or self._closing)  # type: ignore[misc]
                    if not piece.ready:
                        raise RuntimeError("the pager was closed while weights were on their way")
                if piece.error is not None:
                    raise piece.error
                yield piece
                reading.pieces.popleft()
                self._give_back(piece, self.device.copy_event())
        finally:
            self.cancel(reading)

    def cancel(self, reading: Reading) -> None:
        """Drop what is left of a reading."""
        after = self.device.copy_event() if reading.pieces else None  # one of them may be in a copy
        with self._changed:
            if reading in self._asked:
                self._asked.remove(reading)
            for piece in reading.pieces:
                if piece.buffer is not None:
                    piece.buffer.busy = after
            self._drop(reading)
            self._jobs = deque(piece for piece in self._jobs if not piece.dropped)
            self._changed.notify_all()

    def close(self) -> None:
        """End the readers and free the RAM. Copies out of it are over. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._free.clear()
        for buffer in self._buffers:
            buffer.view.release()
            self.device.unpin(buffer.pinned)
        self._buffers = []
        self.reads.close()

    def _drop(self, reading: Reading) -> None:
        """Take its buffers from a reading, also those that are being filled."""
        for piece in reading.pieces:
            piece.dropped = True
            if piece.buffer is not None:
                self._free.append(piece.buffer)
                piece.buffer = None
        reading.pieces = deque()

    def _start(self) -> None:
        if self._threads or self._closing:
            return
        self._most = self.size.buffers
        for number in range(self.readers):
            thread = threading.Thread(target=self._work, name=f"fusestream-reader-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _is_incomplete(self) -> bool:
        return len(self._buffers) + self._making < self._most

    def _make_buffer(self) -> None:
        """One more, for the next piece. If no more can be pinned, those that are there have to do; if there
        are none, others give locked memory back, and if that is not enough the next piece has failed."""
        if self._added() is None:
            return
        with self._changed:
            self._most = len(self._buffers)
            if self._buffers:
                return
        with contextlib.suppress(Exception):  # what cannot be given back: the next try says what is missing
            self.relent(self.size.nbytes)
        error = self._added()
        with self._changed:
            self._most = self.size.buffers
            if not self._buffers and self._jobs:
                self._fail(error)

    def _fail(self, error: BaseException | None) -> None:
        """Tell whoever takes the next piece why it will not come."""
        piece = self._jobs.popleft()
        piece.error, piece.ready = error, True
        self._changed.notify_all()

    def _added(self) -> Exception | None:
        """Why there is not one buffer more; None: there is."""
        try:
            pinned = self.device.pin(self.size.buffer_bytes)
        except Exception as error:
            return error
        buffer = Buffer(pinned, pinned.view)
        with self._changed:
            self._buffers.append(buffer)
            self._free.append(buffer)
            self._changed.notify_all()
        return None

    def _give_back(self, piece: Piece, after: Event) -> None:
        assert piece.buffer is not None
        with self._changed:
            piece.buffer.busy = after
            self._free.append(piece.buffer)
            piece.buffer = None
            self._changed.notify_all()

    def _work(self) -> None:
        lost: BaseException | None = None
        try:
            self.device.enter_thread()
        except BaseException as error:
            lost = error
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or (self._jobs and (self._free or self._is_incomplete())))
                if self._closing:
                    return
                if lost is not None:
                    self._fail(lost)
                    continue
                # A piece is taken out only for a buffer that is there, so that none waits for one behind it.
                job = (self._jobs.popleft(), self._free.popleft()) if self._free else None
                self._making += job is None
            if job is None:
                self._make_buffer()
                with self._changed:
                    self._making -= 1
                    self._changed.notify_all()
            else:
                self._fill(*job)

    def _fill(self, piece: Piece, buffer: Buffer) -> None:
        try:
            if buffer.busy is not None:
                buffer.busy.synchronize()
            begin = self.reads.read(piece.run, piece.offset, piece.nbytes, buffer.view)
            piece.address = buffer.pinned.address + begin
        except BaseException as error:
            piece.error = error
        with self._changed:
            if piece.dropped or piece.error is not None:
                self._free.append(buffer)
            else:
                piece.buffer = buffer
            piece.ready = True
            self._changed.notify_all()
