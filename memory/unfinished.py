"""A weight file that is written piece by piece, each where it belongs: the tensors' bytes are never together in RAM.

Whoever knows a format says which bytes come first and where each tensor goes. The file has its name only when it is whole: until
then it has another one beside it, and what goes wrong takes that away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

UNFINISHED = ".unfinished"

One = TypeVar("One", bound="UnfinishedFile")


class NotWritten(OSError):
    """A weight file could not be written. Nothing is left of it."""

    __module__ = "fusestream"


class UnfinishedFile:
    """
    head    the file's first bytes
    places  [begin, end) of each tensor, by name
    nbytes  of the whole file
    """

    def __init__(
        self, path: str | os.PathLike[str], head: bytes, places: Mapping[str, tuple[int, int]], nbytes: int
    ) -> None:
        self.path = Path(path)
        self.nbytes = nbytes
        self._unfinished = self.path.with_name(self.path.name + UNFINISHED)
        self._head = head
        self._places = dict(places)
        self._at: dict[str, int] = {}  # where the next piece of a tensor goes

    def __enter__(self: One) -> One:
        with self._told():
            free = shutil.disk_usage(self.path.parent).free
        if free < self.nbytes:
            raise NotWritten(
                f"{self.path}: needs {self.nbytes / 2**30:.2f} GiB, and its disk has {free / 2**30:.2f} GiB free. Make room there."
            )
        with self._told():
            self._file = self._unfinished.open("wb")
        try:
            with self._told():
                self._file.write(self._head)
        except BaseException:
            self._give_up()
            raise
        return self

    def append(self, name: str, piece: torch.Tensor) -> None:
        """The next piece of the tensor of this name: the bytes of a tensor on the CPU, of any type. The first comes first."""
        array: Any = piece.detach().contiguous().flatten().view(torch.uint8).numpy()
        begin, end = self._places[name]
        at = self._at.get(name, begin)
        if at + array.nbytes > end:
            raise ValueError(f"{name} has {end - begin} bytes, and {at + array.nbytes - begin} were to be written")
        with self._told():
            self._file.seek(at)
            self._file.write(memoryview(array))
        self._at[name] = at + array.nbytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._give_up()
            return
        try:
            missing = [name for name, (begin, end) in self._places.items() if self._at.get(name) != end]
            if missing:
                raise ValueError(f"{self.path}: nobody wrote {', '.join(sorted(missing)[:3])}")
            with self._told():
                self._file.truncate(self.nbytes)
                self._file.close()
                self._unfinished.replace(self.path)
        except BaseException:
            self._give_up()
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """The system's errors in this block become `NotWritten`."""
        try:
            yield
        except OSError as error:
            raise NotWritten(
                f"{self.path}: cannot be written ({error.strerror or error}). Look at its disk."
            ) from error

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):  # what is still buffered has no room either
            self._file.close()
        self._unfinished.unlink(missing_ok=True)
