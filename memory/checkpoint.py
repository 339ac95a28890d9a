"""One or several weight files as one checkpoint: tensors by name, their bytes from whichever file
holds them.

There are two ways to the bytes. `read_into` copies, checks before and after every piece, and cannot
give wrong bytes or crash. It serves pinned buffers, disks that come and go, and everything the CPU
touches. `view` copies nothing. It serves memory that the GPU reads by itself. A view is checked
when it is made and no later, so call `check` again after the last byte was used. If another program
cuts the file in between, touching a lost page through a view ends the process (SIGBUS) on Linux and
macOS. Registering a view's pages with the driver pins them, which closes that gap: from then on a
cut file gives old bytes, and `check` tells. Windows cuts no file that is mapped.

`close` stops new reads and views. A read under way ends well. A view that was handed out stays
readable, and its mapping in place, until the last reference to it is gone, so that a close
elsewhere crashes nothing. On Windows such a file cannot be deleted or replaced until then; `mapped`
tells.

A changed file is not read any more. If it still holds the same checkpoint (touched, or brought
back), `reopen` goes on with it. For that the header must be the same, and so must the bytes of all
tensors that were read to stay in memory (`keep`), so that one model never has parts of two files.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from .file import BadFile, Extent, WeightFile
from .formats import gguf_split
from .open_file import REMEDY, FileChanged, OpenFile

Buffer = bytearray | memoryview | torch.Tensor


class Checkpoint:
    """Open weight files. `Checkpoint.open(paths)` makes one; all methods may be called from any
    thread."""

    def __init__(self, files: Iterable[OpenFile], part: int = 0) -> None:
        """part: of its extents."""
        self.part = part
        self._open = tuple(files)
        self._home: dict[str, tuple[Extent, OpenFile]] = {}
        self.files: tuple[WeightFile, ...] = tuple(_numbered(file.header, part) for file in self._open)
        for file, header in zip(self._open, self.files, strict=True):
            for name, extent in header.extents.items():
                if name in self._home:
                    raise BadFile(_clash(name, self._home[name][1].path, file.path))
                self._home[name] = (extent, file)
        self.extents: Mapping[str, Extent] = MappingProxyType({name: home[0] for name, home in self._home.items()})
        self._kept: dict[Extent, int] = {}  # checksums of what stays in memory

    @classmethod
    def open(cls, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], part: int = 0) -> Checkpoint:
        """Open and check the files at `paths`. On any fault raises `BadFile` and leaves nothing
        open.

        One path of a model in several GGUF files opens all of them; the first file's header is then
        that of the whole model.

        part: of its extents, for one of several checkpoints that are one source
        """
        several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if not several:
            raise ValueError("a checkpoint needs at least one file")
        files: list[OpenFile] = []
        try:
            for path in several:
                files.append(OpenFile(Path(path)))  # noqa: PERF401 - those already open must be closed if one fails
            if len(files) == 1:
                given = files[0]
                all_parts = gguf_split.parts(given.header)
                for i, path in enumerate(all_parts):
                    if path != given.path:
                        files.insert(i, OpenFile(path))
                if len(files) > 1:
                    return cls._of_parts(files, part)
            return cls(files, part)
        except BaseException:
            for file in files:
                file.close()
            raise

    @classmethod
    def _of_parts(cls, files: Sequence[OpenFile], part: int) -> Checkpoint:
        gguf_split.check_together([file.header for file in files])
        made = cls(files, part)
        made.files = (dataclasses.replace(made.files[0], extents=made.extents), *made.files[1:])
        return made

    @property
    def label(self) -> str:
        """Its name in messages: its first file's path."""
        return str(self.files[0].path)

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents.values())

    @property
    def mapped(self) -> bool:
        """Whether any file is mapped: from the first `view` until closed and the last view is
        gone."""
        return any(file.mapped for file in self._open)

    def file_of(self, extent: Extent) -> WeightFile:
        return self.home(extent).header

    def read_into(self, extent: Extent, buffer: Buffer, start: int | None = None) -> None:
        """Copy the extent's bytes into `buffer`: all of them, or from byte `start` as many as the
        buffer holds.

        The buffer is contiguous writable bytes; a torch tensor must be uint8 and on the CPU, pinned
        or not. After an error its content is undefined.
        """
        file = self.home(extent)
        with _flat(buffer) as target:
            begin = start or 0
            exact = len(target) == extent.nbytes if start is None else 0 <= start <= extent.nbytes - len(target)
            if not exact:
                raise ValueError(
                    f"{file.path}: tensor {extent.name!r} has {extent.nbytes} bytes; "
                    f"{len(target)} from byte {begin} are not what the buffer should hold"
                )
            file.read_into(target, extent.begin + begin)

    def read_rows(self, extent: Extent, buffer: Buffer, size: int, rows: Sequence[int]) -> None:
        """Copy the given rows of the extent, `size` bytes each, into `buffer`, which holds exactly
        these. The buffer is as for `read_into`."""
        file, most = self.home(extent), extent.nbytes // size if size else 0
        with _flat(buffer) as target:
            if len(target) != size * len(rows) or not all(0 <= row < most for row in rows):
                raise ValueError(
                    f"{file.path}: tensor {extent.name!r} has {most} rows of {size} bytes; others are asked for"
                )
            file.read_rows(target, size, [extent.begin + row * size for row in rows])

    def read(self, extent: Extent) -> torch.Tensor:
        """The extent's bytes as they are stored: uint8 [nbytes], on the CPU, the caller's own."""
        stored = torch.empty(extent.nbytes, dtype=torch.uint8)
        self.read_into(extent, stored)
        return stored

    def keep(self, extent: Extent) -> torch.Tensor:
        """`read` a tensor that stays in memory; `reopen` compares its checksum."""
        stored = self.read(extent)
        self._kept[extent] = _checksum(stored)
        return stored

    def view(self, extent: Extent) -> memoryview:
        """The extent's bytes where they lie in the page cache, read-only. The module's docstring
        says when not to use it."""
        return self.home(extent).view(extent.begin, extent.end)

    def check(self, extent: Extent | None = None) -> None:
        """Raise `FileChanged` unless the extent's file, or every file, is still the one that was
        opened."""
        for file in self._open if extent is None else [self.home(extent)]:
            file.check()

    @property
    def has_changed(self) -> bool:
        """Whether any file is no longer the one that was opened."""
        return any(file.has_changed for file in self._open)

    def reopen(self) -> None:
        """Go on with files that changed since they were opened.

        Raises `BadFile` if one is not what it was; that file and those behind it then stay as they
        were. No read may be under way. Existing mappings stay the old file's.
        """
        for at in [at for at, file in enumerate(self._open) if file.has_changed]:
            again = OpenFile(self._open[at].path)
            try:
                self._compare(self._open[at], again)
            except BaseException:
                again.close()
                raise
            self._go_on_with(at, again)

    def _compare(self, before: OpenFile, now: OpenFile) -> None:
        old, new = before.header, now.header
        same = old.extents == new.extents and old.metadata == new.metadata
        for extent, checksum in self._kept.items() if same else ():
            if self._home[extent.name][1] is before:
                stored = torch.empty(extent.nbytes, dtype=torch.uint8)
                with _flat(stored) as target:
                    now.read_into(target, extent.begin)
                same = same and _checksum(stored) == checksum
        if not same:
            raise FileChanged(f"{old.path}: holds another model than the one that was loaded from it. {REMEDY}")

    def _go_on_with(self, at: int, now: OpenFile) -> None:
        before = self._open[at]
        self._open = (*self._open[:at], now, *self._open[at + 1 :])
        self._home = {name: (extent, now if file is before else file) for name, (extent, file) in self._home.items()}
        before.close()

    def close(self) -> None:
        for file in self._open:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def home(self, extent: Extent) -> OpenFile:
        """The open file of an extent, or of some rows of one. Raises `ValueError` for another
        checkpoint's extent, which would silently give other bytes."""
        home = self._home.get(extent.name)
        if home is None or (home[0] is not extent and not home[0].holds(extent)):
            raise ValueError(f"tensor {extent.name!r} is not of this checkpoint")
        return home[1]


def _numbered(header: WeightFile, part: int) -> WeightFile:
    """The header with this part in its extents."""
    if not part:
        return header
    extents = {name: dataclasses.replace(extent, part=part) for name, extent in header.extents.items()}
    return dataclasses.replace(header, extents=MappingProxyType(extents))


def _clash(name: str, first: Path, second: Path) -> str:
    if first == second:
        return f"{first}: is given twice for one checkpoint. Name each file once."
    return (
        f"{second}: has a tensor {name[:120]!r}, and so has {first}. They are not parts of one checkpoint: "
        "choose only files that belong together."
    )


def _checksum(stored: torch.Tensor) -> int:
    array: Any = stored.numpy()
    return zlib.crc32(array)


def _flat(buffer: Buffer) -> memoryview:
    """The buffer's own memory as writable bytes in a row."""
    if isinstance(buffer, torch.Tensor):
        if buffer.dtype != torch.uint8 or buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError(
                f"the buffer must be contiguous uint8 on the CPU, not {buffer.dtype} on {buffer.device} "
                f"with strides {buffer.stride()}"
            )
        array: Any = buffer.numpy()
        view = memoryview(array)
    else:
        view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise ValueError("the buffer must be writable and contiguous")
    # memoryview casts no empty shapes
    return view.cast("B") if view.nbytes else memoryview(bytearray())
