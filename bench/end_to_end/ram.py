"""Makes a large machine act as one with little RAM: plain memory takes all but so much, page cache included.

What is taken is written to once, so that the system has to have it. Room for a file's pages then is as scarce as on the small
machine, and pages that do not fit are read from the disk again. Where too little is left for the work, the system ends the process
that does it, and not the one that holds the ballast.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

GIB = 2**30
DESKTOP = 4 * GIB  # what a system and a browser take of a small machine
PIECE = GIB // 4
WRITERS = 8  # the system clears pages as they are written to
ENDED_FIRST = "1000"  # of Linux' oom_score_adj
OWN = Path("/proc/self/oom_score_adj")


class RamBallast:
    """What this process has taken, in pieces."""

    def __init__(self) -> None:
        self._pieces: list[mmap.mmap] = []

    @property
    def nbytes(self) -> int:
        return len(self._pieces) * PIECE

    def leave(self, gib: float | None) -> None:
        """Leave free what a machine of so many GiB has, to one piece. None: give everything back."""
        while self._pieces and (gib is None or available() < wanted(gib)):
            self._pieces.pop().close()
        while gib is not None and (more := (available() - wanted(gib)) // PIECE) > 0:
            with ThreadPoolExecutor(WRITERS) as pool:
                self._pieces += pool.map(taken, [PIECE] * more)


def wanted(gib: float) -> int:
    """Bytes that are free on a machine of so many GiB."""
    return int(gib * GIB) - DESKTOP


def available() -> int:
    """Bytes of RAM that could be taken now, page cache included."""
    ram: Any = importlib.import_module("fusestream.memory.host.ram")
    return int(ram.measure_ram().available)


def taken(nbytes: int) -> mmap.mmap:
    """Memory that the system has had to find."""
    piece = mmap.mmap(-1, nbytes)
    view = ctypes.c_char.from_buffer(piece)
    ctypes.memset(ctypes.addressof(view), 1, nbytes)  # without the interpreter's lock
    del view  # else the piece cannot be closed
    return piece


def go_first() -> None:
    """This process is the one to be ended where RAM is short, and not the one with the ballast."""
    with contextlib.suppress(OSError):  # other systems
        OWN.write_text(ENDED_FIRST, encoding="ascii")
