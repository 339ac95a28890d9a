"""Files that are read, changed and kept from others by means that every system has.

Windows writes a mapped file anew for nobody, and has no mode that keeps a file's owner out.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file's tensors, in memory of their own: those of `load_file` are the mapped file's."""
    return load(path.read_bytes())


def write_over(path: Path, content: bytes) -> None:
    """Give a file, which may be mapped, another content of its size."""
    assert len(content) == path.stat().st_size
    with path.open("r+b") as file:
        file.write(content)


@contextmanager
def kept_from_others(path: Path) -> Iterator[None]:
    """Nobody can open the file meanwhile. Root can, on POSIX."""
    if sys.platform == "win32":
        handle = opened_alone(path)
        yield
        os.close(handle)
    else:
        mode = path.stat().st_mode
        path.chmod(0)
        yield
        path.chmod(mode)


def is_open(path: Path) -> bool:
    """Whether this process has the file open; on Windows, whether any has."""
    if sys.platform != "win32":
        return any(handle.exists() and handle.samefile(path) for handle in Path("/proc/self/fd").iterdir())
    try:
        os.close(opened_alone(path))
    except PermissionError:
        return True
    return False


def opened_alone(path: Path) -> int:
    """On Windows, a descriptor of the file, which lets nobody else have it. Raises PermissionError if somebody has it."""
    import msvcrt

    read, existing, normal, word, pointer = 0x80000000, 3, 0x80, ctypes.c_ulong, ctypes.c_void_p
    create = ctypes.WinDLL("kernel32").CreateFileW
    create.argtypes, create.restype = [ctypes.c_wchar_p, word, word, pointer, word, word, pointer], pointer
    handle = create(str(path), read, 0, None, existing, normal, None)
    if handle == pointer(-1).value:
        raise PermissionError(path)
    return msvcrt.open_osfhandle(handle, os.O_RDONLY)
