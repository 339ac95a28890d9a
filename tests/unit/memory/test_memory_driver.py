"""The driver bindings, over a library that writes down what it is called with."""

from __future__ import annotations

import ctypes

import pytest

from fusestream.gpu import Driver, cuda, driver
from fusestream.memory import (
    CudaError,
    NoDriver,
    NoManagedMemory,
    driver_calls,
)
from fusestream.memory.backends import cuda_managed
from fusestream.memory.driver_calls import HOST, SET_READ_MOSTLY, Location, MemoryCalls

STREAM = 77


class Function:
    """One exported call: takes whatever ctypes would, and remembers it."""

    def __init__(self, library: Library, name: str) -> None:
        self.library, self.name = library, name

    def __call__(self, *arguments):
        self.library.calls.append((self.name, arguments))
        return self.library.answer(self.name, arguments)


class Library:
    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        self.missing = missing
        self.calls: list[tuple[str, tuple]] = []
        self.failing: dict[str, int] = {}

    def __getattr__(self, name):
        if not name.startswith("cu") or name in self.missing:
            raise AttributeError(f"symbol {name} not found")
        self.__dict__[name] = function = Function(self, name)
        return function

    def answer(self, name, arguments):
        first = getattr(arguments[0], "_obj", None) if arguments else None
        if name in ("cuMemHostAlloc", "cuMemAllocManaged"):
            first.value = 0x200000
        elif name in ("cuDeviceGetAttribute", "cuMemRangeGetAttribute"):
            first.value = 1
        elif name == "cuMemGetInfo_v2":
            first.value = 5 << 30
        elif name in ("cuDevicePrimaryCtxRetain", "cuCtxGetCurrent"):
            first.value = 0x1234
        elif name in ("cuGetErrorName", "cuGetErrorString"):
            arguments[1]._obj.value = b"NOT_SUPPORTED" if name.endswith("Name") else b"operation not supported"
        return self.failing.get(name, 0)

    def last(self, name):
        return next(arguments for called, arguments in reversed(self.calls) if called == name)


def test_the_newer_signatures_are_used_where_the_driver_has_them():
    library = Library()
    calls = MemoryCalls(Driver(library))
    assert calls.newer_signatures
    calls.prefetch(0x200000, 4096, 3, STREAM)
    address, nbytes, where, flags, stream = library.last("cuMemPrefetchAsync_v2")
    assert (address, nbytes, where.kind, where.number, flags, stream) == (0x200000, 4096, 1, 3, 0, STREAM)
    calls.advise(0x200000, 4096, SET_READ_MOSTLY, HOST)
    *_, advice, where = library.last("cuMemAdvise_v2")
    assert (advice, where.kind, where.number) == (SET_READ_MOSTLY, 2, 0)
    assert ctypes.sizeof(Location) == 8
    assert library.cuMemPrefetchAsync_v2.argtypes[2] is Location, "by value"


def test_the_older_signatures_are_used_elsewhere():
    library = Library(missing=("cuMemPrefetchAsync_v2", "cuMemAdvise_v2"))
    calls = MemoryCalls(Driver(library))
    assert not calls.newer_signatures
    calls.prefetch(0x200000, 4096, HOST, STREAM)
    assert library.last("cuMemPrefetchAsync") == (0x200000, 4096, -1, STREAM)
    calls.advise(0x200000, 4096, SET_READ_MOSTLY, 2)
    assert library.last("cuMemAdvise") == (0x200000, 4096, SET_READ_MOSTLY, 2)


def test_each_call_reaches_the_driver():
    library = Library()
    calls = MemoryCalls(Driver(library))
    assert calls.alloc_host(4096) == calls.alloc_managed(4096) == 0x200000
    assert (
        calls.driver.free_memory() == 5 << 30
        and calls.driver.attribute(0, 113) == 1
        and calls.last_prefetch(0, 4096) == 1
    )
    calls.free_host(1)
    calls.free(2)
    calls.copy_in(1, 2, 3, STREAM)
    assert library.last("cuMemcpyHtoDAsync_v2") == (1, 2, 3, STREAM)
    calls.register(4096, 8192)
    assert library.last("cuMemHostRegister_v2") == (4096, 8192, driver_calls.PORTABLE | driver_calls.READ_ONLY)
    calls.register(4096, 8192, read_only=False)
    assert library.last("cuMemHostRegister_v2")[2] == driver_calls.PORTABLE
    calls.unregister(4096)
    for _ in range(2):
        calls.driver.enter(0)
    assert [name for name, _ in library.calls].count("cuDevicePrimaryCtxRetain") == 1, "held once"
    assert library.last("cuCtxSetCurrent")[0].value == 0x1234


def test_a_refusal_names_the_call_and_the_drivers_words():
    library = Library()
    calls = MemoryCalls(Driver(library))
    library.failing["cuMemHostRegister_v2"] = 801
    with pytest.raises(CudaError, match=r"cuMemHostRegister failed with NOT_SUPPORTED \(801\): operation not") as info:
        calls.register(4096, 8192)
    assert info.value.status == 801


def test_what_is_missing_is_said(monkeypatch):
    with pytest.raises(NoDriver, match="no NVIDIA driver: "):
        cuda.open_library(("libno-such-driver.so",))
    assert cuda.library_names("win32") == ("nvcuda.dll",) and cuda.library_names("linux")[0] == "libcuda.so.1"
    asleep = Library()
    asleep.failing["cuInit"] = 999
    for library, words in ((Library(missing=("cuMemHostUnregister",)), "older than 525"), (asleep, "not start")):
        monkeypatch.setattr(cuda, "open_library", lambda names, library=library: library)
        driver.cache_clear()
        driver_calls.memory_calls.cache_clear()
        with pytest.raises(NoDriver, match=words):
            driver_calls.memory_calls()
    monkeypatch.setattr(cuda, "open_library", lambda names: Library())
    driver.cache_clear()
    assert driver() is driver() and driver_calls.memory_calls().driver is driver()
    driver.cache_clear()
    driver_calls.memory_calls.cache_clear()


class Gpu:
    """As much of a CudaDevice as its managed memory looks at."""

    name, index, is_managed_capable = "cuda:0", 0, True

    def __init__(self, calls) -> None:
        self.calls, self.driver = calls, calls.driver
        self.stream = type("Stream", (), {"cuda_stream": STREAM})()

    def enter_thread(self) -> None: ...


def test_managed_memory_in_the_drivers_words():
    library = Library()
    gpu = Gpu(MemoryCalls(Driver(library)))
    memory = cuda_managed.CudaManagedMemory(gpu)
    address = memory.allocate(4096)
    *_, advice, home = library.last("cuMemAdvise_v2")
    assert advice == driver_calls.SET_PREFERRED_LOCATION and home.kind == 2, "at home in RAM"
    memory.filled(address, 4096)
    memory.bring(address, 4096)
    assert library.last("cuMemPrefetchAsync_v2")[4] == STREAM
    library.calls.clear()
    memory.evict(address, 4096)
    advices = [arguments[2] for name, arguments in library.calls if name == "cuMemAdvise_v2"]
    assert advices == [driver_calls.UNSET_READ_MOSTLY, driver_calls.SET_READ_MOSTLY], "no copy back"
    assert memory.free_bytes() == 5 << 30
    memory.free(address)
    assert library.last("cuMemFree_v2") == (address,)


def test_a_pool_outlives_the_tensors_over_it():
    library = Library()
    memory = cuda_managed.CudaManagedMemory(Gpu(MemoryCalls(Driver(library))))
    address = memory.allocate(4096)
    holder = cuda_managed.Holder(address, 4096)
    memory._holder = cuda_managed.weakref.ref(holder)
    memory.free(address)
    assert "cuMemFree_v2" not in [name for name, _ in library.calls]
    del holder
    assert library.last("cuMemFree_v2") == (address,)


def test_managed_memory_is_refused_where_the_system_does_not_page_it():
    gpu = Gpu(MemoryCalls(Driver(Library())))
    gpu.is_managed_capable = False
    with pytest.raises(NoManagedMemory, match=r"concurrentManagedAccess.*Use the slots backend"):
        cuda_managed.CudaManagedMemory(gpu)


def test_a_ranges_place_is_asked_for_as_one_number_of_four_bytes():
    library = Library()
    MemoryCalls(Driver(library)).last_prefetch(0x200000, 4096)
    value, size, attribute, address, nbytes = library.last("cuMemRangeGetAttribute")
    assert (size.value, ctypes.sizeof(value._obj)) == (4, 4)
    assert (attribute, address.value, nbytes.value) == (driver_calls.LAST_PREFETCH_LOCATION, 0x200000, 4096)
