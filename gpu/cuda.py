"""The CUDA driver, called directly.

The library comes with the graphics driver and its C interface does not change, so nothing here
depends on torch's CUDA version, on Python or on the operating system. Every status goes through
`check`, which turns an error into an exception that names the call, its purpose, and the driver's
own words.

Nothing is loaded at import. `driver()` loads once, and raises NoDriver, saying what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

SUCCESS = 0
OLDEST = 525  # the first driver with CUDA 12, whose calls are used

# CUdevice_attribute
CLOCK_KHZ = 13
MULTIPROCESSORS = 16
MEMORY_CLOCK_KHZ = 36
MEMORY_BUS_BITS = 37
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76
CONCURRENT_MANAGED_ACCESS = 89
READ_ONLY_REGISTER = 113


class CudaError(RuntimeError):
    """The driver refused a call. The message names the call, its purpose, and the driver's own
    words."""

    __module__ = "fusestream"  # shown by ComfyUI before the message

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoDriver(RuntimeError):
    """This machine has no NVIDIA driver, or one that is too old."""

    __module__ = "fusestream"


class Driver:
    """The loaded library. Devices are named by their ordinals."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.check(library.cuInit(0), "cuInit", "start")
        version = ctypes.c_int()
        self.check(library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion", "start")
        self.version = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def is_at_least(self, major: int, minor: int) -> bool:
        """Whether the driver is of this CUDA version or newer."""
        have = self.version.split(".")
        return (int(have[0]), int(have[1])) >= (major, minor)

    def bind(self, name: str, *arguments: Any) -> Any:
        """A driver function, with these argument types if any are given. Raises NoDriver if the
        library lacks it."""
        try:
            function = getattr(self.library, name)
        except AttributeError as error:
            raise NoDriver(f"the NVIDIA driver is older than {OLDEST} ({error}); install a newer one") from error
        if arguments:
            function.argtypes = arguments
        function.restype = ctypes.c_int
        return function

    def has(self, name: str) -> bool:
        try:
            getattr(self.library, name)
        except AttributeError:
            return False
        return True

    def check(self, status: int, call: str, what: str, detail: str = "", error: type[CudaError] = CudaError) -> None:
        """Turn a driver status into an exception. No other place does that."""
        if status != SUCCESS:
            name, words = ctypes.c_char_p(), ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(name))
            self.library.cuGetErrorString(status, ctypes.byref(words))
            text = f"{(name.value or b'unknown error').decode()} ({status}): {(words.value or b'').decode()}"
            message = f"{what}: {call} failed with {text}"
            raise error(f"{message}\n{detail}" if detail else message, status)

    def device(self, ordinal: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self.check(self.library.cuDeviceGet(ctypes.byref(handle), ordinal), "cuDeviceGet", f"device {ordinal}")
        return handle

    def attribute(self, device: int, which: int) -> int:
        value = ctypes.c_int()
        status = self.library.cuDeviceGetAttribute(ctypes.byref(value), which, self.device(device))
        self.check(status, "cuDeviceGetAttribute", f"device {device}")
        return value.value

    def capability(self, device: int) -> tuple[int, int]:
        return self.attribute(device, CAPABILITY_MAJOR), self.attribute(device, CAPABILITY_MINOR)

    def enter(self, device: int) -> None:
        """Make the device's primary context, which torch uses too, current on this thread. It is
        held from the first call on."""
        context = self._contexts.get(device)
        if context is None:
            context, what = ctypes.c_void_p(), f"device {device}"
            status = self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.device(device))
            self.check(status, "cuDevicePrimaryCtxRetain", what)
            self._contexts[device] = context
        self.check(self.library.cuCtxSetCurrent(context), "cuCtxSetCurrent", f"device {device}")

    @contextlib.contextmanager
    def lent(self, device: int) -> Iterator[None]:
        """For this time a thread without a context has the device's; any other keeps its own, for
        calls that every context serves."""
        current = ctypes.c_void_p()
        self.check(self.library.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent", f"device {device}")
        if current.value:
            yield
            return
        self.enter(device)
        try:
            yield
        finally:
            self.check(self.library.cuCtxSetCurrent(None), "cuCtxSetCurrent", f"device {device}")

    def free_memory(self) -> int:
        """Free bytes of the current device, by the driver's own count."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(self.library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo", "free memory")
        return free.value


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
    except CudaError as error:
        raise NoDriver(f"the NVIDIA driver does not start: {error}") from error
