"""The stand-in for NVIDIA's driver, built and loaded. `driver.c` says what it does and how it is told to fail."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

from fusestream.gpu import Driver

SOURCE = Path(__file__).with_name("driver.c")
SETTINGS = "FUSESTREAM_STAND_IN"
# Where the Windows bed has built it, because Windows' Python has no compiler there.
BUILT = "FUSESTREAM_STAND_IN_DLLS"
OPTIONS = (
    "-O1",
    "-g",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
)


@lru_cache
def library(*, older: bool = False) -> Path:
    """The file of the library; where none can be built, the test is skipped. older: one that lacks what drivers before 12.2
    lack."""
    if sys.platform == "win32":
        folder = os.environ.get(BUILT)
        if folder is None:
            pytest.skip(f"{BUILT} names no folder with the stand-in driver")
        # Not the driver's own name: Windows takes what is loaded under a name for whatever is asked for by it.
        return Path(folder, "older_driver.dll" if older else "driver.dll")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("the stand-in driver needs a C compiler")
    folder = tempfile.mkdtemp(prefix="fusestream-driver-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    out = Path(folder, "libcuda.so")
    subprocess.run([compiler, *OPTIONS, *(["-DOLDER"] if older else []), str(SOURCE), "-o", str(out)], check=True)
    return out


def loaded(settings: str = "", *, older: bool = False) -> Driver:
    """The driver as these settings make it, anew."""
    before = os.environ.get(SETTINGS)
    os.environ[SETTINGS] = settings
    try:
        return Driver(ctypes.CDLL(str(library(older=older))))
    finally:
        os.environ.pop(SETTINGS) if before is None else os.environ.update({SETTINGS: before})


def count(driver: Driver, what: str) -> int:
    """`pageable`, `violations`, `launches`, `locked` bytes or `ranges` of memory."""
    function = driver.library.standInCount
    function.restype = ctypes.c_int64
    found: int = function(what.encode())
    return found
