"""A weight file as extents: which bytes of the file are which tensor.

This part is the same for every format; `formats` reads the headers. A header comes from a stranger,
so nothing in it is believed before it is checked, because later code turns these extents into
pointers. No tensor is loaded here.
"""

from __future__ import annotations

import reprlib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from .encoding import ENCODINGS, Encoding
from .shared_open import shared

# torch counts elements in signed 64-bit integers.
MAX_ELEMENTS = 2**63 - 1


class BadFile(ValueError):
    """A weight file that cannot be trusted. The message names the file, the tensor and what to
    do."""

    # shown by ComfyUI before the message; without it that would be a path of the user's disk
    __module__ = "fusestream"


@dataclass(frozen=True)
class Extent:
    """One tensor's place: its bytes are `[begin, end)` of the whole file.

    dtype  name of its encoding
    part   number of its checkpoint among several that are one source (`joined.py`)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    part: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def encoding(self) -> Encoding:
        return ENCODINGS[self.dtype]

    @property
    def is_packed(self) -> bool:
        """Whether it is stored in ggml's blocks; False for an encoding that is not known here."""
        return self.dtype in ENCODINGS and self.encoding.is_packed

    def rows(self, first: int, last: int) -> Extent:
        """The extent of rows `first` to `last` (exclusive) of a tensor that is not packed."""
        if self.is_packed or not 0 <= first <= last <= self.shape[0]:
            raise ValueError(
                f"tensor {self.name!r} of shape {list(self.shape)} has no rows {first} to {last} by themselves"
            )
        size = self.nbytes // self.shape[0] if self.shape[0] else 0
        at = self.begin + first * size
        return Extent(self.name, self.dtype, (last - first, *self.shape[1:]), at, at + (last - first) * size, self.part)

    def of_type(self, dtype: str) -> Extent:
        """The same bytes as numbers of another type of their size."""
        found = replace(self, dtype=dtype)
        if self.is_packed or found.is_packed or self.encoding.nbytes != found.encoding.nbytes:
            raise ValueError(f"tensor {self.name!r} of {self.dtype} has no numbers of {dtype} in its bytes")
        return found

    def holds(self, other: Extent) -> bool:
        """Whether `other` is this extent, or some rows of it, or these bytes as another type."""
        if self == other:
            return True
        mine, theirs = ((one.part, one.name, one.is_packed, one.shape[1:]) for one in (self, other))
        if mine != theirs or (self.is_packed and self.dtype != other.dtype):
            return False
        return self.begin <= other.begin <= other.end <= self.end


@dataclass(frozen=True)
class WeightFile:
    """A checked header: extents by name, in file order, and the metadata.

    metadata  all entries that are text
    values    of a GGUF file, all entries: bool, int, float, str or `gguf_values.Listed`
    """

    path: Path
    size: int
    extents: Mapping[str, Extent]
    metadata: Mapping[str, str]
    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def open_regular(path: Path) -> BinaryIO:
    """The file at `path`, opened for reading. The system's errors become `BadFile`."""
    with told_as_bad_file(path):
        # asked first: opening a pipe would wait for its other end
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadFile(f"{path}: is not a file. Choose the model's file itself.")
        return open(path, "rb", opener=shared)


@contextmanager
def told_as_bad_file(path: Path) -> Iterator[None]:
    """Turn the system's errors in this block into `BadFile`, with the file's name and what to look
    at."""
    try:
        yield
    except OSError as error:
        raise BadFile(
            f"{path}: cannot be read ({error.strerror or error}). Check the path, its permissions and its disk."
        ) from error


_brief = reprlib.Repr()
_brief.maxlist = _brief.maxdict = 8
_brief.maxstring = _brief.maxother = 120
_brief.maxlevel = 2


def brief(value: object) -> str:
    """A short form, for messages, of a value that may be megabytes long."""
    return _brief.repr(value)


def sized(nbytes: int) -> str:
    """A file's size, for messages: 1.42 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"
