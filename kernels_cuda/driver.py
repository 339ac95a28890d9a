"""The CUDA driver, called directly.

Prebuilt machine code must run under any torch, Python and operating system, so nothing here is compiled against them:
the driver library comes with the graphics driver and its C interface does not change. Every call goes through `check`,
which turns a status into an exception that names the call, what it was for, and the driver's own words.

Nothing is loaded at import. `driver()` loads once and raises CodeUnavailable, saying what is missing.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

from .errors import CodeUnavailable, KernelError

SUCCESS = 0
ERROR_INVALID_CONTEXT = 201
ERROR_NOT_FOUND = 500

# CUfunction_attribute
SHARED_BYTES = 1
LOCAL_BYTES = 3
REGISTERS = 4
MAX_DYNAMIC_SHARED_BYTES = 8

# CUdevice_attribute
MULTIPROCESSORS = 16
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76

# CUjit_option
JIT_ERROR_LOG = 5
JIT_ERROR_LOG_BYTES = 6


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: one pointer instead of eight arguments, which ctypes would convert one by one."""

    _fields_ = [
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


def library_names(platform: str = sys.platform) -> tuple[str, ...]:
    if platform == "win32":
        return ("nvcuda.dll",)
    return ("libcuda.so.1", "libcuda.so")


class Driver:
    """The loaded library. Methods are the few calls the launcher needs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.launch_kernel = library.cuLaunchKernelEx  # since CUDA 11.8; the drivers we support start at 525 (12.0)
        self.check(library.cuInit(0), "cuInit", "start")
        version = ctypes.c_int()
        self.check(library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion", "start")
        self.version = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def error_text(self, status: int) -> str:
        name, words = ctypes.c_char_p(), ctypes.c_char_p()
        self.library.cuGetErrorName(status, ctypes.byref(name))
        self.library.cuGetErrorString(status, ctypes.byref(words))
        return f"{(name.value or b'unknown error').decode()} ({status}): {(words.value or b'').decode()}"

    def check(self, status: int, call: str, what: str, detail: str = "") -> None:
        """The one place where a driver status becomes an exception."""
        if status != SUCCESS:
            text = f"{what}: {call} failed with {self.error_text(status)}"
            raise KernelError(f"{text}\n{detail}" if detail else text)

    def context(self, device: int) -> ctypes.c_void_p:
        """The device's primary context, the one torch uses."""
        context = ctypes.c_void_p()
        what = f"device {device}"
        self.check(
            self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.device(device)),
            "cuDevicePrimaryCtxRetain",
            what,
        )
        return context

    def device(self, ordinal: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self.check(self.library.cuDeviceGet(ctypes.byref(handle), ordinal), "cuDeviceGet", f"device {ordinal}")
        return handle

    def attribute(self, device: int, which: int) -> int:
        value = ctypes.c_int()
        self.check(
            self.library.cuDeviceGetAttribute(ctypes.byref(value), which, self.device(device)),
            "cuDeviceGetAttribute",
            f"device {device}",
        )
        return value.value

    def capability(self, device: int) -> tuple[int, int]:
        return self.attribute(device, CAPABILITY_MAJOR), self.attribute(device, CAPABILITY_MINOR)

    def use(self, context: ctypes.c_void_p) -> None:
        """Make a context current on this thread."""
        self.check(self.library.cuCtxSetCurrent(context), "cuCtxSetCurrent", "context")

    def load_module(self, code: bytes, what: str) -> ctypes.c_void_p:
        """Load a cubin, or have the driver compile PTX; its complaints become part of the exception."""
        module = ctypes.c_void_p()
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), ctypes.c_void_p(len(log)))
        status = self.library.cuModuleLoadDataEx(ctypes.byref(module), ctypes.c_char_p(code), 2, options, values)
        self.check(status, "cuModuleLoadDataEx", what, log.value.decode(errors="replace"))
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.check(
            self.library.cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), "cuModuleGetFunction", name
        )
        return handle

    def global_ints(self, module: ctypes.c_void_p, name: str) -> tuple[int, ...]:
        """The values of an `int` array that the module defines, or nothing where it defines none of this name."""
        where, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self.library.cuModuleGetGlobal_v2(ctypes.byref(where), ctypes.byref(size), module, name.encode())
        if status == ERROR_NOT_FOUND:
            return ()
        self.check(status, "cuModuleGetGlobal", name)
        values = (ctypes.c_int * (size.value // ctypes.sizeof(ctypes.c_int)))()
        self.check(self.library.cuMemcpyDtoH_v2(values, where, size), "cuMemcpyDtoH", name)
        return tuple(values)

    def function_attribute(self, function: ctypes.c_void_p, which: int, name: str) -> int:
        value = ctypes.c_int()
        self.check(self.library.cuFuncGetAttribute(ctypes.byref(value), which, function), "cuFuncGetAttribute", name)
        return value.value

    def allow_shared_bytes(self, function: ctypes.c_void_p, size: int, name: str) -> None:
        """Opt in to more than 48 KB of dynamic shared memory."""
        self.check(
            self.library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, size), "cuFuncSetAttribute", name
        )

    def resident_blocks(self, function: ctypes.c_void_p, threads: int, shared_bytes: int, name: str) -> int:
        """Blocks of this shape that fit on one multiprocessor at a time."""
        count = ctypes.c_int()
        self.check(
            self.library.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), function, threads, ctypes.c_size_t(shared_bytes)
            ),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            name,
        )
        return count.value


def open_library(names: tuple[str, ...]) -> ctypes.CDLL:
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:  # noqa: PERF203
            reasons.append(str(error))
    raise CodeUnavailable(f"no NVIDIA driver: {'; '.join(reasons)}")


@lru_cache(maxsize=1)
def driver() -> Driver:
    library = open_library(library_names())
    try:
        return Driver(library)
    except AttributeError as error:
        raise CodeUnavailable(f"the NVIDIA driver is older than 525 ({error})") from error
    except KernelError as error:
        raise CodeUnavailable(f"the NVIDIA driver does not start: {error}") from error
