"""A weight file written piece by piece, each at its place: the tensors' bytes are never together in
RAM.

The caller, who knows the format, says which bytes come first and where each tensor goes. The file
gets its name only when it is whole. Until then it has another name beside it, and is deleted if
anything goes wrong.
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
        self._at: dict[str, int] = {}  # place of a tensor's next piece

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
        """Write the next piece of the tensor of this name: a tensor on the CPU, of any type, as its
        bytes. Pieces come in order."""
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
            with self._told(
                f"It is complete but for its name: look whether a program, or a loaded model, has {self.path.name} open."
            ):
                self._unfinished.replace(self.path)
        except BaseException:
            self._give_up()
            raise

    @contextlib.contextmanager
    def _told(self, remedy: str = "Look at its disk.") -> Iterator[None]:
        """Turn the system's errors in this block into `NotWritten`, with what to do."""
        try:
            yield
        except OSError as error:
            raise NotWritten(f"{self.path}: cannot be written ({error.strerror or error}). {remedy}") from error

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):  # buffered bytes have no room either
            self._file.close()
        self._unfinished.unlink(missing_ok=True)
