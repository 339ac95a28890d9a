"""Small files that several processes read and write: each is replaced as a whole, in one step.

Windows refuses both sides for the moment in which the other has the file: to replace it, and to open
it. Such a refusal is no fault, so either is tried for five seconds: six processes that write one file
at once refuse each other for more than one.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Given = TypeVar("Given")

TRIES = 100 if os.name == "nt" else 1  # elsewhere a refusal stays
PAUSE = 0.05


def retrying(deed: Callable[[], Given]) -> Given:
    """What `deed` returns. Raises PermissionError if it is still refused at the last try."""
    for _ in range(TRIES - 1):
        try:
            return deed()
        except PermissionError:  # noqa: PERF203
            time.sleep(PAUSE)
    return deed()


def read_small(path: Path, most: int) -> bytes:
    """The whole of a plain file of `most` bytes at most; an OSError says what else it is. Nothing is
    waited for: nobody may ever write to a pipe."""
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no plain file")
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"it is larger than {most >> 20} MiB")
    return content


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_atomically(path: Path, content: bytes, partial: Path) -> None:
    """Write the file by way of `partial`, in the same folder: all of it is there or what was before,
    and nothing else is left."""
    try:
        partial.write_bytes(content)
        retrying(lambda: partial.replace(path))
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
