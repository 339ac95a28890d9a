"""Reads pages of a mapping into the page cache without touching them."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any

POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14 on


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """The C library's `madvise`, because Python's holds the interpreter's lock all the while. None
    outside Linux."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def read_in(address: int, nbytes: int) -> bool:
    """Read these whole pages of a mapping into the page cache; whether that was done. If it could
    not be done, or the file has lost the pages, their next user finds out."""
    madvise = _madvise()
    return madvise is not None and madvise(address, nbytes, POPULATE_READ) == 0
