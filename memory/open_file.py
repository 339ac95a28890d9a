"""One weight file kept open for streaming: its checked header, positioned reads, a shared mapping.

A video takes minutes to hours, and all that time another program may overwrite, cut or replace the
file. Bytes are only handed out while the file is the one whose header was checked: same device and
inode, size and time of last change.

Two changes cannot be seen: one that keeps the size and falls into the tick of the file system's
clock (milliseconds) in which the file was opened, and one whose writer sets the time back.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .file import BadFile, open_regular, told_as_bad_file
from .formats import header_of
from .shared_open import shared

# The most bytes of one read: a change is noticed this soon, and some systems refuse reads of 2 GiB
# and more.
PIECE = 16 << 20


class FileChanged(BadFile):
    """The file is no longer the one that was opened. Bytes read before are sound; nothing more is
    read."""

    __module__ = "fusestream"


@dataclass(frozen=True)
class Stamp:
    """The numbers that tell one state of a file from another."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def changed_to(self, now: Stamp) -> str:
        if (now.device, now.inode) != (self.device, self.inode):
            return "was replaced by another file"
        if now.size != self.size:
            return f"had {self.size} bytes and now has {now.size}"
        return "was written to"


Opener = Callable[[str, int], int]  # path, flags -> descriptor, as for Python's `open`


class ReadsAt(Protocol):
    def read_at(self, target: memoryview, at: int) -> int: ...

    def close(self) -> None: ...


class Positioned:
    """Reads with `preadv`: the position travels with the call, so any number of threads may share
    the handle."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def read_at(self, target: memoryview, at: int) -> int:
        return os.preadv(self._handle, [target], at)

    def close(self) -> None:
        """Does nothing: the handle is its opener's."""


class Pooled:
    """For systems without `preadv`, such as Windows: every read has a handle of its own, taken from
    a pool."""

    def __init__(self, path: Path, stamp: Stamp, opener: Opener) -> None:
        self._path = path
        self._stamp = stamp
        self._opener = opener
        self._free: list[io.FileIO] = []  # append and pop are atomic

    def read_at(self, target: memoryview, at: int) -> int:
        try:
            handle = self._free.pop()
        except IndexError:
            handle = self._open()
        try:
            handle.seek(at)
            return handle.readinto(target) or 0
        finally:
            self._free.append(handle)

    def _open(self) -> io.FileIO:
        handle = io.FileIO(self._path, "rb", opener=self._opener)
        now = Stamp.of(os.fstat(handle.fileno()))
        if now != self._stamp:  # opened by name, so it may be another file by now
            handle.close()
            raise changed(self._path, self._stamp.changed_to(now))
        return handle

    def close(self) -> None:
        while self._free:
            self._free.pop().close()


def reader(handle: int, path: Path, stamp: Stamp, opener: Opener = shared) -> ReadsAt:
    """Reads of an open file. opener: of the kind of `handle`, if more such handles are needed."""
    return Positioned(handle) if hasattr(os, "preadv") else Pooled(path, stamp, opener)


REMEDY = "Press Run again: the loader then loads the file as it is now."


def changed(path: Path, what: str) -> FileChanged:
    return FileChanged(f"{path}: {what} while it was in use. {REMEDY}")


class OpenFile:
    """An open weight file. All methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._map: mmap.mmap | None = None
        self._map_alive: weakref.ref[mmap.mmap] | None = None
        self._file = open_regular(path)
        try:
            with told_as_bad_file(path):
                self._stamp = Stamp.of(os.fstat(self._file.fileno()))
                # On Windows some of these numbers differ by handle and by name, so each is compared
                # with itself.
                self._named = Stamp.of(path.stat())
            if os.name == "posix" and self._named != self._stamp:
                raise changed(path, self._stamp.changed_to(self._named))
            self.header = header_of(path, self._file)
            self._reader = reader(self._file.fileno(), path, self._stamp)
            self.check()
        except BaseException:
            self._file.close()
            raise

    @property
    def stamp(self) -> Stamp:
        """The file as it was opened, by its handle."""
        return self._stamp

    def check(self) -> None:
        """Raise `FileChanged` unless this is still the file that was opened, by its handle and by
        its name."""
        with self._in_use():
            self._check_handle()
            self._check_name()

    @property
    def has_changed(self) -> bool:
        """Whether `check` would raise."""
        try:
            self.check()
        except FileChanged:
            return True
        return False

    def read_into(self, target: memoryview, at: int) -> None:
        """Fill `target`, flat bytes, with the file's bytes from `at` on. Raises rather than give
        wrong bytes."""
        with self._in_use():
            self._check_name()
            for done in range(0, len(target), PIECE):
                self._fill(target[done : done + PIECE], at + done)
                # after the read: bytes read before a change are sound, later ones are not
                self._check_handle()

    def read_rows(self, target: memoryview, size: int, places: Sequence[int]) -> None:
        """Fill `target`, flat bytes, with rows of `size` bytes from these places of the file. As
        `read_into`, but a change is looked for only once, at the end, because that takes longer
        than reading a row."""
        with self._in_use():
            self._check_name()
            for row, at in enumerate(places):
                self._fill(target[row * size : (row + 1) * size], at)
            self._check_handle()

    def _fill(self, target: memoryview, at: int) -> None:
        done = 0
        while done < len(target):
            with target[done:] as piece, told_as_bad_file(self.path):
                count = self._reader.read_at(piece, at + done)
            if not count:
                self._check_handle()
                raise changed(self.path, f"ended at byte {at + done}")
            done += count

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes `[begin, end)` as they lie in the page cache, read-only."""
        with self._in_use():
            self._check_name()
            self._check_handle()
            return memoryview(self._mapping())[begin:end]

    def map_pages(self, begin: int, end: int) -> mmap.mmap:
        """A new mapping, for the driver, of the pages that hold `[begin, end)`. `begin` must be
        where a mapping may begin; the last page may go beyond the file. Reads through it are not
        checked: call `check` afterwards."""
        with self._in_use():
            self._check_name()
            self._check_handle()
            return self._new_mapping(begin, min(end, self._stamp.size) - begin)

    @property
    def mapped(self) -> bool:
        """Whether the mapping exists: from the first view until the file is closed and the last
        view is gone."""
        return self._map_alive is not None and self._map_alive() is not None

    def close(self) -> None:
        """Allow no more reads and views. A read under way in another thread ends well; the handle
        is closed after it."""
        with self._lock:
            if self._closed:  # only the first call releases
                return
            self._closed = True
            # Never `mmap.close()`: it refuses while views exist, and torch.frombuffer makes tensors
            # that it cannot see. The mapping goes with the last view, which may be now.
            self._map = None
            idle = not self._users
        if idle:
            self._release()

    def _release(self) -> None:
        self._reader.close()
        self._file.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep `close` from closing the handle during a read, because its number could then already
        be another file's."""
        with self._lock:
            self._refuse_if_closed()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self._closed and not self._users
            if last:
                self._release()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path}: is closed; no more weights can be read from it.")

    def _check_handle(self) -> None:
        with told_as_bad_file(self.path):
            now = Stamp.of(os.fstat(self._file.fileno()))
        if now != self._stamp:
            raise changed(self.path, self._stamp.changed_to(now))

    def _check_name(self) -> None:
        with told_as_bad_file(self.path):
            try:
                now = Stamp.of(self.path.stat())
            except FileNotFoundError as error:
                raise changed(self.path, "was moved or deleted") from error
        if now != self._named:
            raise changed(self.path, self._named.changed_to(now))

    def _mapping(self) -> mmap.mmap:
        with self._lock:
            self._refuse_if_closed()  # a mapping made after `close` would never be dropped
            if self._map is None:
                self._map = self._new_mapping(0, self._stamp.size)
                self._map_alive = weakref.ref(self._map)
            return self._map

    def _new_mapping(self, begin: int, length: int) -> mmap.mmap:
        """A mapping of these bytes. A file that is shorter by now is a ValueError of Python's on
        POSIX, and one of Windows' own errors there."""
        try:
            with told_as_bad_file(self.path):
                return mmap.mmap(self._file.fileno(), length, access=mmap.ACCESS_READ, offset=begin)
        except (BadFile, ValueError) as error:
            self._check_handle()
            if isinstance(error, BadFile):
                raise
            raise changed(self.path, f"has lost some of its {self._stamp.size} bytes") from error
