"""Reads past the page cache, for files larger than RAM, where caching one layer only evicts the
next.

Such reads begin and end at whole blocks of the file, into buffers that begin at whole pages. The
wanted bytes lie somewhere in between.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from ..file import told_as_bad_file
from ..open_file import OpenFile, ReadsAt, Stamp, changed, reader
from ..runs import Run
from .unbuffered import BLOCK, unbuffered


class DirectReads:
    """Handles of some files that read past the page cache. Raises OSError if the system or the file
    system has none, and FileChanged if one of the files is another by now."""

    name = "disk, past the page cache"
    padding = 2 * BLOCK

    def __init__(self, files: Sequence[OpenFile]) -> None:
        self._lock = threading.Lock()
        self._opened: dict[OpenFile, tuple[int, ReadsAt]] = {}
        try:
            for file in files:
                handle = unbuffered(file.path, os.O_RDONLY)
                self._opened[file] = handle, reader(handle, file.path, file.stamp, unbuffered)
                _check(file, handle)
        except BaseException:
            self.close()
            raise

    def read(self, run: Run, offset: int, nbytes: int, buffer: memoryview) -> int:
        handle, reads = self._opened[run.file]
        run.file.check()
        at = run.begin + offset
        begin = at // BLOCK * BLOCK
        wanted = -(-(at + nbytes) // BLOCK) * BLOCK - begin
        done = 0
        while done < at + nbytes - begin:
            with buffer[done:wanted] as target, told_as_bad_file(run.file.path):
                count = reads.read_at(target, begin + done)
            _check(run.file, handle)
            if not count:
                raise changed(run.file.path, f"ended at byte {begin + done}")
            done += count // BLOCK * BLOCK if begin + done + count < run.file.stamp.size else count
        return at - begin

    def close(self) -> None:
        with self._lock:
            for handle, reads in self._opened.values():
                reads.close()
                os.close(handle)
            self._opened = {}


def _check(file: OpenFile, handle: int) -> None:
    """Raise `FileChanged` unless this handle's file is the one that was opened, as it was."""
    with told_as_bad_file(file.path):
        now = Stamp.of(os.fstat(handle))
    if now != file.stamp:
        raise changed(file.path, file.stamp.changed_to(now))
