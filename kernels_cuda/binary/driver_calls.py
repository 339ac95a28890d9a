"""Driver calls that load machine code and launch it. A refusal is a KernelError."""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial

from ...gpu import Driver, driver
from ..errors import KernelError

ERROR_INVALID_CONTEXT = 201
ERROR_NOT_FOUND = 500

# CUfunction_attribute
LOCAL_BYTES = 3
REGISTERS = 4
MAX_DYNAMIC_SHARED_BYTES = 8

# CUjit_option
JIT_ERROR_LOG = 5
JIT_ERROR_LOG_BYTES = 6


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: one pointer instead of eight arguments, which ctypes would convert one by
    one."""

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


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an attribute's id, and a union of 64 bytes whose first integer these
    attributes use."""

    _fields_ = [
        ("which", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    ]


# CUlaunchAttributeID: the launch need not wait for the end of the one before it in its stream. The
# earlier kernel says when this one may begin, and this one waits where it must. Needs compute
# capability 9.0 or newer.
PROGRAMMATIC_SERIALIZATION = 6


class KernelCalls:
    """The few calls that the launcher needs."""

    def __init__(self, of: Driver) -> None:
        self.driver = of
        self._library = of.library
        self.check = partial(of.check, error=KernelError)
        self.launch_kernel = of.bind("cuLaunchKernelEx")  # since CUDA 11.8

    def load_module(self, code: bytes, what: str) -> ctypes.c_void_p:
        """Load a cubin, or have the driver compile PTX. The driver's complaints become part of the
        exception."""
        module = ctypes.c_void_p()
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), ctypes.c_void_p(len(log)))
        status = self._library.cuModuleLoadDataEx(ctypes.byref(module), ctypes.c_char_p(code), 2, options, values)
        self.check(status, "cuModuleLoadDataEx", what, log.value.decode(errors="replace"))
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.check(
            self._library.cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), "cuModuleGetFunction", name
        )
        return handle

    def global_ints(self, module: ctypes.c_void_p, name: str) -> tuple[int, ...]:
        """The values of an `int` array that the module defines; empty if it defines none of this
        name."""
        where, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._library.cuModuleGetGlobal_v2(ctypes.byref(where), ctypes.byref(size), module, name.encode())
        if status == ERROR_NOT_FOUND:
            return ()
        self.check(status, "cuModuleGetGlobal", name)
        values = (ctypes.c_int * (size.value // ctypes.sizeof(ctypes.c_int)))()
        self.check(self._library.cuMemcpyDtoH_v2(values, where, size), "cuMemcpyDtoH", name)
        return tuple(values)

    def function_attribute(self, function: ctypes.c_void_p, which: int, name: str) -> int:
        value = ctypes.c_int()
        self.check(self._library.cuFuncGetAttribute(ctypes.byref(value), which, function), "cuFuncGetAttribute", name)
        return value.value

    def allow_shared_bytes(self, function: ctypes.c_void_p, size: int, name: str) -> None:
        """Opt in to more than 48 KB of dynamic shared memory."""
        self.check(
            self._library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, size), "cuFuncSetAttribute", name
        )

    def resident_blocks(self, function: ctypes.c_void_p, threads: int, shared_bytes: int, name: str) -> int:
        """Blocks of this shape that fit on one multiprocessor at a time."""
        count = ctypes.c_int()
        self.check(
            self._library.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), function, threads, ctypes.c_size_t(shared_bytes)
            ),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            name,
        )
        return count.value


@lru_cache(maxsize=1)
def kernel_calls() -> KernelCalls:
    """This machine's calls. Raises NoDriver, saying what is missing."""
    return KernelCalls(driver())
