"""CUDA driver calls that memory needs and torch does not offer.

`cuMemPrefetchAsync` and `cuMemAdvise` have a newer form with another signature. Drivers from 12.2
on export both forms; under CUDA 13 only the newer is documented. The newer one is bound where the
library has it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache

from ..gpu import Driver, driver

# flags of cuMemHostRegister and cuMemHostAlloc
PORTABLE = 0x01
READ_ONLY = 0x08

ATTACH_GLOBAL = 1  # flag of cuMemAllocManaged

# CUmem_advise
SET_READ_MOSTLY = 1
UNSET_READ_MOSTLY = 2
SET_PREFERRED_LOCATION = 3

HOST = -1  # CU_DEVICE_CPU: the host's memory, in place of a device ordinal

# CUmem_range_attribute
LAST_PREFETCH_LOCATION = 4


class Location(ctypes.Structure):
    """CUmemLocation: a device by its ordinal, or the host."""

    _fields_ = [("kind", ctypes.c_int), ("number", ctypes.c_int)]

    @classmethod
    def of(cls, place: int) -> Location:
        return cls(2, 0) if place == HOST else cls(1, place)


class MemoryCalls:
    """Driver calls bound once. Addresses are plain integers, sizes bytes, streams torch's
    `cuda_stream` integers."""

    def __init__(self, of: Driver) -> None:
        self.driver = of
        u64, size, c_int, handle = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self._check, bind = of.check, of.bind
        self._register = bind("cuMemHostRegister_v2", u64, size, ctypes.c_uint)
        self._unregister = bind("cuMemHostUnregister", u64)
        self._alloc_host = bind("cuMemHostAlloc", ctypes.POINTER(u64), size, ctypes.c_uint)
        self._free_host = bind("cuMemFreeHost", u64)
        self._copy_in = bind("cuMemcpyHtoDAsync_v2", u64, u64, size, handle)
        self._alloc_managed = bind("cuMemAllocManaged", ctypes.POINTER(u64), size, ctypes.c_uint)
        self._free = bind("cuMemFree_v2", u64)
        self.newer_signatures = of.has("cuMemPrefetchAsync_v2") and of.has("cuMemAdvise_v2")
        if self.newer_signatures:
            self._prefetch = bind("cuMemPrefetchAsync_v2", u64, size, Location, ctypes.c_uint, handle)
            self._advise = bind("cuMemAdvise_v2", u64, size, c_int, Location)
        else:
            self._prefetch = bind("cuMemPrefetchAsync", u64, size, c_int, handle)
            self._advise = bind("cuMemAdvise", u64, size, c_int, c_int)

    # --------------------------------------------------------------------------------------------------------- host

    def register(self, address: int, nbytes: int, read_only: bool = True) -> None:
        """Pin these whole pages, so that the device may read them by itself."""
        status = self._register(address, nbytes, PORTABLE | (READ_ONLY if read_only else 0))
        self._check(status, "cuMemHostRegister", f"{nbytes} bytes of a file's pages")

    def unregister(self, address: int) -> None:
        self._check(self._unregister(address), "cuMemHostUnregister", "a file's pages")

    def alloc_host(self, nbytes: int) -> int:
        """Allocate pinned memory of that size; return its address."""
        address = ctypes.c_uint64()
        status = self._alloc_host(ctypes.byref(address), nbytes, PORTABLE)
        self._check(status, "cuMemHostAlloc", f"{nbytes} bytes of pinned RAM")
        return address.value

    def free_host(self, address: int) -> None:
        self._check(self._free_host(address), "cuMemFreeHost", "pinned RAM")

    def copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from host to device, in the stream's order. The host does not wait if its pages are
        pinned."""
        self._check(self._copy_in(target, source, nbytes, stream), "cuMemcpyHtoDAsync", f"{nbytes} bytes of weights")

    def copy_all(self, room: int, pieces: Iterable[tuple[int, int, int]], stream: int) -> None:
        """`copy_in` for each (place in the room, source, bytes). A layer has dozens while another
        thread wants to run, so the loop does nothing but ask for the next."""
        copy = self._copy_in
        for at, source, nbytes in pieces:
            status = copy(room + at, source, nbytes, stream)
            if status:
                self._check(status, "cuMemcpyHtoDAsync", f"{nbytes} bytes of weights")

    # ------------------------------------------------------------------------------------------------------ managed

    def alloc_managed(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        status = self._alloc_managed(ctypes.byref(address), nbytes, ATTACH_GLOBAL)
        self._check(status, "cuMemAllocManaged", f"{nbytes} bytes of managed memory")
        return address.value

    def free(self, address: int) -> None:
        self._check(self._free(address), "cuMemFree", "managed memory")

    def prefetch(self, address: int, nbytes: int, place: int, stream: int) -> None:
        """Bring pages to a device, or with HOST to the host, in the stream's order."""
        if self.newer_signatures:
            status = self._prefetch(address, nbytes, Location.of(place), 0, stream)
        else:
            status = self._prefetch(address, nbytes, place, stream)
        self._check(status, "cuMemPrefetchAsync", f"{nbytes} bytes of weights")

    def advise(self, address: int, nbytes: int, advice: int, place: int) -> None:
        where = Location.of(place) if self.newer_signatures else place
        self._check(self._advise(address, nbytes, advice, where), "cuMemAdvise", f"{nbytes} bytes of weights")

    def last_prefetch(self, address: int, nbytes: int) -> int:
        """The place where all these pages were last asked to be: a device's ordinal, HOST, or
        another negative number if mixed."""
        value = ctypes.c_int()
        status = self.driver.library.cuMemRangeGetAttribute(
            ctypes.byref(value),
            ctypes.c_size_t(4),
            LAST_PREFETCH_LOCATION,
            ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
        )
        self._check(status, "cuMemRangeGetAttribute", f"{nbytes} bytes of weights")
        return value.value


@lru_cache(maxsize=1)
def memory_calls() -> MemoryCalls:
    """This machine's calls. Raises NoDriver, saying what is missing."""
    return MemoryCalls(driver())
