"""Opens a file for reading and lets others rename, delete or replace it meanwhile.

On POSIX every handle does. On Windows a handle says what others may do with the file as long as it
is open, and Python's own forbids deleting and renaming: a model's file could then not be moved away
until its memory is freed.
"""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    _GENERIC_READ = 0x80000000
    _SHARE_ALL = 1 | 2 | 4  # FILE_SHARE_READ, FILE_SHARE_WRITE, FILE_SHARE_DELETE
    _OPEN_EXISTING = 3
    _NORMAL = 0x80  # FILE_ATTRIBUTE_NORMAL
    _INVALID = wintypes.HANDLE(-1).value

    _kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    _create_file = _kernel32.CreateFileW
    _create_file.restype = wintypes.HANDLE
    _create_file.argtypes = [
        wintypes.LPCWSTR, wintypes.DWORD, wintypes.DWORD, wintypes.LPVOID, wintypes.DWORD, wintypes.DWORD,
        wintypes.HANDLE,
    ]  # fmt: skip

    def shared(path: str | os.PathLike[str], _flags: int, attributes: int = _NORMAL) -> int:
        """An `opener` of mode `rb`: a descriptor of the file, for reading. attributes: CreateFileW's."""
        handle = _create_file(os.fspath(path), _GENERIC_READ, _SHARE_ALL, None, _OPEN_EXISTING, attributes, None)
        if handle == _INVALID:
            raise told(ctypes.get_last_error(), path)
        return msvcrt.open_osfhandle(handle, os.O_RDONLY | os.O_BINARY | os.O_NOINHERIT)

    def told(code: int, path: str | os.PathLike[str]) -> OSError:
        """One of Windows' errors, of a call that had this file's path."""
        return OSError(None, ctypes.FormatError(code).strip(), os.fspath(path), code)

else:

    def shared(path: str | os.PathLike[str], _flags: int) -> int:
        """An `opener` of mode `rb`: a descriptor of the file, for reading."""
        return os.open(path, os.O_RDONLY)
