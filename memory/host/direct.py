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
from ..open_file import OpenFile, Stamp, changed
from ..runs import Run

BLOCK = 4096


class DirectReads:
    """O_DIRECT handles of some files. Raises OSError if the file system does not support it."""

    name = "disk, past the page cache"
    padding = 2 * BLOCK

    def __init__(self, files: Sequence[OpenFile]) -> None:
        self._lock = threading.Lock()
        self._handles: dict[OpenFile, tuple[int, Stamp]] = {}
        try:
            for file in files:
                handle = os.open(file.path, os.O_RDONLY | getattr(os, "O_DIRECT"))  # noqa: B009 - Linux only
                self._handles[file] = handle, Stamp.of(os.fstat(handle))
        except BaseException:
            self.close()
            raise

    def read(self, run: Run, offset: int, nbytes: int, buffer: memoryview) -> int:
        handle, stamp = self._handles[run.file]
        run.file.check()
        at = run.begin + offset
        begin = at // BLOCK * BLOCK
        wanted = -(-(at + nbytes) // BLOCK) * BLOCK - begin
        done = 0
        while done < at + nbytes - begin:
            with buffer[done:wanted] as target, told_as_bad_file(run.file.path):
                count = os.preadv(handle, [target], begin + done)
                now = Stamp.of(os.fstat(handle))
            if now != stamp or not count:
                raise changed(run.file.path, stamp.changed_to(now) if now != stamp else f"ended at byte {begin + done}")
            done += count // BLOCK * BLOCK if begin + done + count < stamp.size else count
        return at - begin

    def close(self) -> None:
        with self._lock:
            for handle, _ in self._handles.values():
                os.close(handle)
            self._handles = {}
