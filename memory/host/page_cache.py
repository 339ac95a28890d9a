"""Reads pages of a mapping into the page cache without touching them.

By the C library or the kernel's own library, because Python's `mmap.madvise` holds the interpreter's
lock all the while.
"""

from __future__ import annotations

import ctypes
import sys

if sys.platform == "win32":
    from ctypes import wintypes

    _THIS_PROCESS = wintypes.HANDLE(-1)

    class _Range(ctypes.Structure):
        """WIN32_MEMORY_RANGE_ENTRY"""

        _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]

    # PrefetchVirtualMemory, Windows 8 on: process, number of ranges, ranges, flags
    _prefetch = ctypes.WinDLL("kernel32").PrefetchVirtualMemory
    _prefetch.argtypes = [wintypes.HANDLE, ctypes.c_size_t, ctypes.POINTER(_Range), wintypes.ULONG]
    _prefetch.restype = wintypes.BOOL

elif sys.platform == "linux":
    _POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14 on
    _madvise = ctypes.CDLL(None, use_errno=True).madvise
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def read_in(address: int, nbytes: int) -> bool:
    """Read these whole pages of a mapping into the page cache; whether the system took it on. If it
    could not be done, or the file has lost the pages, their next user finds out."""
    if sys.platform == "win32":
        return bool(_prefetch(_THIS_PROCESS, 1, ctypes.byref(_Range(address, nbytes)), 0))
    return sys.platform == "linux" and bool(_madvise(address, nbytes, _POPULATE_READ) == 0)
