"""Entries by key, on disk: one small JSON file per user, shared by every process.

Writers take a lock, read what is there, add their entry and replace the file in one step, so a reader always sees a
whole file and no writer loses another's entry. A file of nonsense is said once, then treated as empty: its entries are
made again. A file that may not be read stays as it is. One that cannot be written (a read-only home) only costs making
them again next time.

The newest entries stand at the end, and only so many are kept: cards, drivers and versions come and go, and whatever lies
at this path, reading it takes a moment at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from .atomic_file import read_small, retrying, write_atomically
from .ledger import LEDGER

Entry = TypeVar("Entry")

FORMAT = 1
MOST_ENTRIES = 4096  # a video asks for some dozens
MOST_BYTES = 4 << 20
LONGEST_REASON = 200


class KeptEntries(Generic[Entry]):
    """A class of its own for each kind of entry: `title` is what the file calls them, `words` what a message does."""

    title = ""
    words = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_at: tuple[int, int] | None = None
        self._entries: dict[str, Entry] = {}

    def read(self, written: Any) -> Entry:
        """An entry of what JSON has of it. Raises one of JSON's or Python's own errors where it is none."""
        raise NotImplementedError

    def written(self, entry: Entry) -> Any:
        """What JSON shall have of an entry."""
        raise NotImplementedError

    def get(self, key: str) -> Entry | None:
        """The entry, reading the file again only if it changed."""
        try:
            found = self.path.stat()
        except OSError:
            return self._entries.get(key)
        if self._read_at != (found.st_mtime_ns, found.st_size):
            try:
                self._entries = {**self._entries, **self._load()}
            except PermissionError as error:
                LEDGER.say_once(f"{self.path} cannot be read now ({error.strerror}); it is tried again")
                return self._entries.get(key)
            self._read_at = (found.st_mtime_ns, found.st_size)
        return self._entries.get(key)

    def at_hand(self, key: str) -> Entry | None:
        """The entry as far as it is known without looking at the disk."""
        return self._entries.get(key)

    @property
    def entries(self) -> list[tuple[str, Entry]]:
        """All that are known without looking at the disk."""
        return list(self._entries.items())

    def put(self, key: str, entry: Entry) -> None:
        self._entries[key] = entry
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                entries = self._load()
                entries.pop(key, None)  # it is the newest now
                text = self._as_text({**entries, key: entry})
                partial = self.path.with_name(f"{self.path.name}.partial")  # over what one left who was killed
                write_atomically(self.path, text.encode(), partial)
        except OSError as error:
            LEDGER.say_once(
                f"{self.words[:1].upper()}{self.words[1:]} are not kept: {self.path} cannot be written ({error})"
            )

    def _load(self) -> dict[str, Entry]:
        """What the file holds. Raises PermissionError where it is kept from us: its entries are still there, then."""
        try:
            data = json.loads(retrying(lambda: read_small(self.path, MOST_BYTES)).decode("utf-8"))
            if data["format"] != FORMAT:
                return {}  # another version of the pack wrote it: not ours to read, and ours to replace
            newest = list(data[self.title].items())[-MOST_ENTRIES:]
            return {str(key): self.read(written) for key, written in newest}
        except FileNotFoundError:
            return {}
        except PermissionError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"  # in short: the repr of some holds all that could not be read
            if len(reason) > LONGEST_REASON:
                reason = f"{reason[:LONGEST_REASON]}..."
            LEDGER.say_once(f"{self.path} cannot be read ({reason}); its {self.words} are made again")
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """An advisory lock that the system drops if its holder dies."""
        with (self.path.with_name(self.path.name + ".lock")).open("a+b") as file:
            _lock(file.fileno())
            try:
                yield
            finally:
                _unlock(file.fileno())

    def _as_text(self, entries: dict[str, Entry]) -> str:
        """A line for each entry; as many of the last ones as may be kept."""
        lines: list[str] = []
        room = MOST_BYTES - 100  # beside what stands around them
        for key, entry in reversed(list(entries.items())[-MOST_ENTRIES:]):
            line = f"{json.dumps(key)}: {json.dumps(self.written(entry))}"
            room -= len(line) + 2
            if room < 0:
                break
            lines.append(line)
        return f'{{"format": {FORMAT}, "{self.title}": {{\n' + ",\n".join(reversed(lines)) + "\n}}\n"


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        while True:  # LK_LOCK itself gives up after ten seconds
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
                return
            except OSError:  # noqa: PERF203
                time.sleep(0.05)

    def _unlock(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
