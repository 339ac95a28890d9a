"""Set-up in steps that survive a kill at any moment.

A step is skipped when its stamp holds the key of its inputs; the stamp is written, atomically, after the step has
finished. A step must therefore be repeatable after it was cut off anywhere. One lock per bed keeps two set-ups apart.
On Linux the children inherit the lock, so that a `pip` which outlives a killed `dev.py` is waited for, not raced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_lock_fd: int | None = None
_line_for_all: str | None = None  # said instead of what the steps say; empty once it has been


class SetupFailed(RuntimeError):
    """A step failed. The message says which, why and what to do."""


def key_of(*parts: str | Path) -> str:
    """A short hash of texts and file contents."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def once(stamp: Path, key: str, title: str, action: Callable[[], None]) -> None:
    """Run `action` unless `stamp` says it was done for this `key`."""
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == key:
        return
    progress(title)
    start = time.monotonic()
    action()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(stamp, key)
    progress(f"  done in {time.monotonic() - start:.0f} s")


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def say(text: str) -> None:
    print(f"[fusestream] {text}", flush=True)


def progress(text: str) -> None:
    """Say what a step does; under `in_one_line` its line, once."""
    global _line_for_all  # noqa: PLW0603 - the one output of this process
    if _line_for_all is None:
        say(text)
    elif _line_for_all:
        print(_line_for_all, flush=True)
        _line_for_all = ""


@contextlib.contextmanager
def in_one_line(line: str) -> Iterator[None]:
    """One line for all the steps that are to be done; none where all of them are done."""
    global _line_for_all  # noqa: PLW0603 - as above
    _line_for_all = line
    try:
        yield
    finally:
        _line_for_all = None


def run(command: Sequence[str | Path], step: str, remedy: str, env: dict[str, str] | None = None) -> None:
    """Run a command of a step; on failure raise `SetupFailed` with the end of its output and the remedy."""
    words = [str(word) for word in command]
    keep = () if _lock_fd is None or os.name == "nt" else (_lock_fd,)
    try:
        done = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=keep,
            env=env,
            check=False,
        )
    except OSError as error:
        raise SetupFailed(f"{step}: cannot run {words[0]} ({error}). {remedy}") from error
    if done.returncode:
        tail = "\n".join("    " + line for line in done.stdout.strip().splitlines()[-15:])
        raise SetupFailed(f"{step} failed (exit {done.returncode}):\n{tail}\n{remedy}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file lock at `path`. The system drops it when the last process holding it ends, however it ends."""
    global _lock_fd  # noqa: PLW0603 - the one lock of this process, inherited by the commands of its steps
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _try_lock(fd):
            say("another set-up is still running; waiting for it")
            while not _try_lock(fd):
                time.sleep(0.5)
        _lock_fd = fd
        yield
    finally:
        _lock_fd = None
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
