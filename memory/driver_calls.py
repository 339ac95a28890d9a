"""The calls of the CUDA driver that memory needs and torch does not offer.

The driver library comes with the graphics driver and its C interface does not change, so nothing here depends on the CUDA
that torch was built for. Two calls have a newer form with another signature, `cuMemPrefetchAsync` and `cuMemAdvise`: a
driver from 12.2 on exports both forms, under CUDA 13 only the newer is documented. The newer one is bound where the
library has it.

Nothing is loaded at import. `driver()` loads once and raises NoDriver, saying what is missing.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any

SUCCESS = 0
OUT_OF_MEMORY = 2

# CUdevice_attribute
CONCURRENT_MANAGED_ACCESS = 89
READ_ONLY_REGISTER = 113

# cuMemHostRegister, cuMemHostAlloc
PORTABLE = 0x01
READ_ONLY = 0x08

ATTACH_GLOBAL = 1  # of cuMemAllocManaged

# CUmem_advise
SET_READ_MOSTLY = 1
UNSET_READ_MOSTLY = 2
SET_PREFERRED_LOCATION = 3

HOST = -1  # CU_DEVICE_CPU: where a device ordinal is asked for, the host's memory

# CUmem_range_attribute
LAST_PREFETCH_LOCATION = 4


class CudaError(RuntimeError):
    """The driver refused a call: the message names the call, what it was for, and the driver's own words."""

    __module__ = "fusestream"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoDriver(RuntimeError):
    """There is no NVIDIA driver here, or one that is too old."""

    __module__ = "fusestream"


class Location(ctypes.Structure):
    """CUmemLocation: a device by its ordinal, or the host."""

    _fields_ = [("kind", ctypes.c_int), ("number", ctypes.c_int)]

    @classmethod
    def of(cls, place: int) -> Location:
        return cls(2, 0) if place == HOST else cls(1, place)


class Driver:
    """The loaded library. Addresses are plain integers, sizes bytes, streams torch's `cuda_stream` integers."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        u64, size, c_int, handle = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p

        def bind(name: str, *arguments: Any) -> Any:
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = c_int
            return function

        def has(name: str) -> bool:
            try:
                getattr(library, name)
            except AttributeError:
                return False
            return True

        self._register = bind("cuMemHostRegister_v2", u64, size, ctypes.c_uint)
        self._unregister = bind("cuMemHostUnregister", u64)
        self._alloc_host = bind("cuMemHostAlloc", ctypes.POINTER(u64), size, ctypes.c_uint)
        self._free_host = bind("cuMemFreeHost", u64)
        self._copy_in = bind("cuMemcpyHtoDAsync_v2", u64, u64, size, handle)
        self._alloc_managed = bind("cuMemAllocManaged", ctypes.POINTER(u64), size, ctypes.c_uint)
        self._free = bind("cuMemFree_v2", u64)
        self.newer_signatures = has("cuMemPrefetchAsync_v2") and has("cuMemAdvise_v2")
        if self.newer_signatures:
            self._prefetch = bind("cuMemPrefetchAsync_v2", u64, size, Location, ctypes.c_uint, handle)
            self._advise = bind("cuMemAdvise_v2", u64, size, c_int, Location)
        else:
            self._prefetch = bind("cuMemPrefetchAsync", u64, size, c_int, handle)
            self._advise = bind("cuMemAdvise", u64, size, c_int, c_int)
        self.check(library.cuInit(0), "cuInit", "start")

    def check(self, status: int, call: str, what: str) -> None:
        """The one place where a driver status becomes an exception."""
        if status != SUCCESS:
            name, words = ctypes.c_char_p(), ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(name))
            self.library.cuGetErrorString(status, ctypes.byref(words))
            text = f"{(name.value or b'unknown error').decode()} ({status}): {(words.value or b'').decode()}"
            raise CudaError(f"{what}: {call} failed with {text}", status)

    # ------------------------------------------------------------------------------------------------------- device

    def enter(self, device: int) -> None:
        """Make the device's primary context, the one torch uses, current on this thread."""
        context = self._contexts.get(device)
        if context is None:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            what = f"device {device}"
            self.check(self.library.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet", what)
            status = self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
            self.check(status, "cuDevicePrimaryCtxRetain", what)
            self._contexts[device] = context
        self.check(self.library.cuCtxSetCurrent(context), "cuCtxSetCurrent", f"device {device}")

    def attribute(self, device: int, which: int) -> int:
        value, handle = ctypes.c_int(), ctypes.c_int()
        self.check(self.library.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet", f"device {device}")
        status = self.library.cuDeviceGetAttribute(ctypes.byref(value), which, handle)
        self.check(status, "cuDeviceGetAttribute", f"device {device}")
        return value.value

    def free_memory(self) -> int:
        """Bytes that the current device has free, by the driver's own count."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(self.library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo", "free memory")
        return free.value

    # --------------------------------------------------------------------------------------------------------- host

    def register(self, address: int, nbytes: int, read_only: bool = True) -> None:
        """Pin these pages, which are whole ones, so that the device may read them by itself."""
        status = self._register(address, nbytes, PORTABLE | (READ_ONLY if read_only else 0))
        self.check(status, "cuMemHostRegister", f"{nbytes} bytes of a file's pages")

    def unregister(self, address: int) -> None:
        self.check(self._unregister(address), "cuMemHostUnregister", "a file's pages")

    def alloc_host(self, nbytes: int) -> int:
        """Pinned memory of that size; its address."""
        address = ctypes.c_uint64()
        status = self._alloc_host(ctypes.byref(address), nbytes, PORTABLE)
        self.check(status, "cuMemHostAlloc", f"{nbytes} bytes of pinned RAM")
        return address.value

    def free_host(self, address: int) -> None:
        self.check(self._free_host(address), "cuMemFreeHost", "pinned RAM")

    def copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Host to device, in the stream's order; the host does not wait if its pages are pinned."""
        self.check(self._copy_in(target, source, nbytes, stream), "cuMemcpyHtoDAsync", f"{nbytes} bytes of weights")

    # ------------------------------------------------------------------------------------------------------ managed

    def alloc_managed(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        status = self._alloc_managed(ctypes.byref(address), nbytes, ATTACH_GLOBAL)
        self.check(status, "cuMemAllocManaged", f"{nbytes} bytes of managed memory")
        return address.value

    def free(self, address: int) -> None:
        self.check(self._free(address), "cuMemFree", "managed memory")

    def prefetch(self, address: int, nbytes: int, place: int, stream: int) -> None:
        """Bring pages to a device, or with HOST to the host, in the stream's order."""
        if self.newer_signatures:
            status = self._prefetch(address, nbytes, Location.of(place), 0, stream)
        else:
            status = self._prefetch(address, nbytes, place, stream)
        self.check(status, "cuMemPrefetchAsync", f"{nbytes} bytes of weights")

    def advise(self, address: int, nbytes: int, advice: int, place: int) -> None:
        where = Location.of(place) if self.newer_signatures else place
        self.check(self._advise(address, nbytes, advice, where), "cuMemAdvise", f"{nbytes} bytes of weights")

    def last_prefetch(self, address: int, nbytes: int) -> int:
        """Where all these pages were last asked to be: a device's ordinal, HOST, or another negative number: mixed."""
        value = ctypes.c_int()
        status = self.library.cuMemRangeGetAttribute(
            ctypes.byref(value),
            ctypes.c_size_t(4),
            LAST_PREFETCH_LOCATION,
            ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
        )
        self.check(status, "cuMemRangeGetAttribute", f"{nbytes} bytes of weights")
        return value.value


def library_names(platform: str = sys.platform) -> tuple[str, ...]:
    return ("nvcuda.dll",) if platform == "win32" else ("libcuda.so.1", "libcuda.so")


def open_library(names: tuple[str, ...]) -> ctypes.CDLL:
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:  # noqa: PERF203
            reasons.append(str(error))
    raise NoDriver(f"no NVIDIA driver: {'; '.join(reasons)}")


@lru_cache(maxsize=1)
def driver() -> Driver:
    library = open_library(library_names())
    try:
        return Driver(library)
    except AttributeError as error:
        raise NoDriver(f"the NVIDIA driver is older than 525 ({error}); install a newer one") from error
    except CudaError as error:
        raise NoDriver(f"the NVIDIA driver does not start: {error}") from error
