"""Opens a file for reads past the system's page cache: `O_DIRECT` on Linux,
`FILE_FLAG_NO_BUFFERING` on Windows.

Such a handle reads whole blocks, from places that are whole blocks, into memory that begins at a
whole page. At the file's end it gives what there is. Others may rename or delete the file meanwhile,
as with `shared_open.py`.
"""

from __future__ import annotations

import os
import sys

from ..shared_open import shared

BLOCK = 4096  # what Linux' file systems ask for, and a multiple of the usual sectors

if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    from ..shared_open import told

    SUPPORTED = True
    _NO_BUFFERING = 0x20000000  # FILE_FLAG_NO_BUFFERING
    _LONGEST_PATH = 1 << 15

    _kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    _volume_of = _kernel32.GetVolumePathNameW
    _volume_of.argtypes = [wintypes.LPCWSTR, wintypes.LPWSTR, wintypes.DWORD]
    _disk_of = _kernel32.GetDiskFreeSpaceW
    _disk_of.argtypes = [wintypes.LPCWSTR, *[ctypes.POINTER(wintypes.DWORD)] * 4]

    def unbuffered(path: str | os.PathLike[str], flags: int) -> int:
        """An `opener` of mode `rb`: a descriptor of the file, for reads of whole blocks. Raises
        OSError if they cannot be done on its disk."""
        sector = sector_bytes(path)
        if BLOCK % sector:
            raise OSError(f"the disk has sectors of {sector} bytes, and blocks of {BLOCK} are read")
        return shared(path, flags, _NO_BUFFERING)

    def sector_bytes(path: str | os.PathLike[str]) -> int:
        """The sectors of the volume on which the file lies, links followed: such reads are whole
        ones."""
        real = os.path.realpath(path)
        root, nbytes, unused = ctypes.create_unicode_buffer(_LONGEST_PATH), wintypes.DWORD(), wintypes.DWORD()
        if not _volume_of(real, root, _LONGEST_PATH) or not _disk_of(root.value, unused, nbytes, unused, unused):
            raise told(ctypes.get_last_error(), path)
        return nbytes.value

elif sys.platform == "linux":
    SUPPORTED = True

    def unbuffered(path: str | os.PathLike[str], _flags: int) -> int:
        """An `opener` of mode `rb`: a descriptor of the file, for reads of whole blocks. Raises
        OSError if the file system cannot do it."""
        return os.open(path, os.O_RDONLY | os.O_DIRECT)

else:
    SUPPORTED = False

    def unbuffered(path: str | os.PathLike[str], _flags: int) -> int:
        """Raises OSError."""
        raise OSError(None, "this system has no reads past its page cache", os.fspath(path))
